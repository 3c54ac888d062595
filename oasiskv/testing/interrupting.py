"""Cancels a call at a chosen one of its suspensions, on any event loop: the same way each time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any

import anyio

_MOST_SUSPENSIONS = 200


class _Counted:
    """An awaitable that runs a coroutine and counts how often it hands control to the event loop."""

    def __init__(self, call: Coroutine[Any, Any, object], last: int, scope: anyio.CancelScope) -> None:
        self._call = call
        self._last = last
        self._scope = scope
        self.count = 0

    def __await__(self) -> Generator[Any, Any, object]:
        inner = self._call.__await__()
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                wish = inner.send(answer) if error is None else inner.throw(error)
            except StopIteration as end:
                return end.value
            self.count += 1
            if self.count == self._last:
                self._scope.cancel()
            answer = error = None
            try:
                answer = yield wish
            except BaseException as raised:  # noqa: BLE001 - it is the coroutine's, which is thrown into it above
                error = raised


async def interrupted(call: Callable[[], Coroutine[Any, Any, object]], at: int) -> bool:
    """Run a call and cancel it when it suspends for the `at`-th time; before it begins if that is 0.

    Returns whether it came so far. A call that is shielded, or that suspends no more, may still end as if it had not been
    cancelled; what it raises of its own passes.
    """
    with anyio.CancelScope() as scope:
        if at == 0:
            scope.cancel()
        counted = _Counted(call(), at, scope)
        await counted
    return counted.count >= at


async def at_every_suspension(
    call: Callable[[], Coroutine[Any, Any, object]], afterwards: Callable[[int], Coroutine[Any, Any, object]]
) -> None:
    """Interrupt a call at its first suspension, at its second, and so on until it ends before; each time await `afterwards`,
    which is told where it was.

    A call that suspends more than 200 times is interrupted at the first 200.
    """
    for at in range(_MOST_SUSPENSIONS):
        reached = await interrupted(call, at)
        await afterwards(at)
        if not reached:
            return


async def nothing(_: int) -> None:
    """For `afterwards`, where there is nothing to check in between."""
