"""Blocking calls of a store on threads: none outlives the call that lent it its buffers, nor uses the store after its end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread

from ..errors import StateError

T = TypeVar("T")
Proceed = Callable[[], None]
"""What work calls between its parts. It raises when work must stop: its store is closed, or its caller was cancelled."""

_LOOK_AGAIN_S = 0.001


class Calls:
    """The calls of one store, in the process that opened it.

    Args:
        what: names the store in errors.
        release: gives back what the calls use. It is called once, by `close` or by the last call that ends after it.
    """

    def __init__(self, what: str, release: Callable[[], None]) -> None:
        self._what = what
        self._release = release
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._running = 0

    def check(self) -> None:
        """Raises `StateError` after `close`, and in a forked child, whose copy of the store knows nothing of the parent's."""
        if os.getpid() != self._pid:
            raise StateError(f"{self._what} was opened by process {self._pid}, and this is a fork of it; open another one here")
        if self._closed:
            raise StateError(f"{self._what} is closed; make a new one")

    async def run(self, work: Callable[[Proceed], T], limiter: anyio.CapacityLimiter) -> T:
        """Do work on a thread. Raises `StateError`, and whatever the work raises."""
        self.check()
        call = _Call(self, work)
        try:
            return await anyio.to_thread.run_sync(call.run, limiter=limiter, abandon_on_cancel=False)
        except BaseException:
            # anyio waits for the thread before it lets a cancellation through, but not before one by `asyncio.Task.cancel`.
            call.stop()
            while call.running:
                try:
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(_LOOK_AGAIN_S)
                except anyio.get_cancelled_exc_class():
                    continue  # the first one is raised below
            raise

    async def close(self, patience_s: float) -> None:
        """Make calls stop, and wait for them for a time. Idempotent. A forked child has nothing to close."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            first, self._closed = not self._closed, True
            idle = not self._running
        if first and idle:
            self._release()
        with anyio.move_on_after(patience_s):
            while self._running:
                await anyio.sleep(_LOOK_AGAIN_S)

    def begin(self) -> None:
        """Count a call. Raises `StateError`."""
        with self._lock:
            self.check()
            self._running += 1

    def end(self) -> None:
        """Count it no more."""
        with self._lock:
            self._running -= 1
            last = self._closed and not self._running
        if last:
            self._release()


class _Call(Generic[T]):
    """One piece of work, which is either stopped before it begins, or runs until it ends or proceeds no further."""

    def __init__(self, calls: Calls, work: Callable[[Proceed], T]) -> None:
        self._calls = calls
        self._work = work
        self._lock = threading.Lock()
        self._stopped = False
        self.running = False

    def run(self) -> T:
        with self._lock:
            self._check()
            self.running = True
        try:
            self._calls.begin()
            try:
                return self._work(self._proceed)
            finally:
                self._calls.end()
        finally:
            self.running = False

    def stop(self) -> None:
        with self._lock:
            self._stopped = True

    def _proceed(self) -> None:
        anyio.from_thread.check_cancelled()
        self._calls.check()
        self._check()

    def _check(self) -> None:
        if self._stopped:
            raise StateError("the call has been cancelled")  # nobody hears it
