"""One thread with an event loop, in which a tier store lives from its opening to its closing."""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
from anyio.abc import TaskGroup

from ..errors import OasisError, StateError, TierUnavailable, WorkerError
from .abc import TierStore

CLOSE_S = 5.0
"""How long a store may take to close."""


class LaneThread:
    """Opens the store in its own thread and waits for that. Raises what `open` raises, and `TierUnavailable` if it is late."""

    def __init__(self, store: TierStore, open_timeout_s: float) -> None:
        self._store = store
        self._open_timeout_s = open_timeout_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._alive = True
        self._opened = threading.Event()
        self._failure: BaseException | None = None
        self.stopping = False
        self.before_close: list[Callable[[], Awaitable[None]]] = []
        self.at_end: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="oasiskv-tier", daemon=True)
        self._thread.start()
        self._opened.wait()
        self.raise_failure()

    def _run(self) -> None:
        try:
            # asyncio, since there is nobody to choose: a thread of our own has the loop of our choice.
            anyio.run(self._main, backend="asyncio")
        except BaseException as error:  # noqa: BLE001 - it reaches whoever opens, calls or closes the lane
            self._failure = error
        finally:
            self._opened.set()
            for function in self.at_end:
                function()

    tasks: TaskGroup

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()  # what is posted sees this thread's context, not that of its caller
        self._stop = anyio.Event()
        try:
            # One scope for the whole life, whose deadline moves: a scope around `open` alone could not be left before the task
            # group that a store may enter there.
            with anyio.CancelScope(deadline=anyio.current_time() + self._open_timeout_s) as life:
                async with self._store:
                    life.deadline = math.inf
                    try:
                        async with anyio.create_task_group() as self.tasks:
                            self._opened.set()
                            await self._stop.wait()
                            self.tasks.cancel_scope.cancel()
                    finally:
                        self.stopping = True
                        life.deadline = anyio.current_time() + CLOSE_S
                        for function in self.before_close:
                            await function()
        finally:
            with self._lock:
                self._alive = False
        if life.cancelled_caught:
            late, limit_s = ("close", CLOSE_S) if self._opened.is_set() else ("open", self._open_timeout_s)
            raise TierUnavailable(f"the tier store did not {late} within {limit_s:g} s; look at its medium or its peer")

    def post(self, function: Callable[..., object], *arguments: object) -> bool:
        """Run something in the lane, soon; false if the lane has ended. Callable from any thread, never blocks."""
        with self._lock:
            if self._alive:
                self._loop.call_soon_threadsafe(function, *arguments, context=self._context)
            return self._alive

    def start(self, function: Callable[..., Coroutine[Any, Any, None]], *arguments: object) -> bool:
        """Start a task, in the lane; false while it stops."""
        if self.tasks.cancel_scope.cancel_called:
            return False
        self.tasks.start_soon(function, *arguments)
        return True

    @property
    def alive(self) -> bool:
        """Whether the loop runs what is posted."""
        return self._alive

    @property
    def forked(self) -> bool:
        """Whether this is a child process, which has no such thread."""
        return os.getpid() != self._pid

    def check_caller(self) -> None:
        """Raises `StateError` for those whom waiting for the lane would hang: its own thread, and forked children."""
        if self.forked:
            raise StateError("a tier lane does not survive a fork; make a new one in the child, or start it by spawn")
        if threading.get_ident() == self._thread.ident:
            raise StateError("this call waits for the tier lane and was made in it, by a callback; make it in another thread")

    def stop(self) -> None:
        """Cancel what runs and close the store. Raises `WorkerError` if that does not end, and what has gone wrong."""
        self.post(self._stop.set)
        self._thread.join(CLOSE_S + 1)
        if self._thread.is_alive():
            raise WorkerError("the tier store does not let go of a call; its thread is left behind until the process ends")
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises, once, what has ended the lane."""
        error, self._failure = self._failure, None
        if isinstance(error, OasisError):
            raise error
        if error is not None:
            raise WorkerError.of("the lane of the tier store", error)
