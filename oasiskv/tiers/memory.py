"""Segments in this process's memory: the model that other tier stores are tested against, and a tier for tests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Self

from ..errors import StateError, TierFull
from .abc import TierStore
from .checks import check_objects, check_reads
from .location import Location
from .segments import Outcome, Read, SegmentKey, SegmentLayout, TierTraits

_TRAITS = TierTraits()


class MemoryStore(TierStore):
    """A dict of bytes, least recently used first; `memory:?limit=1GiB`."""

    def __init__(self, layout: SegmentLayout, limit_bytes: int | None = None) -> None:
        super().__init__(layout)
        self._limit = limit_bytes
        self._objects: OrderedDict[SegmentKey, bytes] = OrderedDict()
        self._used = 0
        self._closed = False

    @classmethod
    def at(cls, location: Location, layout: SegmentLayout) -> Self:
        limit = location.limit(layout.segment_bytes)
        location.finish()
        return cls(layout, limit)

    @property
    def traits(self) -> TierTraits:
        return _TRAITS

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def limit_bytes(self) -> int | None:
        return self._limit

    async def store(self, objects: Sequence[tuple[SegmentKey, memoryview]]) -> None:
        self._check_open()
        check_objects(objects, self.layout, _TRAITS)
        for key, data in objects:
            if key not in self._objects:
                self._make_room(key, data.nbytes)
                self._objects[key] = bytes(data)
                self._used += data.nbytes
            self._objects.move_to_end(key)

    def _make_room(self, key: SegmentKey, count: int) -> None:
        if self._limit is None:
            return
        if count > self._limit:
            raise TierFull(f"{key} takes {count} bytes and the memory tier may hold {self._limit}; raise its limit")
        while self._used + count > self._limit:
            _, oldest = self._objects.popitem(last=False)
            self._used -= len(oldest)

    async def load(self, reads: Sequence[Read]) -> list[Outcome]:
        self._check_open()
        check_reads(reads, self.layout, _TRAITS)
        return [self._read(read) for read in reads]

    def _read(self, read: Read) -> Outcome:
        data = self._objects.get(read.key)
        end = read.offset + read.into.nbytes
        if data is None or end > len(data):
            return Outcome.MISS
        read.into[:] = memoryview(data)[read.offset : end]
        self._objects.move_to_end(read.key)
        return Outcome.HIT

    async def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        self._check_open()
        return [key in self._objects for key in keys]

    async def delete(self, keys: Sequence[SegmentKey]) -> None:
        self._check_open()
        for key in keys:
            self._used -= len(self._objects.pop(key, b""))

    async def aclose(self) -> None:
        self._closed = True
        self._objects.clear()
        self._used = 0

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the memory tier is closed; make a new one")
