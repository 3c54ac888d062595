"""Segments on their way down: copies in memory, until each lower tier has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import anyio

from ..errors import StateError, TierError, TierFull, TierUnavailable
from .abc import TierStore
from .quarantine import Quarantine
from .segments import SegmentKey

_BATCH = 16
"""Most segments in one call: enough to spread the latency of a far tier, few enough to see progress."""

_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 5.0


class _Entry:
    def __init__(self, key: SegmentKey, data: bytes, left: int) -> None:
        self.key = key
        self.data = data
        self.left = left  # tiers that do not have it yet


class WriteBehind:
    """A queue per lower tier, which share their copies and one limit.

    The copies are what keeps segments from being lost: whatever the tiers above evict, they can be read here until every tier
    below has taken them. A tier that fails is tried again, after 0.1 s, then twice as long up to 5 s, for as long as it takes.
    One that has no room is passed over where there is another below it.

    Args:
        tiers: fast to slow; the last one holds everything.
        limit_bytes: of the copies. One call may go beyond it, when there is nothing else.
    """

    def __init__(self, tiers: Sequence[TierStore], limit_bytes: int) -> None:
        self._tiers = tiers
        self._limit = limit_bytes
        self._bytes = 0
        self._entries: dict[SegmentKey, _Entry] = {}
        self._queues: list[dict[SegmentKey, _Entry]] = [{} for _ in tiers]
        self._writing: list[list[_Entry]] = [[] for _ in tiers]
        self._trouble: list[TierError | None] = [None for _ in tiers]
        self._failures = [0 for _ in tiers]
        self._quarantine = Quarantine()
        self._changed = anyio.Event()
        self._hurry = anyio.Event()
        self._closed = False

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: SegmentKey) -> bytes | None:
        """The bytes of a segment that is on its way."""
        entry = self._entries.get(key)
        return None if entry is None else entry.data

    async def reserve(self, count: int) -> None:
        """Wait until there is room for `count` bytes, and take it.

        Raises:
            TierUnavailable, TierFull: there is none, and a tier that fails is why.
            StateError: closed meanwhile.
        """
        while self._bytes and self._bytes + count > self._limit:
            self._raise_trouble(f"{self._bytes} bytes wait to be written below, of at most {self._limit}")
            await self._wait()
        self._bytes += count

    def release(self, count: int) -> None:
        """Give back room that was reserved."""
        self._bytes -= count
        self._notify()

    def add(self, key: SegmentKey, data: memoryview, first: int) -> bool:
        """Queue a copy of a segment for the tiers from `first` on, in room that was reserved. False if it is there already."""
        if key in self._entries:
            return False
        entry = _Entry(key, bytes(data), len(self._tiers) - first)
        self._entries[key] = entry
        for queue in self._queues[first:]:
            queue[key] = entry
        self._notify()
        return True

    async def remove(self, keys: Iterable[SegmentKey]) -> None:
        """Forget segments. When this returns, nothing is writing them any more, and nothing will."""
        removed = set(keys)
        for key in removed:
            entry = self._entries.get(key)
            if entry is not None:
                self._drop(entry)
        self._notify()
        while any(entry.key in removed for batch in self._writing for entry in batch):
            await self._changed.wait()

    async def flush(self) -> None:
        """Wait until nothing is on its way. Tiers that have failed are tried at once; raises `TierUnavailable` or `TierFull` if
        one fails again."""
        before = list(self._failures)
        self._hurry.set()
        self._hurry = anyio.Event()
        while self._entries:
            self._raise_trouble(f"{len(self._entries)} segments wait to be written below", before)
            await self._wait()

    def close(self) -> None:
        """Raise `StateError` from `reserve` and `flush`."""
        self._closed = True
        self._notify()

    async def run(self, number: int) -> None:
        """Write to one of the tiers, for ever."""
        queue = self._queues[number]
        pause_s = _FIRST_PAUSE_S
        most = size = min(self._tiers[number].traits.max_batch or _BATCH, _BATCH)
        while True:
            if not queue:
                await self._changed.wait()
                continue
            batch = list(islice(queue.values(), size))
            error = await self._write(number, batch)
            full = isinstance(error, TierFull)
            if full and len(batch) > 1:
                size = 1  # to find out which has no room
                continue
            size = most
            passed_over = full and number + 1 < len(self._tiers)
            self._trouble[number] = None if passed_over else error
            if error is None or passed_over:
                pause_s = _FIRST_PAUSE_S
                self._finish(queue, batch)
            else:
                self._failures[number] += 1
                self._notify()
                with anyio.move_on_after(pause_s):
                    await self._hurry.wait()
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _write(self, number: int, batch: list[_Entry]) -> TierError | None:
        tier = self._tiers[number]
        self._writing[number] = batch
        try:
            await tier.store([(entry.key, memoryview(entry.data)) for entry in batch])
        except TierError as error:
            return error
        except Exception as error:  # noqa: BLE001 - one that no store should raise reaches whoever flushes or finds no room
            return TierUnavailable.of(type(tier).__name__, error)
        finally:
            self._writing[number] = []
            for entry in batch:
                self._quarantine.hold(tier.unsettled, memoryview(entry.data))
            self._notify()
        return None

    def _finish(self, queue: dict[SegmentKey, _Entry], batch: list[_Entry]) -> None:
        for entry in batch:
            if queue.get(entry.key) is entry:  # else it was removed meanwhile
                del queue[entry.key]
                entry.left -= 1
                if not entry.left:
                    self._drop(entry)
        self._notify()

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        self._bytes -= len(entry.data)
        for queue in self._queues:
            queue.pop(entry.key, None)

    async def _wait(self) -> None:
        await self._changed.wait()
        if self._closed:
            raise StateError("the tiered store is closed; make a new one")

    def _raise_trouble(self, what: str, before: Sequence[int] | None = None) -> None:
        for number, error in enumerate(self._trouble):
            if error is not None and (before is None or self._failures[number] > before[number]):
                kind = TierFull if isinstance(error, TierFull) else TierUnavailable
                raise kind(f"{what}, since {type(self._tiers[number]).__name__} fails: {error}") from error

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
