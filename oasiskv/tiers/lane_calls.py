"""Calls of a tier lane whose callers wait, each no longer than it wants to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import anyio
import numpy

from ..errors import OasisError, StateError, WorkerError
from .lane_thread import LaneThread

T = TypeVar("T")

_GRACE_S = 0.05
"""How much longer than its time a caller waits for its call to be cancelled, which most stores do at once."""


class _Call(Generic[T]):
    """Something to await in the lane, on behalf of a thread that waits."""

    def __init__(self, action: Callable[[], Awaitable[T]], buffers: Sequence[memoryview]) -> None:
        self.action = action
        self.buffers = buffers
        self.scope: anyio.CancelScope | None = None
        self.late = False
        self.stuck = False
        self.result: T | None = None
        self.error: BaseException | None = None
        # The cheapest thing that threads can wait for: taken here, given back when the call has ended.
        self.ended = threading.Lock()
        self.ended.acquire()


class LaneCalls:
    """Runs calls in the lane, cancels those that are late, and remembers buffers that late ones still hold."""

    def __init__(self, thread: LaneThread) -> None:
        self._thread = thread
        self._lock = threading.Lock()
        self._calls: set[_Call[Any]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        thread.before_close.append(self._cancel_all)
        thread.at_end.append(self._end)

    def run(self, action: Callable[[], Awaitable[T]], buffers: Sequence[memoryview], timeout_s: float) -> T:
        """What the action returns.

        Raises:
            TimeoutError: it has not ended in time. It is cancelled, and its buffers are not to be used while `holds`.
            StateError: the lane is closed, or was meanwhile.
            WorkerError: an exception that no store should raise; its cause.
        """
        call = _Call(action, buffers)
        with self._lock:
            self._calls.add(call)
        if not self._thread.post(self._begin, call):
            self._end()
        try:
            if not call.ended.acquire(timeout=timeout_s):
                self._cancel(call)
                if not call.ended.acquire(timeout=_GRACE_S) or (call.error is None and call.result is None):
                    raise TimeoutError
        except BaseException:  # KeyboardInterrupt too: the call must not go on as if somebody waited
            self._cancel(call)
            raise
        if isinstance(call.error, OasisError):
            raise call.error
        if call.error is not None:
            raise WorkerError.of("the tier store", call.error)
        if call.result is None:
            raise StateError("the tier lane is closed; make a new one")
        return call.result

    def _begin(self, call: _Call[T]) -> None:
        if not self._thread.stopping:  # else `_end` follows
            # A bare task costs half of what one in a task group does, which is felt in every load.
            task = asyncio.create_task(self._serve(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _cancel_all(self) -> None:
        with self._lock:
            left = list(self._calls)
        for call in left:
            call.late = True  # for those whose tasks have not begun
            self._cancel_scope(call)
        try:
            if self._tasks:
                await asyncio.wait(self._tasks)
        except asyncio.CancelledError:
            # The end of the loop will tear these tasks from what they shield, which goes on: their buffers stay unsettled.
            for call in left:
                call.stuck = True
            raise

    def _cancel(self, call: _Call[T]) -> None:
        call.late = True
        self._thread.post(self._cancel_scope, call)

    def _cancel_scope(self, call: _Call[T]) -> None:
        if call.scope is not None:
            call.scope.cancel()

    async def _serve(self, call: _Call[T]) -> None:
        try:
            # Cancelled by its scope, never as a task: stores shield what must not be cut short, and asyncio's own cancellation
            # goes through anyio's shields.
            with anyio.CancelScope() as call.scope:
                if not call.late:
                    call.result = await call.action()
        except BaseException as error:  # noqa: BLE001 - it reaches the caller
            call.error = error
        finally:
            self._ended(call)

    def _ended(self, call: _Call[T]) -> None:
        with self._lock:
            if call in self._calls and not call.stuck:
                self._calls.remove(call)
                call.ended.release()

    def holds(self, buffer: memoryview) -> bool:
        """Whether a call that was late has not let go of this memory yet."""
        with self._lock:
            held = [part for call in self._calls if call.late for part in call.buffers]
        if not held:
            return False
        begin, end = _span(buffer)
        return any(low < end and begin < high for low, high in map(_span, held))

    def _end(self) -> None:
        """Release the callers that are left when the lane has ended."""
        with self._lock:
            left = list(self._calls)
        for call in left:
            self._ended(call)


def _span(buffer: memoryview) -> tuple[int, int]:
    address = numpy.frombuffer(buffer, numpy.uint8).__array_interface__["data"][0]
    return address, address + buffer.nbytes
