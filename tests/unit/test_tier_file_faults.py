"""The file tier when the disk, other programs or the user do their worst: values and errors of the contract, no wrong byte."""

import errno
import os
import random
import shutil
import subprocess

import pytest

from oasiskv.errors import LayoutMismatch, TierFull, TierUnavailable
from oasiskv.tiers import Outcome, Read, SegmentLayout
from oasiskv.tiers import file_disk as disk
from oasiskv.tiers.file import FileStore

from .tier_files import LAYOUT, content, key, read, store_all, whole

pytestmark = pytest.mark.anyio
SEGMENT = LAYOUT.segment_bytes


def change(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def failing(code, after=0):
    """Stands in for an `os` function that works `after` times and fails then."""
    real, calls = os.pwritev, 0

    def call(fd, buffers, offset):
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset)

    return call


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB, where the system lets one be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_a_flipped_bit_is_found_wherever_it_is_and_the_segment_forgotten(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        for number in range(24):
            await store_all(store, [number])
            place = random.Random(number).randrange(SEGMENT)
            flipped = content(number)[place] ^ (1 << number % 8)
            change(tmp_path / "oasiskv-00000001.data", number * SEGMENT + place, bytes([flipped]))
            slot = place // LAYOUT.slot_bytes * LAYOUT.slot_bytes
            other = (slot + LAYOUT.slot_bytes) % SEGMENT
            assert (await read(store, number, other, LAYOUT.slot_bytes))[0] is Outcome.HIT
            assert (await read(store, number, slot, LAYOUT.slot_bytes))[0] is Outcome.CORRUPT
            assert await whole(store, number) is Outcome.MISS
        assert store.used_bytes == 0


async def test_one_damaged_slot_among_adjacent_reads_spoils_no_other(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, range(3))
        change(tmp_path / "oasiskv-00000001.data", SEGMENT + 1, bytes([content(1)[1] ^ 1]))
        buffers = [bytearray(SEGMENT) for _ in range(3)]
        outcomes = await store.load([Read(key(number), 0, memoryview(into)) for number, into in enumerate(buffers)])
        assert outcomes == [Outcome.HIT, Outcome.CORRUPT, Outcome.HIT]
        assert buffers[0] == content(0)
        assert buffers[2] == content(2)


async def test_what_is_forgotten_as_damaged_stays_forgotten(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, range(2))
        change(tmp_path / "oasiskv-00000001.data", 0, bytes(SEGMENT))
        assert await whole(store, 0) is Outcome.CORRUPT
    async with FileStore(LAYOUT, tmp_path) as store:
        assert await store.contains([key(0), key(1)]) == [False, True]


async def test_a_changed_name_in_the_index_gives_nobody_what_is_not_theirs(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, range(3))
    index = tmp_path / "oasiskv-00000001.index"
    place = index.read_bytes().index(key(1).digest)
    change(index, place, key(6).digest)  # same layer
    async with FileStore(LAYOUT, tmp_path) as store:
        assert await store.contains([key(n) for n in (0, 1, 6)]) == [True, False, False]


async def test_a_truncated_file_is_damage_to_what_it_cuts_and_to_nothing_else(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, range(3))
        os.truncate(tmp_path / "oasiskv-00000001.data", SEGMENT + LAYOUT.slot_bytes)
        assert (await read(store, 1, 0, LAYOUT.slot_bytes))[0] is Outcome.HIT
        assert await whole(store, 1) is Outcome.CORRUPT
        assert await whole(store, 2) is Outcome.CORRUPT
        assert await whole(store, 0) == content(0)
        await store_all(store, range(1, 3))
        assert await whole(store, 2) == content(2)


async def test_a_file_truncated_between_processes_lacks_what_it_lost(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, range(3))
    os.truncate(tmp_path / "oasiskv-00000001.data", 2 * SEGMENT + 1)
    async with FileStore(LAYOUT, tmp_path) as store:
        assert await store.contains([key(n) for n in range(3)]) == [True, True, False]
        assert await whole(store, 1) == content(1)


@pytest.mark.parametrize("suffixes", [["data"], ["index"], ["data", "index"]])
async def test_files_removed_underneath_are_misses_and_storing_goes_on(tmp_path, suffixes):
    async with FileStore(LAYOUT, tmp_path, 64 * SEGMENT) as store:
        await store_all(store, range(3))
        for suffix in suffixes:
            (tmp_path / f"oasiskv-00000001.{suffix}").unlink()
        if "data" in suffixes:
            assert [await whole(store, n) for n in range(3)] == [Outcome.MISS] * 3
            assert store.used_bytes == 0
        await store_all(store, range(3, 6))
        assert await whole(store, 5) == content(5)
        await store.delete([key(n) for n in range(6)])
        assert await store.contains([key(n) for n in range(6)]) == [False] * 6


async def test_a_folder_removed_underneath_is_an_error_to_store_in(tmp_path):
    folder = tmp_path / "kv"
    async with FileStore(LAYOUT, folder) as store:
        await store_all(store, range(3))
        shutil.rmtree(folder)
        assert await whole(store, 0) is Outcome.MISS
        with pytest.raises(TierUnavailable, match="kv"):
            await store_all(store, [4])


@pytest.mark.parametrize("take_away", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("elsewhere"))])
async def test_a_folder_taken_over_after_it_was_taken_away_is_not_written_to(tmp_path, take_away):
    folder = tmp_path / "kv"
    async with FileStore(LAYOUT, folder) as store:
        await store_all(store, [0])
        take_away(folder)
        async with FileStore(LAYOUT, folder) as other:
            await store_all(other, [1])
            for change in (store_all(store, [2]), store.delete([key(0)]), whole(store, 0)):  # the last finds other bytes
                with pytest.raises(TierUnavailable, match=r"oasiskv\.lock has been removed while the folder was in use"):
                    await change
            assert await whole(other, 1) == content(1)
            assert (folder / "oasiskv-00000001.data").stat().st_size == SEGMENT


