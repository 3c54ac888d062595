"""What is stored is read: ranges, misses, keys, and segments that never change."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from ...tiers import Outcome, Read, SegmentKey, SegmentLayout
from .suite import LAYOUT, POISON, TierSuite, blank, content, key

_LAYOUTS = [
    pytest.param(SegmentLayout(1, 1, 1, 1, "float16"), id="4-byte-slots"),
    pytest.param(SegmentLayout(3, 5, 3, 5, "bfloat16"), id="60-byte-slots"),
    pytest.param(SegmentLayout(8, 16, 16, 128, "bfloat16"), id="8-KiB-slots"),
]


class ContentTests(TierSuite):
    """Round trips."""

    @pytest.mark.parametrize("slots", [1, 2, 5, 6, 13])
    async def test_what_is_stored_is_read(self, tmp_path: Path, slots: int) -> None:
        """Objects of any number of slots, fewer and more than a segment has."""
        async with self.opened(tmp_path) as store:
            await self.put(store, [key(1)], slots)
            assert await self.get(store, key(1), 0, slots) == content(key(1), slots=slots)

    @pytest.mark.parametrize("layout", _LAYOUTS)
    async def test_every_layout(self, tmp_path: Path, layout: SegmentLayout) -> None:
        """Slots that are tiny, large, and no multiple of anything; the last one by itself."""
        async with self.opened(tmp_path, layout) as store:
            await self.put(store, [key(1), key(2)])
            last = self.layout_slots(layout) - 1
            for name in (key(2), key(1)):
                assert await self.get(store, name) == content(name, layout)
                assert await self.get(store, name, last, 1) == content(name, layout)[-layout.slot_bytes :]

    async def test_every_range_of_slots(self, tmp_path: Path) -> None:
        """From any slot to any other, all in one batch of reads of one key."""
        async with self.opened(tmp_path) as store:
            await self.put(store, [key(1)])
            whole, size = content(key(1)), LAYOUT.slot_bytes
            ranges = [(start, end) for start in range(6) for end in range(start + 1, 7)]
            reads = [Read(key(1), start * size, blank((end - start) * size)) for start, end in ranges]
            assert await self.read(store, reads) == [Outcome.HIT] * len(reads)
            for (start, end), read in zip(ranges, reads, strict=True):
                assert bytes(read.into) == whole[start * size : end * size], f"slots {start} to {end}"

    async def test_many_segments_in_one_call(self, tmp_path: Path) -> None:
        """Outcomes are in the order of the reads, whatever the order of what was stored."""
        async with self.opened(tmp_path) as store:
            names = [key(number) for number in range(40)]
            await self.put(store, names)
            reads = [Read(name, 0, blank(LAYOUT.segment_bytes)) for name in [*reversed(names), key(99)]]
            assert await self.read(store, reads) == [Outcome.HIT] * 40 + [Outcome.MISS]
            for read in reads[:40]:
                assert bytes(read.into) == content(read.key)

    async def test_buffers_may_begin_anywhere(self, tmp_path: Path) -> None:
        """`traits.alignment_bytes` spares a copy; it is no duty of the caller. Nothing beside the buffers is touched."""
        async with self.opened(tmp_path) as store:
            for shift in (1, 3, 8):
                room = blank(LAYOUT.segment_bytes + 16)
                inside = room[shift : shift + LAYOUT.segment_bytes]
                inside[:] = content(key(shift))
                await store.store([(key(shift), inside)])
                inside[:] = bytes(inside.nbytes)
                assert await store.load([Read(key(shift), 0, inside)]) == [Outcome.HIT]
                assert bytes(inside) == content(key(shift))
                assert set(room[:shift]) | set(room[shift + LAYOUT.segment_bytes :]) == {POISON}

    async def test_read_only_objects_can_be_stored(self, tmp_path: Path) -> None:
        """What is stored is only read."""
        async with self.opened(tmp_path) as store:
            await store.store([(key(1), memoryview(content(key(1))).toreadonly())])
            assert await self.get(store, key(1)) == content(key(1))

    async def test_keys_that_differ_a_little_are_different(self, tmp_path: Path) -> None:
        """By space, layer, the length of the digest, or one bit of it."""
        short = bytes(16)
        names = [
            SegmentKey("a", short, 0),
            SegmentKey("A", short, 0),
            SegmentKey("a-", short, 0),
            SegmentKey("a" * 64, short, 0),
            SegmentKey("a", short, 1),
            SegmentKey("a", short, 65535),
            SegmentKey("a", short + b"\0", 0),
            SegmentKey("a", bytes(64), 0),
            SegmentKey("a", bytes(63) + b"\1", 0),
            SegmentKey("a", b"\1" + bytes(15), 0),
        ]
        async with self.opened(tmp_path) as store:
            await self.put(store, names)
            for name in names:
                assert await self.get(store, name) == content(name), str(name)

    async def test_a_miss_is_a_value(self, tmp_path: Path) -> None:
        """Of a key that was never stored, and of a range that goes beyond the object; hits beside them are hits."""
        async with self.opened(tmp_path) as store:
            await self.put(store, [key(1)], slots=4)
            size = LAYOUT.slot_bytes
            reads = [
                Read(key(2), 0, blank(size)),
                Read(key(1), 3 * size, blank(size)),
                Read(key(1), 3 * size, blank(2 * size)),
                Read(key(1), 4 * size, blank(size)),
                Read(key(1), 4000 * size, blank(size)),
                Read(key(1), 0, blank(4 * size)),
                Read(key(1), 0, blank(5 * size)),
            ]
            hit, miss = Outcome.HIT, Outcome.MISS
            assert await self.read(store, reads) == [miss, hit, miss, miss, miss, hit, miss]
            assert bytes(reads[5].into) == content(key(1), slots=4)

    async def test_calls_may_be_empty(self, tmp_path: Path) -> None:
        """And do nothing."""
        async with self.opened(tmp_path) as store:
            await store.store([])
            await store.delete([])
            assert await store.load([]) == []
            assert await store.contains([]) == []

    @pytest.mark.parametrize("slots", [6, 3, 9])
    async def test_a_segment_never_changes(self, tmp_path: Path, slots: int) -> None:
        """Storing a key again is no error and changes nothing, whatever the bytes and their number."""
        async with self.opened(tmp_path) as store:
            await self.put(store, [key(1)])
            other = content(key(2), slots=slots)
            await store.store([(key(1), memoryview(other)), (key(3), memoryview(content(key(3))))])
            assert await self.get(store, key(1)) == content(key(1))
            assert await self.get(store, key(3)) == content(key(3))
            beyond = await self.get(store, key(1), 6, 1)
            assert beyond is Outcome.MISS

    async def test_a_key_may_come_twice_in_a_call(self, tmp_path: Path) -> None:
        """As two objects that are the same, and as two reads."""
        async with self.opened(tmp_path) as store:
            await self.put(store, [key(1), key(1)])
            reads = [Read(key(1), 0, blank(LAYOUT.segment_bytes)) for _ in range(2)]
            assert await self.read(store, reads) == [Outcome.HIT] * 2
            assert bytes(reads[0].into) == bytes(reads[1].into) == content(key(1))

    async def test_it_contains_what_can_be_read(self, tmp_path: Path) -> None:
        """In the order that was asked for; asking changes nothing."""
        async with self.opened(tmp_path) as store:
            assert await store.contains([key(1)]) == [False]
            await self.put(store, [key(1), key(3)])
            for _ in range(2):
                assert await store.contains([key(3), key(2), key(1), key(3)]) == [True, False, True, True]
            assert await self.get(store, key(1)) == content(key(1))

    async def test_what_is_deleted_is_gone(self, tmp_path: Path) -> None:
        """Nothing else is, and the key can be stored anew."""
        async with self.opened(tmp_path) as store:
            await self.put(store, [key(1), key(2)])
            await store.delete([key(1), key(7), key(1)])
            assert await store.contains([key(1), key(2)]) == [False, True]
            assert await self.get(store, key(1)) is Outcome.MISS
            assert await self.get(store, key(2)) == content(key(2))
            await store.store([(key(1), memoryview(content(key(5))))])
            assert await self.get(store, key(1)) == content(key(5))

    async def test_damage_is_noticed_and_forgotten(self, tmp_path: Path) -> None:
        """Wrong bytes are never a `HIT`. The store says `CORRUPT` once; then the segment is gone, and can be stored anew."""
        async with self.opened(tmp_path) as store:
            for _ in range(2):
                await self.put(store, [key(1), key(2)])
                if not await anyio.to_thread.run_sync(self.damage, tmp_path, key(1)):
                    pytest.skip("this suite does not say how to damage what is stored (damage)")
                assert await self.get(store, key(1)) is Outcome.CORRUPT
                assert await store.contains([key(1), key(2)]) == [False, True]
                assert await self.get(store, key(1)) is Outcome.MISS
            await self.put(store, [key(1)])
            assert await self.get(store, key(1)) == content(key(1))

    async def test_buffers_belong_to_the_caller(self, tmp_path: Path) -> None:
        """The store keeps no view of what it was shown: neither of objects nor of buffers that it filled."""
        async with self.opened(tmp_path) as store:
            data = memoryview(bytearray(content(key(1))))
            await store.store([(key(1), data)])
            await self.assert_left_alone(store, [data])
            into = blank(LAYOUT.segment_bytes)
            assert await store.load([Read(key(1), 0, into)]) == [Outcome.HIT]
            assert bytes(into) == content(key(1)), "an object changed with the buffer that it was stored from"
            await self.assert_left_alone(store, [into])
            assert await self.get(store, key(1)) == content(key(1)), "an object changed with a buffer that it was loaded into"

    async def test_buffers_may_be_registered(self, tmp_path: Path) -> None:
        """Memory that is announced beforehand works as any other does, which keeps working too."""
        async with self.opened(tmp_path) as store:
            region = blank(4 * LAYOUT.segment_bytes)
            store.register_buffer(region)
            inside = region[LAYOUT.segment_bytes : 2 * LAYOUT.segment_bytes]
            inside[:] = content(key(1))
            await store.store([(key(1), inside)])
            other = region[2 * LAYOUT.segment_bytes : 3 * LAYOUT.segment_bytes]
            assert await store.load([Read(key(1), 0, other)]) == [Outcome.HIT]
            assert bytes(other) == content(key(1))
            assert await self.get(store, key(1)) == content(key(1))
