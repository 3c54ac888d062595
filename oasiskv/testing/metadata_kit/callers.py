"""Many callers, names of any kind, and arguments that cannot be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from ...errors import ConfigError, InputError
from ...tiers import Lease, Location, MetadataStore
from ..tier_kit.suite import key
from .suite import LONG_S, MetadataSuite

_RACERS = 16
_TURNS = 5


class CallerTests(MetadataSuite):
    """What callers do to each other, and to themselves."""

    async def test_one_of_many_racers_wins(self, tmp_path: Path) -> None:
        """A claim and a lease, in one process and, if the store is shared, through two that are open."""
        async with self.opened(tmp_path) as one, self.opened(tmp_path) as other:
            stores = [one, other] if self.shared else [one]
            claims: list[bytes | None] = []
            leases: list[Lease | None] = []

            async def race(store: MetadataStore, holder: str, turn: str) -> None:
                leases.append(await store.acquire(turn, holder, LONG_S))
                claims.append(await store.claim(turn))

            for turn in map(str, range(_TURNS)):
                await one.put(turn, turn.encode(), LONG_S)
                async with anyio.create_task_group() as tasks:
                    for number in range(_RACERS):
                        tasks.start_soon(race, stores[number % len(stores)], f"racer-{number}", turn)
            assert [value for value in claims if value is not None] == [str(turn).encode() for turn in range(_TURNS)]
            assert [lease.name for lease in leases if lease is not None] == [str(turn) for turn in range(_TURNS)]
            assert len(claims) == len(leases) == _RACERS * _TURNS

    async def test_what_is_shared_is_seen_by_others(self, tmp_path: Path) -> None:
        """Segments, leases and handoffs."""
        if not self.shared:
            pytest.skip("this suite says that the store is not shared (shared)")
        async with self.opened(tmp_path) as one, self.opened(tmp_path) as other:
            await one.publish([key(1)], "a", LONG_S)
            await other.publish([key(1)], "b", LONG_S)
            assert await one.locate([key(1)]) == await other.locate([key(1)]) == [["b", "a"]]
            lease = await self.lease(one, "n", "a")
            assert await other.acquire("n", "b", LONG_S) is None
            assert await other.release(lease) is True
            taken = await self.lease(other, "n", "b")
            assert taken.fence > lease.fence
            await one.put("h", b"value", LONG_S)
            assert await other.claim("h") == b"value"
            assert await one.claim("h") is None

    async def test_names_may_be_any_text(self, tmp_path: Path) -> None:
        """Of owners, holders, leases and handoffs: no quoting goes wrong, and case counts."""
        names = ["a", "A", "a'b", 'a"b', "a%", "a_", "a:b/c", "a\nb", "é", "*", "x" * 200, "a b", "\\", "{}"]
        async with self.opened(tmp_path) as store:
            for name in names:
                await store.publish([key(1)], name, LONG_S)
                await store.put(name, name.encode(), LONG_S)
                await self.lease(store, name, name)
            assert await store.locate([key(1)]) == [names[::-1]]
            for name in names:
                assert await store.claim(name) == name.encode()
                assert await store.acquire(name, "another", LONG_S) is None

    @pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
    async def test_times_that_cannot_be_are_refused(self, tmp_path: Path, ttl_s: float) -> None:
        """Before anything changes."""
        async with self.opened(tmp_path) as store:
            await store.put("h", b"old", LONG_S)
            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: store.publish([key(1)], "a", ttl_s),
                lambda: store.acquire("n", "a", ttl_s),
                lambda: store.put("h", b"new", ttl_s),
            ]
            for call in calls:
                with pytest.raises(InputError):
                    await call()
            assert await store.locate([key(1)]) == [[]]
            assert await store.claim("h") == b"old"
            await self.lease(store, "n", "b")

    async def test_unknown_options_are_refused(self, tmp_path: Path) -> None:
        """A misspelt option is an error when the store is made, not a store without it."""
        location = Location.parse(f"kit:{tmp_path / 'kit'}?no-such-option=1")
        with pytest.raises(ConfigError):
            type(self.make(tmp_path)).at(location)
