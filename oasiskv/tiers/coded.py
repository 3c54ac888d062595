"""`CodedStore`: a tier store that keeps fewer bytes than it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from ..errors import ConfigError
from .abc import TierStore
from .checks import check_objects, check_reads
from .codecs import Codec
from .location import Location
from .quarantine import Quarantine
from .segments import Outcome, Read, SegmentKey, SegmentLayout, TierTraits
from .threads import in_thread

_AT_ONCE_BYTES = 64 << 10
"""Plain bytes that are decoded in the event loop: it takes about as long as handing them to a thread."""


class CodedStore(TierStore):
    """Codes what goes down into another store, and decodes what comes back; slot by slot, so that any range can be read.

    What is read is not what was stored, but as close as the codec says. `used_bytes` and `limit_bytes` count coded bytes.

    Args:
        inner: made with `codec.coded(layout)`, not open yet. This store opens and closes it.
        layout: of the plain segments.

    Raises:
        ConfigError: the inner store has another layout.
    """

    def __init__(self, inner: TierStore, layout: SegmentLayout, codec: Codec) -> None:
        if inner.layout != codec.coded(layout):
            raise ConfigError(f"the inner store has the layout {inner.layout}; it must be {codec.coded(layout)}")
        super().__init__(layout)
        self._inner = inner
        self._codec = codec
        self._quarantine = Quarantine()
        self._plain_bytes = 0
        self._coded_bytes = 0

    @classmethod
    def at(cls, location: Location, layout: SegmentLayout) -> Self:
        """Always raises `ConfigError`: `oasiskv.tiers.opening.store_at` makes one for the option `codec` of any location."""
        raise ConfigError(f"tier {location.text!r} names no store to code for; add ?codec=int8 to the location of one")

    @property
    def traits(self) -> TierTraits:
        return replace(self._inner.traits, alignment_bytes=1, lossy=True)  # the caller's buffers go no further

    @property
    def used_bytes(self) -> int:
        return self._inner.used_bytes

    @property
    def limit_bytes(self) -> int | None:
        return self._inner.limit_bytes

    @property
    def capacity_bytes(self) -> int | None:
        inner = self._inner.capacity_bytes
        return None if inner is None else inner // self._inner.layout.slot_bytes * self.layout.slot_bytes

    def variants(self, data: memoryview) -> list[memoryview]:
        found = []
        for coded in self._inner.variants(memoryview(self._codec.encode(data, self.layout))):
            into = memoryview(bytearray(data.nbytes))
            self._codec.decode(coded, into, self.layout)
            found.append(into)
        return found

    @property
    def plain_bytes(self) -> int:
        """Bytes that callers have stored and loaded: before coding, and after decoding."""
        return self._plain_bytes

    @property
    def coded_bytes(self) -> int:
        """What of those the inner store has got and given."""
        return self._coded_bytes

    async def open(self) -> None:
        await self._inner.open()

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def store(self, objects: Sequence[tuple[SegmentKey, memoryview]]) -> None:
        check_objects(objects, self.layout, self.traits)
        coded = [(key, memoryview(await self._encode(data))) for key, data in objects]
        try:
            await self._inner.store(coded)
        finally:
            for _, data in coded:
                self._quarantine.hold(self._inner.unsettled, data)
        self._count([data for _, data in objects], [data for _, data in coded])

    async def load(self, reads: Sequence[Read]) -> list[Outcome]:
        check_reads(reads, self.layout, self.traits)
        coded = [self._coded(read) for read in reads]
        try:
            outcomes = await self._inner.load(coded)
        finally:
            for read in coded:
                self._quarantine.hold(self._inner.unsettled, read.into)
        hits = [place for place, outcome in enumerate(outcomes) if outcome is Outcome.HIT]
        pairs = [(coded[place].into, reads[place].into) for place in hits]
        if sum(into.nbytes for _, into in pairs) <= _AT_ONCE_BYTES:
            self._decode(pairs)
        else:
            await in_thread(lambda _: self._decode(pairs))
        self._count([into for _, into in pairs], [data for data, _ in pairs])
        return outcomes

    async def _encode(self, data: memoryview) -> bytearray:
        return await in_thread(lambda _: self._codec.encode(data, self.layout))

    def _coded(self, read: Read) -> Read:
        plain, coded = self.layout.slot_bytes, self._inner.layout.slot_bytes
        into = memoryview(bytearray(read.into.nbytes // plain * coded))
        return Read(read.key, read.offset // plain * coded, into)

    def _decode(self, pairs: Sequence[tuple[memoryview, memoryview]]) -> None:
        for coded, into in pairs:
            self._codec.decode(coded, into, self.layout)

    def _count(self, plain: Sequence[memoryview], coded: Sequence[memoryview]) -> None:
        self._plain_bytes += sum(data.nbytes for data in plain)
        self._coded_bytes += sum(data.nbytes for data in coded)

    async def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        return await self._inner.contains(keys)

    async def delete(self, keys: Sequence[SegmentKey]) -> None:
        await self._inner.delete(keys)