@pytest.mark.parametrize("after", [0, 1])  # the data, and the index
async def test_a_full_disk_is_tier_full_and_nothing_half_written_stays(tmp_path, monkeypatch, after):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, [0])
        with monkeypatch.context() as patch:
            patch.setattr(disk.os, "pwritev", failing(errno.ENOSPC, after))
            with pytest.raises(TierFull, match="No space left"):
                await store_all(store, [1, 2])
        assert await store.contains([key(n) for n in range(3)]) == [True, False, False]
        assert (tmp_path / "oasiskv-00000001.data").stat().st_size == SEGMENT
        await store_all(store, [1])
        assert await whole(store, 0) == content(0)
        assert await whole(store, 1) == content(1)
    async with FileStore(LAYOUT, tmp_path) as store:
        assert await store.contains([key(n) for n in range(3)]) == [True, True, False]


async def test_failing_for_long_leaves_no_files_behind(tmp_path, monkeypatch):
    async with FileStore(LAYOUT, tmp_path) as store:
        monkeypatch.setattr(disk.os, "pwritev", failing(errno.ENOSPC))
        for number in range(5):
            with pytest.raises(TierFull):
                await store_all(store, [number])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["oasiskv.lock"]


async def test_a_disk_that_is_really_full_keeps_what_it_has(small_disk):
    segment = 256 << 10
    layout = SegmentLayout(8, 4, 16, 128)
    assert layout.segment_bytes == segment
    data = [memoryview(os.urandom(segment)) for _ in range(40)]
    async with FileStore(layout, small_disk / "kv") as store:

        async def store_one_by_one():
            for number, one in enumerate(data):
                await store.store([(key(number), one)])

        with pytest.raises(TierFull, match="lower its limit"):
            await store_one_by_one()
        held = await store.contains([key(n) for n in range(40)])
        assert held == sorted(held, reverse=True)
        assert 8 <= sum(held) < 16
        for number in range(sum(held)):
            into = memoryview(bytearray(segment))
            assert await store.load([Read(key(number), 0, into)]) == [Outcome.HIT]
            assert into == data[number]
        await store.delete([key(0), key(1)])  # room again
        await store.store([(key(50), data[0])])
    async with FileStore(layout, small_disk / "kv", 4 << 20) as store:
        assert sum(await store.contains([key(n) for n in range(51)])) == sum(held) - 1


async def test_input_and_output_errors_are_what_they_mean(tmp_path, monkeypatch):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, range(2))
        with monkeypatch.context() as patch:
            patch.setattr(disk.os, "pwritev", failing(errno.EIO))
            with pytest.raises(TierUnavailable, match="Input/output error"):
                await store_all(store, [3])

        def fails(code):
            def call(*_):
                raise OSError(code, os.strerror(code))

            return call

        with monkeypatch.context() as patch:
            patch.setattr(disk.os, "preadv", fails(errno.EIO))
            assert await whole(store, 0) is Outcome.CORRUPT  # a bad sector
        with monkeypatch.context() as patch:
            patch.setattr(disk.os, "preadv", fails(errno.ESTALE))
            with pytest.raises(TierUnavailable):
                await whole(store, 1)
        assert await whole(store, 1) == content(1)


async def test_reads_and_writes_that_stop_short_go_on(tmp_path, monkeypatch):
    real_read, real_write = os.preadv, os.pwritev
    monkeypatch.setattr(disk.os, "preadv", lambda fd, buffers, offset: real_read(fd, [buffers[0][:100]], offset))
    monkeypatch.setattr(disk.os, "pwritev", lambda fd, buffers, offset: real_write(fd, [buffers[0][:70]], offset))
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, range(3))
        assert [await whole(store, n) for n in range(3)] == [content(n) for n in range(3)]


