"""Asks a store that has failed until it answers."""

from __future__ import annotations

import anyio

from .abc import TierStore
from .breaker import Breaker
from .segments import Read, SegmentKey

_PATIENCE_S = 1.0
"""A store that takes longer to read one slot is as good as dead for decoding."""


class Probe:
    """Closes the breaker of a store when that can read a slot again."""

    def __init__(self, store: TierStore, breaker: Breaker) -> None:
        self._store = store
        self._breaker = breaker
        self._scratch: list[memoryview] = []

    async def run(self, key: SegmentKey) -> None:
        """Ask for the first slot of a key that the store has failed on; whatever it says of it is an answer."""
        while True:
            await anyio.sleep(self._breaker.back_off_s())
            scratch = next((buffer for buffer in self._scratch if not self._store.unsettled(buffer)), None)
            if scratch is None:
                scratch = memoryview(bytearray(self._store.layout.slot_bytes))
                self._scratch.append(scratch)
            try:
                with anyio.move_on_after(_PATIENCE_S):
                    await self._store.load([Read(key, 0, scratch)])
                    return self._breaker.close()
            except Exception:  # noqa: BLE001 - still dead, which is what the open breaker says
                pass
