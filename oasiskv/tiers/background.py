"""Tasks that outlive the call that starts them, and belong to no task of the caller."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import anyio

_STOP_S = 3.0
"""How long stopping waits for calls that shield themselves."""


class Background:
    """A task group in a task of its own, since one that is entered in `open` and left in `aclose` would tie both to the same
    task and to the same nesting of scopes. The tasks must not raise.

    On asyncio that is a plain task, on trio a system task: neither has a parent that it could outlive.
    """

    def __init__(self) -> None:
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, functions: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """Run these until `stop`."""

        async def run() -> None:
            try:
                with self._scope:
                    async with anyio.create_task_group() as tasks:
                        for function in functions:
                            tasks.start_soon(function)
            finally:
                self._ended.set()

        trio = sys.modules.get("trio")  # who runs on it has imported it
        if trio is not None and trio.lowlevel.in_trio_task():
            trio.lowlevel.spawn_system_task(run)
        else:
            self._task = asyncio.create_task(run())

    async def stop(self) -> None:
        """Cancel what runs and wait for its end, in a cancelled scope too, for 3 s at most: closing what it waits for is the
        caller's next step."""
        self._scope.cancel()
        with anyio.move_on_after(_STOP_S, shield=True):
            await self._ended.wait()
