"""Blocking work of a store on a thread, which has ended when the call has, however that ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread

from ..errors import StateError

T = TypeVar("T")
Proceed = Callable[[], None]
"""What work may call between its parts. It raises when the caller was cancelled."""

_LOOK_AGAIN_S = 0.001


async def in_thread(work: Callable[[Proceed], T], limiter: anyio.CapacityLimiter | None = None) -> T:
    """Do work on a thread, and return or raise what it does; under asyncio and trio.

    `anyio.to_thread.run_sync` lets no cancellation through before the thread has ended, but `asyncio.Task.cancel`, and with it
    `asyncio.timeout` and `wait_for`, breaks through its shield: the thread would go on with buffers that are the caller's
    again. This waits all the same.
    """
    call = _Call(work)
    try:
        return await anyio.to_thread.run_sync(call.run, limiter=limiter, abandon_on_cancel=False)
    except BaseException:
        call.stop()
        while call.running:
            try:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(_LOOK_AGAIN_S)
            except anyio.get_cancelled_exc_class():
                continue  # the first one is raised below
        raise


class _Call(Generic[T]):
    """One piece of work, which is either stopped before it begins, or runs until it ends or proceeds no further."""

    def __init__(self, work: Callable[[Proceed], T]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._stopped = False
        self.running = False

    def run(self) -> T:
        with self._lock:
            self._check()
            self.running = True
        try:
            return self._work(self._proceed)
        finally:
            self.running = False

    def stop(self) -> None:
        with self._lock:
            self._stopped = True

    def _proceed(self) -> None:
        anyio.from_thread.check_cancelled()
        self._check()

    def _check(self) -> None:
        if self._stopped:
            raise StateError("the call has been cancelled")  # nobody hears it
