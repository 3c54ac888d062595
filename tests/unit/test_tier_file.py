"""What the file tier promises while nothing is wrong with the disk."""

import os
import subprocess
import sys
from itertools import count

import anyio
import pytest

from oasiskv.errors import ConfigError, InputError, LayoutMismatch, StateError, TierFull, TierUnavailable
from oasiskv.tiers import Location, Outcome, Read
from oasiskv.tiers.file import FileStore

from .tier_files import LAYOUT, content, disk_bytes, key, read, store_all, whole

pytestmark = pytest.mark.anyio
SEGMENT = LAYOUT.segment_bytes


async def test_what_is_stored_is_read_back_whole_and_in_ranges(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, range(3))
        assert await whole(store, 1) == content(1)
        for offset, length in ((0, 1), (3, 2), (LAYOUT.segment_bytes // LAYOUT.slot_bytes - 1, 1)):
            start, size = offset * LAYOUT.slot_bytes, length * LAYOUT.slot_bytes
            assert await read(store, 2, start, size) == (Outcome.HIT, content(2)[start : start + size])


async def test_one_call_reads_many_ranges_of_many_segments_in_any_order(tmp_path):
    async with FileStore(LAYOUT, tmp_path, pack_bytes=2 * SEGMENT) as store:
        await store_all(store, range(6))
        slots = SEGMENT // LAYOUT.slot_bytes
        places = [(segment, slot * LAYOUT.slot_bytes) for slot in reversed(range(slots)) for segment in range(6)]
        buffers = [bytearray(LAYOUT.slot_bytes) for _ in places]
        reads = [Read(key(segment), offset, memoryview(into)) for (segment, offset), into in zip(places, buffers, strict=True)]
        reads += [reads[0], Read(key(99), 0, memoryview(bytearray(LAYOUT.slot_bytes)))]
        outcomes = await store.load(reads)
        assert outcomes == [Outcome.HIT] * (len(places) + 1) + [Outcome.MISS]
        for (segment, offset), into in zip(places, buffers, strict=True):
            assert into == content(segment)[offset : offset + LAYOUT.slot_bytes]


async def test_large_reads_are_shared_among_threads(tmp_path):
    data = memoryview(os.urandom(4 << 20))
    async with FileStore(LAYOUT, tmp_path, threads=3) as store:
        await store.store([(key(n), data) for n in range(3)])
        buffers = [bytearray(len(data)) for _ in range(3)]
        assert await store.load([Read(key(n), 0, memoryview(b)) for n, b in enumerate(buffers)]) == [Outcome.HIT] * 3
        assert all(buffer == data for buffer in buffers)


async def test_empty_calls_do_nothing(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store.store([])
        await store.delete([])
        assert await store.load([]) == [] == await store.contains([])


async def test_a_range_beyond_the_object_is_a_miss(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, range(2))  # the next object lies where the range would go
        assert (await read(store, 0, SEGMENT, LAYOUT.slot_bytes))[0] is Outcome.MISS
        assert (await read(store, 0, SEGMENT - LAYOUT.slot_bytes, 2 * LAYOUT.slot_bytes))[0] is Outcome.MISS
        assert await store.contains([key(0)]) == [True]


async def test_storing_again_changes_nothing(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, [0, 0])
        await store.store([(key(0), memoryview(content(1)))])
        assert await whole(store, 0) == content(0)
        assert store.used_bytes == SEGMENT


async def test_the_next_store_finds_what_the_last_one_held(tmp_path):
    async with FileStore(LAYOUT, tmp_path, pack_bytes=3 * SEGMENT) as store:
        await store_all(store, range(10))
        await store.delete([key(4)])
    async with FileStore(LAYOUT, tmp_path, pack_bytes=3 * SEGMENT) as store:
        assert store.traits.persistent
        assert store.used_bytes == 9 * SEGMENT
        assert await store.contains([key(n) for n in range(10)]) == [n != 4 for n in range(10)]
        for number in {*range(10)} - {4}:
            assert await whole(store, number) == content(number)
        await store_all(store, [4])
        assert await whole(store, 4) == content(4)


async def test_many_short_lives_do_not_leave_many_files(tmp_path):
    for number in range(20):
        async with FileStore(LAYOUT, tmp_path, pack_bytes=8 * SEGMENT) as store:
            await store_all(store, [number])
            if number % 4 == 3:
                await store.delete([key(number)])  # the next one begins where this one lay
            assert [await whole(store, n) for n in range(number)] == [
                Outcome.MISS if n % 4 == 3 else content(n) for n in range(number)
            ]
    assert len(list(tmp_path.glob("*.data"))) <= 3


async def test_the_least_recently_used_segments_go_first(tmp_path):
    async with FileStore(LAYOUT, tmp_path, 4 * SEGMENT) as store:
        await store_all(store, range(4))
        assert await whole(store, 0) == content(0)
        await store_all(store, [1])  # a use, too
        await store_all(store, [4, 5])
        assert await store.contains([key(n) for n in range(6)]) == [True, True, False, False, True, True]
        assert store.used_bytes == store.limit_bytes == 4 * SEGMENT


async def test_a_smaller_limit_holds_from_the_opening_on(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, range(8))
    async with FileStore(LAYOUT, tmp_path, 3 * SEGMENT) as store:
        assert store.used_bytes == 3 * SEGMENT
        assert await store.contains([key(n) for n in range(8)]) == [False] * 5 + [True] * 3


async def test_an_object_larger_than_the_limit_is_refused_and_nothing_else_goes(tmp_path):
    async with FileStore(LAYOUT, tmp_path, 2 * SEGMENT) as store:
        await store_all(store, [0])
        with pytest.raises(TierFull, match=r"do(es)? not fit"):
            await store.store([(key(1), memoryview(content(1))), (key(2), memoryview(bytes(3 * SEGMENT)))])
        assert await store.contains([key(0), key(1), key(2)]) == [True, True, False]


@pytest.mark.parametrize("sync", [False, True])
async def test_the_disk_holds_about_as_much_as_the_limit_in_long_runs(tmp_path, sync):
    limit = 40 * SEGMENT
    async with FileStore(LAYOUT, tmp_path, limit, sync=sync) as store:
        for number in range(400 if not sync else 60):
            await store_all(store, [number])
            await whole(store, 0)  # it stays, and its pack with it
            assert disk_bytes(tmp_path) < 1.5 * limit
        assert await whole(store, 0) == content(0)


async def test_segments_that_end_inside_a_block_of_the_disk_give_their_space_back_too(tmp_path):
    size = 3 * LAYOUT.slot_bytes  # 1.5 KiB: no segment has a block of its own
    async with FileStore(LAYOUT, tmp_path, 16 * size, pack_bytes=1 << 20) as store:
        for number in range(400):
            await store.store([(key(number), memoryview(content(number)[:size]))])
        assert store.used_bytes == 16 * size
        (data,) = tmp_path.glob("*.data")
        assert data.stat().st_blocks * 512 < 2 * 16 * size < data.stat().st_size
        into = bytearray(size)
        assert await store.load([Read(key(399), 0, memoryview(into))]) == [Outcome.HIT]
        assert into == content(399)[:size]


async def test_survivors_of_nearly_empty_packs_move_so_that_files_stay_few(tmp_path):
    limit = 64 * SEGMENT
    keep = [n for n in range(640) if n % 16 == 0]
    async with FileStore(LAYOUT, tmp_path, limit, pack_bytes=8 * SEGMENT) as store:
        for number in range(640):
            await store_all(store, [number])
            buffers = {kept: bytearray(SEGMENT) for kept in keep[: number // 16 + 1]}
            await store.load([Read(key(kept), 0, memoryview(into)) for kept, into in buffers.items()])
            assert all(into == content(kept) for kept, into in buffers.items())
        assert len(list(tmp_path.glob("*.data"))) < 4 * 8 + 3
    async with FileStore(LAYOUT, tmp_path, limit, pack_bytes=8 * SEGMENT) as store:
        assert await store.contains([key(n) for n in keep]) == [True] * len(keep)


async def test_deleting_gives_the_disk_back(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, range(64))
        before = disk_bytes(tmp_path)
        await store.delete([key(n) for n in range(60)] + [key(1000)])
        assert store.used_bytes == 4 * SEGMENT
        assert disk_bytes(tmp_path) < before / 4
        assert await whole(store, 63) == content(63)


async def test_a_file_system_without_holes_gives_space_back_file_by_file(tmp_path, monkeypatch):
    monkeypatch.setattr("oasiskv.tiers.file_pack.punch", lambda *_: False)
    limit = 32 * SEGMENT
    async with FileStore(LAYOUT, tmp_path, limit, pack_bytes=4 * SEGMENT) as store:
        for number in range(200):
            await store_all(store, [number])
            assert store.used_bytes <= limit
            assert disk_bytes(tmp_path) < 1.3 * limit
        held = await store.contains([key(n) for n in range(200)])
        assert sum(held) >= 24
        assert held[-24:] == [True] * 24
        await store.delete([key(n) for n in range(200)])
        await store_all(store, range(300, 332))
        assert await whole(store, 331) == content(331)


async def test_one_store_at_a_time_has_a_folder(tmp_path):
    async with FileStore(LAYOUT, tmp_path):
        with pytest.raises(TierUnavailable, match=rf"{tmp_path} is in use by process {os.getpid()}"):
            await FileStore(LAYOUT, tmp_path).open()
    async with FileStore(LAYOUT, tmp_path):
        pass


async def test_the_lock_of_another_process_names_it(tmp_path):
    program = (
        "import sys, anyio\n"
        "from oasiskv.tiers import SegmentLayout\n"
        "from oasiskv.tiers.file import FileStore\n"
        "async def main():\n"
        f"    async with FileStore(SegmentLayout(1, 1, 1, 1), {str(tmp_path)!r}):\n"
        "        print('open', flush=True)\n"
        "        sys.stdin.read()\n"
        "anyio.run(main)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(TierUnavailable, match=f"in use by process {other.pid}"):
            await FileStore(LAYOUT, tmp_path).open()


async def test_another_layout_is_refused_with_both_named(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, [0])
    other = type(LAYOUT)(LAYOUT.kv_heads, LAYOUT.num_blocks, LAYOUT.block_size, LAYOUT.head_dim * 2, "bfloat16")
    with pytest.raises(LayoutMismatch, match=r"head_dim=16.*head_dim=32.*use another folder, or delete it"):
        await FileStore(other, tmp_path).open()
    async with FileStore(LAYOUT, tmp_path) as store:  # the refusal has harmed nothing, and let the lock go
        assert await whole(store, 0) == content(0)


async def test_calls_before_opening_and_after_closing_are_refused(tmp_path):
    store = FileStore(LAYOUT, tmp_path)
    calls = count()
    for words in ("not open", "closed"):
        for call in (store.store([]), store.load([]), store.contains([]), store.delete([])):
            next(calls)
            with pytest.raises(StateError, match=words):
                await call
        if words == "not open":
            await store.open()
            with pytest.raises(StateError, match="opened before"):
                await store.open()
            await store.aclose()
            await store.aclose()
    assert next(calls) == 8


async def test_arguments_that_break_the_contract_are_refused(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        with pytest.raises(InputError, match="slot_bytes"):
            await store.store([(key(0), memoryview(bytes(LAYOUT.slot_bytes + 1)))])
        with pytest.raises(InputError, match="read-only"):
            await store.load([Read(key(0), 0, memoryview(bytes(LAYOUT.slot_bytes)))])


def test_a_location_says_where_and_how(tmp_path):
    store = FileStore.at(Location.parse(f"file:{tmp_path}/kv?limit=2MiB&sync=yes&direct=no"), LAYOUT)
    assert store.limit_bytes == 2 << 20
    for text, words in ((f"file:{tmp_path}?size=1", "no option 'size'"), ("file:?limit=1MiB", "names no folder")):
        with pytest.raises(ConfigError, match=words):
            FileStore.at(Location.parse(text), LAYOUT)


async def test_a_folder_is_made_with_its_parents(tmp_path):
    async with FileStore(LAYOUT, tmp_path / "a" / "b") as store:
        await store_all(store, [0])
    assert (tmp_path / "a" / "b" / "oasiskv-00000001.data").stat().st_size == SEGMENT


async def test_calls_may_overlap(tmp_path):
    async with FileStore(LAYOUT, tmp_path, 48 * SEGMENT, pack_bytes=4 * SEGMENT) as store:
        await store_all(store, range(32))

        async def write(start):
            for number in range(start, start + 40):
                await store_all(store, [number])

        async def check():
            for number in [*range(32)] * 3:
                outcome, data = await read(store, number, 0, SEGMENT)
                assert outcome is Outcome.MISS or (outcome is Outcome.HIT and data == content(number))

        async def drop():
            for number in range(0, 32, 3):
                await store.delete([key(number)])

        async with anyio.create_task_group() as group:
            for task in (check, check, drop):
                group.start_soon(task)
            for start in (100, 200, 220):
                group.start_soon(write, start)
        assert store.used_bytes <= store.limit_bytes
        assert await whole(store, 259) == content(259)
