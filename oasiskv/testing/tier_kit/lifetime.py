"""Opening and closing: what ends, what stays, who sees it, and what is left behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from ...errors import LayoutMismatch
from ...tiers import Outcome, Read, TierStore
from ..closing import attempt, require_refused
from ..interrupting import at_every_suspension, nothing
from ..leaks import Holdings
from .suite import LAYOUT, TierSuite, blank, content, key

_CYCLES = 8
_WARM_CYCLES = 2


class LifetimeTests(TierSuite):
    """From `open` to `aclose`, and again."""

    def calls(self, store: TierStore) -> dict[str, Callable[[], Awaitable[object]]]:
        """One call of each kind."""
        into = blank(LAYOUT.segment_bytes)
        return {
            "store": lambda: store.store([(key(1), memoryview(content(key(1))))]),
            "load": lambda: store.load([Read(key(1), 0, into)]),
            "contains": lambda: store.contains([key(1)]),
            "delete": lambda: store.delete([key(2)]),
        }

    async def test_calls_after_closing_are_refused(self, tmp_path: Path) -> None:
        """With `StateError`. Closing again does nothing; what never waits can still be asked."""
        async with self.opened(tmp_path) as store:
            await self.put(store, [key(1)])
            await store.aclose()
            await require_refused(self.calls(store))
            await store.aclose()
            assert store.unsettled(blank(LAYOUT.slot_bytes)) is False
            assert store.used_bytes >= 0

    async def test_a_store_that_was_never_used_can_be_closed(self, tmp_path: Path) -> None:
        """Before it was opened, too, as happens when something beside it fails to open."""
        with anyio.fail_after(self.closing_s):
            await self.make(tmp_path, LAYOUT, None).aclose()
            async with self.opened(tmp_path):
                pass

    @pytest.mark.parametrize("turns", [0, 1, 2, 5])
    async def test_closing_ends_what_is_under_way(self, tmp_path: Path, turns: int) -> None:
        """Soon. Calls either finish or raise `StateError`, and their buffers are left alone."""
        async with self.opened(tmp_path) as store:
            names = [key(number) for number in range(10, 18)]  # not those that the other calls store and delete
            await self.put(store, names)
            buffers = [blank(LAYOUT.segment_bytes) for _ in range(8)]

            def load(number: int) -> Callable[[], Awaitable[object]]:
                async def call() -> None:
                    (outcome,) = await store.load([Read(names[number], 0, buffers[number])])
                    assert outcome is Outcome.HIT, f"a load that the closing overtook says {outcome}, not StateError"
                    assert bytes(buffers[number]) == content(names[number])

                return call

            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(attempt, load(number))
                    for call in self.calls(store).values():
                        tasks.start_soon(attempt, call)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                with anyio.fail_after(self.closing_s):
                    await store.aclose()
            await self.assert_left_alone(store, buffers)

    async def test_a_whole_life_may_be_cancelled(self, tmp_path: Path) -> None:
        """Wherever that is, while it opens, works or closes: nothing is left behind, and the next one works."""

        async def live() -> None:
            async with self.make(tmp_path, LAYOUT, None) as store:
                await self.put(store, [key(1)])
                await self.get(store, key(1))
                await store.delete([key(1)])

        with anyio.fail_after(self.patience_s):
            for _ in range(_WARM_CYCLES):
                await live()
            before = Holdings.now()
            await at_every_suspension(live, nothing)
            gained = await before.gained()
            assert not gained, f"after lives that were cancelled there are {', '.join(gained)}"
            await live()

    async def test_what_is_persistent_is_found_again(self, tmp_path: Path) -> None:
        """By the next who opens it, with the bytes and lengths that were stored, and without what was deleted."""
        async with self.opened(tmp_path) as store:
            if not store.traits.persistent:
                pytest.skip("this store keeps nothing when it is closed (traits.persistent is False)")
            await self.put(store, [key(1), key(2)])
            await self.put(store, [key(3)], slots=2)
            await store.delete([key(2)])
        for _ in range(2):
            async with self.opened(tmp_path) as store:
                assert await store.contains([key(1), key(2), key(3)]) == [True, False, True]
                assert await self.get(store, key(1)) == content(key(1))
                assert await self.get(store, key(3), 0, 2) == content(key(3), slots=2)
                assert await self.get(store, key(3), 0, 3) is Outcome.MISS

    async def test_another_layout_is_refused(self, tmp_path: Path) -> None:
        """By stores that are persistent, whichever field of the layout it is; what is there stays there."""
        async with self.opened(tmp_path) as store:
            if not store.traits.persistent:
                pytest.skip("this store keeps nothing when it is closed (traits.persistent is False)")
            await self.put(store, [key(1)])
        changes = ({"kv_heads": 1}, {"num_blocks": 4}, {"block_size": 8}, {"head_dim": 4}, {"dtype": "float16"})
        for change in changes:
            with pytest.raises(LayoutMismatch), anyio.fail_after(self.patience_s):
                async with self.make(tmp_path, dataclasses.replace(LAYOUT, **change), None):
                    pass
        async with self.opened(tmp_path) as store:
            assert await self.get(store, key(1)) == content(key(1))

    async def test_what_is_shared_is_seen_by_others(self, tmp_path: Path) -> None:
        """While both are open: what one stores the other reads, and what one deletes the other misses."""
        async with self.opened(tmp_path) as one:
            if not one.traits.shared:
                pytest.skip("this store is not shared with other processes (traits.shared is False)")
            async with self.opened(tmp_path) as other:
                await self.put(one, [key(1)])
                assert await other.contains([key(1)]) == [True]
                assert await self.get(other, key(1)) == content(key(1))
                await other.store([(key(1), memoryview(content(key(2))))])
                assert await self.get(one, key(1)) == content(key(1))
                await other.delete([key(1)])
                assert await self.get(one, key(1)) is Outcome.MISS
            await self.put(one, [key(3)])
            assert await self.get(one, key(3)) == content(key(3))

    async def test_stores_of_different_places_are_apart(self, tmp_path: Path) -> None:
        """Two in one process share nothing by accident."""
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
        async with self.opened(tmp_path / "one") as one, self.opened(tmp_path / "other") as other:
            await self.put(one, [key(1)])
            assert await other.contains([key(1)]) == [False]
            assert await self.get(other, key(1)) is Outcome.MISS

    async def test_nothing_is_left_behind(self, tmp_path: Path) -> None:
        """Threads, file descriptors and tasks, counted over many cycles of opening, using and closing."""
        for number in range(_CYCLES):
            if number == _WARM_CYCLES:
                before = Holdings.now()
            async with self.opened(tmp_path) as store:
                await self.put(store, [key(number)])
                assert await self.get(store, key(number)) == content(key(number))
                await store.delete([key(number)])
        gained = await before.gained()
        assert not gained, f"after {_CYCLES - _WARM_CYCLES} cycles there are {', '.join(gained)}"
