"""Handoffs are left, and claimed once."""

from __future__ import annotations

from pathlib import Path

from .suite import LONG_S, MetadataSuite


class HandoffTests(MetadataSuite):
    """`put` and `claim`."""

    async def test_a_handoff_is_claimed_once(self, tmp_path: Path) -> None:
        """Whatever its bytes."""
        async with self.opened(tmp_path) as store:
            assert await store.claim("h") is None
            for value in (b"", b"\0", bytes(range(256)) * 1000):
                await store.put("h", value, LONG_S)
                await store.put("other", b"other", LONG_S)
                assert await store.claim("h") == value
                assert await store.claim("h") is None
                assert await store.claim("other") == b"other"

    async def test_a_handoff_replaces_one_of_its_name(self, tmp_path: Path) -> None:
        """And lives as long as it says itself."""
        async with self.opened(tmp_path) as store:
            await store.put("h", b"old", self.short_s)
            await store.put("h", b"new", LONG_S)
            await store.put("gone", b"gone", self.short_s)
            await self.run_out()
            assert await store.claim("h") == b"new"
            assert await store.claim("gone") is None
