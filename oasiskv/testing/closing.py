"""What calls on a store do that is closed, or closes: what the kits of tier stores and of metadata stores have in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from ..errors import StateError

Calls = Mapping[str, Callable[[], Awaitable[object]]]


async def require_refused(calls: Calls) -> None:
    """Each raises `StateError`, since its store is closed."""
    for name, call in calls.items():
        try:
            await call()
        except StateError:
            continue
        raise AssertionError(f"{name} worked on a closed store")


async def attempt(call: Callable[[], Awaitable[object]]) -> None:
    """Make a call that closing may overtake: it ends, or raises `StateError`."""
    try:
        await call()
    except StateError:
        return