async def test_a_folder_that_cannot_be_written_is_unavailable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(TierUnavailable, match="file"):
        await FileStore(LAYOUT, tmp_path / "file").open()
    real = os.open

    def refuse(path, flags, *rest, **named):
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)  # root may write where the mode forbids it
    with pytest.raises(TierUnavailable, match="Permission denied"):
        await FileStore(LAYOUT, tmp_path).open()


async def test_links_and_folders_in_place_of_files_are_not_followed(tmp_path):
    async with FileStore(LAYOUT, tmp_path / "kv") as store:
        await store_all(store, [0])
    precious = tmp_path / "precious"
    precious.write_bytes(bytes(SEGMENT))
    data = tmp_path / "kv" / "oasiskv-00000001.data"
    data.unlink()
    data.symlink_to(precious)
    async with FileStore(LAYOUT, tmp_path / "kv") as store:
        assert await store.contains([key(0)]) == [False]
    assert precious.read_bytes() == bytes(SEGMENT)
    (tmp_path / "kv" / "oasiskv-00000007.data").mkdir()
    (tmp_path / "kv" / "oasiskv-00000007.index").mkdir()
    with pytest.raises(TierUnavailable, match=r"oasiskv-00000007\.data is no regular file"):
        await FileStore(LAYOUT, tmp_path / "kv").open()


async def test_other_files_in_the_folder_are_left_alone(tmp_path):
    names = ["notes.txt", "00000001.data", "00000002.index", "oasiskv-1.data", "oasiskv-00000001.data.bak"]
    for name in names:
        (tmp_path / name).write_text(name)
    async with FileStore(LAYOUT, tmp_path, 2 * SEGMENT) as store:
        await store_all(store, range(6))
    assert [(tmp_path / name).read_text() for name in names] == names


async def test_leftovers_of_a_crash_are_cleared_away(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, range(3))
    (tmp_path / "oasiskv-00000002.data").write_bytes(b"data without an index" * 1000)
    (tmp_path / "oasiskv-00000003.index").write_bytes(b"index without data")
    with (tmp_path / "oasiskv-00000001.data").open("ab") as data, (tmp_path / "oasiskv-00000001.index").open("ab") as index:
        data.write(bytes(100_000))
        index.write(b"\x01half a record")
    async with FileStore(LAYOUT, tmp_path) as store:
        assert await whole(store, 2) == content(2)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "oasiskv-00000001.data",
            "oasiskv-00000001.index",
            "oasiskv.lock",
        ]
        assert (tmp_path / "oasiskv-00000001.data").stat().st_size == 3 * SEGMENT
        await store.delete([key(0)])
    async with FileStore(LAYOUT, tmp_path) as store:  # the deletion was not written behind the torn record
        assert await store.contains([key(n) for n in range(3)]) == [False, True, True]


async def test_a_newer_format_is_refused_with_both_versions_named(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, [0])
    change(tmp_path / "oasiskv-00000001.index", 8, (7).to_bytes(4, "little"))
    with pytest.raises(LayoutMismatch, match=r"0001\.index.*version 7.*version 1.*use another folder, or delete it"):
        await FileStore(LAYOUT, tmp_path).open()


async def test_a_move_that_was_cut_short_leaves_one_copy(tmp_path):
    async with FileStore(LAYOUT, tmp_path, pack_bytes=SEGMENT) as store:
        await store_all(store, [0])
    for suffix in ("data", "index"):
        shutil.copy(tmp_path / f"oasiskv-00000001.{suffix}", tmp_path / f"oasiskv-00000002.{suffix}")
    async with FileStore(LAYOUT, tmp_path) as store:
        assert store.used_bytes == SEGMENT
        assert await whole(store, 0) == content(0)
        assert [path.name for path in tmp_path.glob("*.data")] == ["oasiskv-00000002.data"]


async def test_direct_reads_serve_aligned_and_unaligned_buffers(tmp_path):
    layout = SegmentLayout(2, 4, 16, 128)
    data = random.Random(0).randbytes(layout.segment_bytes)
    async with FileStore(layout, tmp_path, direct=True) as store:
        await store.store([(key(0), memoryview(data))])
        room = memoryview(bytearray(layout.segment_bytes + 1))
        for into in (room[:-1], room[1:]):
            assert await store.load([Read(key(0), 0, into)]) == [Outcome.HIT]
            assert into == data
        change(tmp_path / "oasiskv-00000001.data", 5, bytes([data[5] ^ 1]))
        assert await store.load([Read(key(0), 0, room[1:])]) == [Outcome.CORRUPT]
