"""A tier store that answers later."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from ..errors import ConfigError
from ..tiers import Outcome, Read, SegmentKey, TierStore
from ..tiers.wrapping import WrappedStore


class LatencyStore(WrappedStore):
    """Each call waits before it goes on to the inner store. Calls that overlap wait side by side.

    Args:
        inner: the store that does the work.
        load_s: seconds that `load` and `contains` wait.
        store_s: seconds that `store` and `delete` wait; as `load_s` unless it is given.

    Raises:
        ConfigError: a delay below 0.
    """

    def __init__(self, inner: TierStore, load_s: float, store_s: float | None = None) -> None:
        super().__init__(inner)
        self._load_s = load_s
        self._store_s = load_s if store_s is None else store_s
        for name, value in (("load_s", self._load_s), ("store_s", self._store_s)):
            if not value >= 0:
                raise ConfigError(f"LatencyStore.{name} is {value!r}; it must be at least 0")

    async def store(self, objects: Sequence[tuple[SegmentKey, memoryview]]) -> None:
        """Wait `store_s`, then store."""
        await anyio.sleep(self._store_s)
        await self.inner.store(objects)

    async def load(self, reads: Sequence[Read]) -> list[Outcome]:
        """Wait `load_s`, then load."""
        await anyio.sleep(self._load_s)
        return await self.inner.load(reads)

    async def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        """Wait `load_s`, then ask."""
        await anyio.sleep(self._load_s)
        return await self.inner.contains(keys)

    async def delete(self, keys: Sequence[SegmentKey]) -> None:
        """Wait `store_s`, then delete."""
        await anyio.sleep(self._store_s)
        await self.inner.delete(keys)
