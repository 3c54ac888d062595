"""Keeps memory alive that a store may still touch."""

from __future__ import annotations

from collections.abc import Callable

Unsettled = Callable[[memoryview], bool]


class Quarantine:
    """Buffers that calls have ended with and that transports have not."""

    def __init__(self) -> None:
        self._held: list[tuple[Unsettled, memoryview]] = []

    def hold(self, unsettled: Unsettled, buffer: memoryview) -> None:
        """Keep a buffer for as long as it is unsettled."""
        self._held = [entry for entry in self._held if entry[0](entry[1])]
        if unsettled(buffer):
            self._held.append((unsettled, buffer))
