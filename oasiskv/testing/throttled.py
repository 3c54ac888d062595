"""A tier store behind a link of a set bandwidth."""

from __future__ import annotations

import math
from collections.abc import Sequence

import anyio

from ..errors import ConfigError
from ..tiers import Outcome, Read, SegmentKey, TierStore
from ..tiers.checks import check_objects, check_reads
from ..tiers.wrapping import WrappedStore


class Link:
    """Carries one transfer after the other, in the order of asking, at a rate that is exact over time.

    Each transfer has a deadline that follows from the one before it, not from when its task happened to wake. So a late wake-up
    delays one transfer, and not all those behind it. Nothing is saved up while the link is idle.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._turn = anyio.Lock()
        self._free_at = -math.inf

    async def carry(self, count: int) -> None:
        """Return when `count` bytes have passed. A transfer that is cancelled gives back the time that it did not use."""
        asked_at = anyio.current_time()
        async with self._turn:
            self._free_at = max(self._free_at, asked_at) + count / self._rate
            try:
                await anyio.sleep_until(self._free_at)
            except anyio.get_cancelled_exc_class():
                self._free_at = min(self._free_at, anyio.current_time())
                raise


class ThrottledStore(WrappedStore):
    """Objects and filled buffers of all calls together pass at `bytes_per_s`, in both directions over one link.

    Loads are counted by the size of their buffers, whatever their outcome. `contains` and `delete` cost nothing.

    Raises:
        ConfigError: `bytes_per_s` is not positive.
    """

    def __init__(self, inner: TierStore, bytes_per_s: float) -> None:
        super().__init__(inner)
        if not 0 < bytes_per_s < math.inf:
            raise ConfigError(f"ThrottledStore.bytes_per_s is {bytes_per_s!r}; it must be positive and finite")
        self._link = Link(bytes_per_s)

    async def store(self, objects: Sequence[tuple[SegmentKey, memoryview]]) -> None:
        """Store once the objects have passed the link."""
        check_objects(objects, self.layout, self.traits)
        await self._link.carry(sum(data.nbytes for _, data in objects))
        await self.inner.store(objects)

    async def load(self, reads: Sequence[Read]) -> list[Outcome]:
        """Load once as many bytes have passed the link."""
        check_reads(reads, self.layout, self.traits)
        await self._link.carry(sum(read.into.nbytes for read in reads))
        return await self.inner.load(reads)
