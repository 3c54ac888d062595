"""Blocking calls of a store on threads: none outlives the call that lent it its buffers, nor uses the store after its end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio

from ..errors import StateError
from .threads import Proceed, in_thread

T = TypeVar("T")
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

        def counted(proceed: Proceed) -> T:
            def proceed_open() -> None:
                proceed()
                self.check()

            self.begin()
            try:
                return work(proceed_open)
            finally:
                self.end()

        return await in_thread(counted, limiter)

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
