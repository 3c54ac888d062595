"""A size limit is held, and what was not used for longest goes first."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from ...errors import TierFull
from ...tiers import Outcome, TierStore
from .suite import LAYOUT, TierSuite, content, key


class LimitTests(TierSuite):
    """Skipped for suites whose `takes_limit` is false."""

    def limit(self) -> int:
        """The limit to make a store with. Skips the test if there are none."""
        if not self.takes_limit:
            pytest.skip("this suite says that the store takes no limit (takes_limit)")
        return self.limit_bytes

    async def fill(self, store: TierStore) -> int:
        """Store segments from number 0 on, one by one, until the limit leaves no room for another; returns how many."""
        assert store.limit_bytes is not None
        empty = store.used_bytes
        await self.put(store, [key(0)])
        each = store.used_bytes - empty
        assert each > 0, "used_bytes must grow with what a store with a limit holds"
        room = (store.limit_bytes - empty) // each
        assert room >= 3, f"a limit of {store.limit_bytes} has room for {room} segments; raise limit_bytes of the suite"
        for number in range(1, room):
            await self.put(store, [key(number)])
        assert await store.contains([key(number) for number in range(room)]) == [True] * room, (
            "something was forgotten while there was room"
        )
        return room

    async def test_it_says_what_it_may_hold(self, tmp_path: Path) -> None:
        """`limit_bytes` is what it was made with."""
        limit = self.limit()
        async with self.opened(tmp_path, limit_bytes=limit) as store:
            assert store.limit_bytes == limit

    async def test_without_a_limit_nothing_is_forgotten(self, tmp_path: Path) -> None:
        """What it was told to keep, it keeps."""
        async with self.opened(tmp_path) as store:
            names = [key(number) for number in range(32)]
            for name in names:
                await self.put(store, [name])
            assert await store.contains(names) == [True] * 32

    async def test_what_was_not_used_for_longest_is_forgotten_first(self, tmp_path: Path) -> None:
        """Loading counts as use, asking does not."""
        async with self.opened(tmp_path, limit_bytes=self.limit()) as store:
            room = await self.fill(store)
            assert await self.get(store, key(0), 2, 1) == content(key(0))[2 * LAYOUT.slot_bytes : 3 * LAYOUT.slot_bytes]
            assert await store.contains([key(1)]) == [True]
            await self.put(store, [key(100)])
            kept = await store.contains([key(number) for number in [*range(room), 100]])
            assert kept == [True, False, *[True] * (room - 2), True]
            await self.put(store, [key(101)])
            assert await store.contains([key(0), key(2), key(101)]) == [True, False, True]
            assert await self.get(store, key(1)) is Outcome.MISS

    async def test_the_limit_is_held(self, tmp_path: Path) -> None:
        """After every call, also when calls overlap and one brings more than fits."""
        async with self.opened(tmp_path, limit_bytes=self.limit()) as store:
            room = await self.fill(store)

            async def bring(start: int) -> None:
                for number in range(start, start + room):
                    await self.put(store, [key(number)])
                    assert store.used_bytes <= self.limit_bytes

            async with anyio.create_task_group() as tasks:
                for start in range(100, 500, 100):
                    tasks.start_soon(bring, start)
            await self.put(store, [key(number) for number in range(1000, 1000 + 2 * room)])
            assert store.used_bytes <= self.limit_bytes
            assert await self.get(store, key(999 + 2 * room)) == content(key(999 + 2 * room))

    async def test_what_can_never_fit_is_refused(self, tmp_path: Path) -> None:
        """With `TierFull`. The store goes on: what fits is taken."""
        async with self.opened(tmp_path, limit_bytes=self.limit()) as store:
            await self.put(store, [key(0)])
            slots = self.limit_bytes // LAYOUT.slot_bytes + 1
            with pytest.raises(TierFull):
                await self.put(store, [key(1)], slots)
            assert await store.contains([key(1)]) == [False]
            assert store.used_bytes <= self.limit_bytes
            await self.put(store, [key(2)])
            assert await self.get(store, key(2)) == content(key(2))

    async def test_deleting_makes_room(self, tmp_path: Path) -> None:
        """For as much as was deleted, so that nothing else is forgotten."""
        async with self.opened(tmp_path, limit_bytes=self.limit()) as store:
            room = await self.fill(store)
            full = store.used_bytes
            await store.delete([key(1), key(2)])
            assert store.used_bytes < full
            await self.put(store, [key(100), key(101)])
            names = [key(0), *(key(number) for number in range(3, room)), key(100), key(101)]
            assert await store.contains(names) == [True] * room

    async def test_a_store_that_is_made_again_counts_what_it_has(self, tmp_path: Path) -> None:
        """Its limit holds for what it finds, too."""
        limit = self.limit()
        async with self.opened(tmp_path, limit_bytes=limit) as store:
            if not store.traits.persistent:
                pytest.skip("this store keeps nothing when it is closed (traits.persistent is False)")
            await self.fill(store)
            used = store.used_bytes
        async with self.opened(tmp_path, limit_bytes=limit) as store:
            assert store.used_bytes == used
            await self.put(store, [key(100)])
            assert store.used_bytes <= limit
            assert await self.get(store, key(100)) == content(key(100))
