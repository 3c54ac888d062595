"""Reads slots from the tier store, and lets through what its checksum confirms."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .segment_writer import Segment, checksum
from .tiers.lane import TierLane
from .tiers.segments import Outcome, Read, SegmentLayout

_BULK_READS = 256
"""Slots that a single call asks for; each call has the whole timeout."""


@dataclass
class TierCounters:
    """What became of blocks that were not in the arena. Changed under the arena's lock."""

    fetched: int = 0
    missed: int = 0
    corrupt: int = 0
    failed: int = 0
    quarantined: int = 0


class Fetcher:
    """For one arena.

    Args:
        find: the stored segment that has a page, and which of its blocks that is; `None` where there is none. Called under
            the lock.
        lock: of the arena; not held while the store is asked.
    """

    def __init__(
        self,
        lane: TierLane,
        layout: SegmentLayout,
        find: Callable[[int], tuple[Segment, int] | None],
        lock: threading.RLock,
    ) -> None:
        self.counters = TierCounters()
        self._lane = lane
        self._layout = layout
        self._find = find
        self._lock = lock

    def fetch(self, layer: int, owners: np.ndarray, views: Sequence[memoryview], timeout_s: float, good: list[bool]) -> None:
        """Fill buffers with slots of a layer, each `page * kv_heads + head`, and set `good` for those that are right. Damage is
        read once more.

        Raises `TierUnavailable`; what is good by then stays good.
        """
        wanted: list[tuple[int, Read, list[int]]] = []
        with self._lock:
            for number, (owner, view) in enumerate(zip(owners.tolist(), views, strict=True)):
                page, head = divmod(owner, self._layout.kv_heads)
                found = self._find(page)
                if found is not None:
                    segment, block = found
                    read = Read(segment.key(layer), self._layout.offset(head, block), view)
                    wanted.append((number, read, segment.checksums[layer, :, head, block].tolist()))
        for start in range(0, len(wanted), _BULK_READS):
            again = self._try(wanted[start : start + _BULK_READS], timeout_s, good)
            if again:
                self._try(again, timeout_s, good)

    def _try(
        self, wanted: list[tuple[int, Read, list[int]]], timeout_s: float, good: list[bool]
    ) -> list[tuple[int, Read, list[int]]]:
        """Returns those that came back damaged."""
        outcomes = self._lane.load([read for _, read, _ in wanted], timeout_s)
        damaged = []
        missed = fetched = 0
        for (number, read, sums), outcome in zip(wanted, outcomes, strict=True):
            good[number] = outcome is Outcome.HIT and checksum(read.into) in sums
            fetched += good[number]
            missed += outcome is Outcome.MISS
            if outcome is not Outcome.MISS and not good[number]:
                damaged.append((number, read, sums))
        with self._lock:
            self.counters.fetched += fetched
            self.counters.missed += missed
            self.counters.corrupt += len(damaged)
        return [entry for entry in damaged if not self._lane.unsettled(entry[1].into)]
