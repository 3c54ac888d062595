"""A tier store around another one, which does everything: the base of stores that change one thing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from ..errors import ConfigError
from .abc import TierStore
from .location import Location
from .segments import Outcome, Read, SegmentKey, SegmentLayout, TierTraits


class WrappedStore(TierStore):
    """Passes every call on to `inner`, which it opens and closes."""

    def __init__(self, inner: TierStore) -> None:
        super().__init__(inner.layout)
        self.inner = inner

    @classmethod
    def at(cls, location: Location, layout: SegmentLayout) -> Self:
        """Raises `ConfigError`: a wrapper is made in Python, around a store."""
        raise ConfigError(f"tier {location.text!r} names {cls.__name__}, which wraps a store; make it in Python")

    @property
    def traits(self) -> TierTraits:
        """Those of the inner store."""
        return self.inner.traits

    @property
    def used_bytes(self) -> int:
        """Of the inner store."""
        return self.inner.used_bytes

    @property
    def limit_bytes(self) -> int | None:
        """Of the inner store."""
        return self.inner.limit_bytes

    @property
    def capacity_bytes(self) -> int | None:
        """Of the inner store."""
        return self.inner.capacity_bytes

    def variants(self, data: memoryview) -> list[memoryview]:
        """Of the inner store."""
        return self.inner.variants(data)

    async def open(self) -> None:
        """Open the inner store."""
        await self.inner.open()

    async def aclose(self) -> None:
        """Close the inner store."""
        await self.inner.aclose()

    async def store(self, objects: Sequence[tuple[SegmentKey, memoryview]]) -> None:
        """As the inner store does."""
        await self.inner.store(objects)

    async def load(self, reads: Sequence[Read]) -> list[Outcome]:
        """As the inner store does."""
        return await self.inner.load(reads)

    async def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        """As the inner store does."""
        return await self.inner.contains(keys)

    async def delete(self, keys: Sequence[SegmentKey]) -> None:
        """As the inner store does."""
        await self.inner.delete(keys)

    def register_buffer(self, region: memoryview) -> None:
        """Registers it with the inner store."""
        self.inner.register_buffer(region)

    def unsettled(self, buffer: memoryview) -> bool:
        """As the inner store says."""
        return self.inner.unsettled(buffer)
