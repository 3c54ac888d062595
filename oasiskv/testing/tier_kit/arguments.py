"""Calls that break the contract are refused before anything moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...errors import ConfigError, InputError
from ...tiers import Location, Outcome, Read
from .suite import LAYOUT, POISON, TierSuite, blank, content, key

_SLOT = LAYOUT.slot_bytes

_NO_BUFFERS = [
    pytest.param(memoryview(b""), id="empty"),
    pytest.param(blank(_SLOT - 1), id="no-whole-slot"),
    pytest.param(blank(_SLOT + 1), id="one-byte-more"),
    pytest.param(blank(2 * _SLOT)[::2], id="not-contiguous"),
    pytest.param(blank(_SLOT).cast("f"), id="not-of-bytes"),
    pytest.param(bytearray(_SLOT), id="no-memoryview"),
]

_NO_OFFSETS = [-_SLOT, -1, 1, _SLOT - 1, _SLOT + _SLOT // 2]


class ArgumentTests(TierSuite):
    """What raises `InputError`, and `ConfigError`."""

    @pytest.mark.parametrize("wrong", _NO_BUFFERS)
    async def test_objects_that_do_not_fit_are_refused(self, tmp_path: Path, wrong: memoryview) -> None:
        """Before anything moves: the objects beside them are not stored."""
        async with self.opened(tmp_path) as store:
            with pytest.raises(InputError):
                await store.store([(key(1), memoryview(content(key(1)))), (key(2), wrong)])
            assert await store.contains([key(1), key(2)]) == [False, False]

    @pytest.mark.parametrize("wrong", _NO_BUFFERS)
    async def test_buffers_that_do_not_fit_are_refused(self, tmp_path: Path, wrong: memoryview) -> None:
        """Before anything moves: the buffers beside them are not filled."""
        async with self.opened(tmp_path) as store:
            await self.put(store, [key(1)])
            into = blank(_SLOT)
            with pytest.raises(InputError):
                await store.load([Read(key(1), 0, into), Read(key(1), 0, wrong)])
            assert set(into) == {POISON}, "a buffer was filled by a call that was refused"

    async def test_read_only_buffers_are_refused(self, tmp_path: Path) -> None:
        """There are ways to write into them all the same."""
        async with self.opened(tmp_path) as store:
            await self.put(store, [key(1)])
            into = blank(_SLOT)
            with pytest.raises(InputError):
                await store.load([Read(key(1), 0, into.toreadonly())])
            assert set(into) == {POISON}

    @pytest.mark.parametrize("offset", _NO_OFFSETS)
    async def test_offsets_between_slots_are_refused(self, tmp_path: Path, offset: int) -> None:
        """Also below 0, where Python counts from the end."""
        async with self.opened(tmp_path) as store:
            await self.put(store, [key(1)])
            into = blank(_SLOT)
            with pytest.raises(InputError):
                await store.load([Read(key(1), 0, into), Read(key(1), offset, blank(_SLOT))])
            assert set(into) == {POISON}, "a buffer was filled by a call that was refused"

    async def test_more_than_a_batch_is_refused(self, tmp_path: Path) -> None:
        """`traits.max_batch` is the most, and as many as that are taken."""
        async with self.opened(tmp_path) as store:
            most = store.traits.max_batch
            if most is None:
                pytest.skip("this store takes any number of entries (traits.max_batch is None)")
            await self.put(store, [key(0)])
            with pytest.raises(InputError):
                await store.load([Read(key(0), 0, blank(_SLOT)) for _ in range(most + 1)])
            data = memoryview(content(key(0)))
            with pytest.raises(InputError):
                await store.store([(key(number), data) for number in range(1, most + 2)])
            assert await store.contains([key(1)]) == [False]
            reads = [Read(key(0), 0, blank(_SLOT)) for _ in range(most)]
            assert await store.load(reads) == [Outcome.HIT] * most

    async def test_unknown_options_are_refused(self, tmp_path: Path) -> None:
        """A misspelt option is an error when the store is made, not a store without it."""
        store = self.make(tmp_path, LAYOUT, None)
        location = Location.parse(f"kit:{tmp_path}?no-such-option=1")
        with pytest.raises(ConfigError):
            type(store).at(location, LAYOUT)

    async def test_it_knows_its_layout_and_its_traits(self, tmp_path: Path) -> None:
        """And they stay the same."""
        async with self.opened(tmp_path) as store:
            traits = store.traits
            assert store.layout == LAYOUT
            await self.put(store, [key(1)])
            assert store.traits == traits
            assert traits.alignment_bytes >= 1
            assert traits.max_batch is None or traits.max_batch >= 1
