"""Buffers that are written after their call is over, as transports do whose peer resumes after a timeout."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np


def _span(buffer: memoryview) -> tuple[int, int]:
    """Where a buffer begins and ends in memory."""
    if not buffer.nbytes:
        return (0, 0)
    start = int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
    return (start, start + buffer.nbytes)


class LateWrites:
    """Writes that are due later, on threads of their own, and which buffers they will touch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[threading.Timer, list[tuple[int, int]]] = {}

    def plan(self, writes: Sequence[tuple[memoryview, bytes]], delay_s: float) -> None:
        """Write into these buffers after `delay_s` seconds."""

        def strike() -> None:
            with self._lock:
                if self._due.pop(timer, None) is not None:
                    for buffer, data in writes:
                        buffer[: len(data)] = data

        timer = threading.Timer(delay_s, strike)
        timer.daemon = True
        with self._lock:
            self._due[timer] = [_span(buffer) for buffer, _ in writes]
        timer.start()

    def touches(self, buffer: memoryview) -> bool:
        """Whether a write that is due overlaps this buffer. Any thread may ask."""
        start, end = _span(buffer)
        with self._lock:
            return any(start < theirs[1] and theirs[0] < end for spans in self._due.values() for theirs in spans)

    def cancel(self) -> list[threading.Timer]:
        """Forget what is due. Returns the threads, to be joined."""
        with self._lock:
            timers = list(self._due)
            self._due.clear()
        for timer in timers:
            timer.cancel()
        return timers
