"""Who has which segment: publishing, running out, withdrawing."""

from __future__ import annotations

from pathlib import Path

from ..tier_kit.suite import key
from .suite import LONG_S, MetadataSuite


class DirectoryTests(MetadataSuite):
    """`publish`, `locate` and `withdraw`."""

    async def test_what_is_published_is_located(self, tmp_path: Path) -> None:
        """Of each key by itself, in the order that was asked for."""
        async with self.opened(tmp_path) as store:
            assert await store.locate([key(1)]) == [[]]
            await store.publish([key(1), key(2)], "a", LONG_S)
            await store.publish([key(2), key(1, layer=1)], "b", LONG_S)
            found = await store.locate([key(3), key(2), key(1), key(1, layer=1), key(2)])
            assert found == [[], ["b", "a"], ["a"], ["b"], ["b", "a"]]

    async def test_calls_may_be_empty(self, tmp_path: Path) -> None:
        """And do nothing."""
        async with self.opened(tmp_path) as store:
            await store.publish([], "a", LONG_S)
            await store.withdraw([], "a")
            assert await store.locate([]) == []

    async def test_who_published_last_comes_first(self, tmp_path: Path) -> None:
        """Publishing again counts, and names an owner once."""
        async with self.opened(tmp_path) as store:
            for owner in ("a", "b", "c", "a", "b", "b"):
                await store.publish([key(1)], owner, LONG_S)
            assert await store.locate([key(1)]) == [["b", "a", "c"]]

    async def test_what_is_published_runs_out(self, tmp_path: Path) -> None:
        """Unless it is published again; each owner's by itself."""
        async with self.opened(tmp_path) as store:
            await store.publish([key(1)], "gone", self.short_s)
            await store.publish([key(1)], "kept", self.short_s)
            await store.publish([key(1)], "other", LONG_S)
            await store.publish([key(1)], "kept", LONG_S)
            await self.run_out()
            assert await store.locate([key(1)]) == [["kept", "other"]]

    async def test_what_is_withdrawn_is_gone(self, tmp_path: Path) -> None:
        """From this owner and these keys only; what was not published is no error."""
        async with self.opened(tmp_path) as store:
            await store.publish([key(1), key(2)], "a", LONG_S)
            await store.publish([key(1)], "b", LONG_S)
            await store.withdraw([key(1), key(9)], "a")
            await store.withdraw([key(2)], "b")
            await store.withdraw([key(1)], "nobody")
            assert await store.locate([key(1), key(2)]) == [["b"], ["a"]]
