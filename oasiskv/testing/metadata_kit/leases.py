"""Who may do what: one holder at a time, and fences that grow."""

from __future__ import annotations

from pathlib import Path

from .suite import LONG_S, MetadataSuite


class LeaseTests(MetadataSuite):
    """`acquire` and `release`."""

    async def test_a_lease_has_one_holder(self, tmp_path: Path) -> None:
        """Until it is given up. Leases of other names are free."""
        async with self.opened(tmp_path) as store:
            lease = await self.lease(store, "n", "a")
            assert await store.acquire("n", "b", LONG_S) is None
            await self.lease(store, "m", "b")
            assert await store.release(lease) is True
            await self.lease(store, "n", "b")
            assert await store.acquire("n", "a", LONG_S) is None

    async def test_renewing_keeps_the_fence(self, tmp_path: Path) -> None:
        """And prolongs. The lease as it was before can be given up as well."""
        async with self.opened(tmp_path) as store:
            first = await self.lease(store, "n", "a", self.short_s)
            again = await self.lease(store, "n", "a", LONG_S)
            assert again.fence == first.fence
            await self.run_out()
            assert await store.acquire("n", "b", LONG_S) is None
            assert await store.release(first) is True
            await self.lease(store, "n", "b")

    async def test_fences_grow(self, tmp_path: Path) -> None:
        """When a lease is given up, and when it has run out, for the same holder too."""
        async with self.opened(tmp_path) as store:
            lease = await self.lease(store, "n", "a")
            fences = [lease.fence]
            for holder in ("b", "b", "a"):
                await store.release(lease)
                lease = await self.lease(store, "n", holder, self.short_s)
                fences.append(lease.fence)
            for holder in ("a", "b"):
                await self.run_out()
                lease = await self.lease(store, "n", holder, self.short_s)
                fences.append(lease.fence)
            assert fences == sorted(set(fences)), "fences must grow from one holder to the next"

    async def test_fences_grow_when_the_store_starts_anew(self, tmp_path: Path) -> None:
        """Whether it remembers the lease or not."""
        fences = []
        for holder in ("a", "b", "c"):
            async with self.opened(tmp_path) as store:
                lease = await self.lease(store, "n", holder)
                fences.append(lease.fence)
                assert len(lease.fence) == 2
                assert await store.release(lease) is True
        assert fences == sorted(set(fences)), "fences must grow when the store starts anew"

    async def test_a_lease_says_how_long_it_lasts(self, tmp_path: Path) -> None:
        """In seconds from now, never as a time of the clock."""
        async with self.opened(tmp_path) as store:
            for ttl_s in (5.0, 50.0, 0.5):
                lease = await self.lease(store, "n", "a", ttl_s)
                assert 0 < lease.remaining_s <= ttl_s, f"remaining_s is {lease.remaining_s} of {ttl_s}"

    async def test_a_lease_that_was_lost_cannot_be_given_up(self, tmp_path: Path) -> None:
        """Because it was given up, ran out, or belongs to another, who keeps it."""
        async with self.opened(tmp_path) as store:
            lease = await self.lease(store, "n", "a")
            assert await store.release(lease) is True
            assert await store.release(lease) is False
            lease = await self.lease(store, "n", "a", self.short_s)
            await self.run_out()
            assert await store.release(lease) is False
            await self.lease(store, "n", "b")
            assert await store.release(lease) is False
            assert await store.acquire("n", "c", LONG_S) is None
