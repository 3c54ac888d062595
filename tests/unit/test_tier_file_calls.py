"""Calls of the file tier that are cancelled, closed under way, or made in a fork; and many of them."""

import asyncio
import gc
import os
import threading
import time

import anyio
import pytest

from oasiskv.errors import StateError
from oasiskv.tiers import Outcome, Read
from oasiskv.tiers import file_disk as disk
from oasiskv.tiers.file import FileStore

from .tier_files import LAYOUT, content, key, read, store_all, whole

pytestmark = pytest.mark.anyio
SEGMENT = LAYOUT.segment_bytes


class Gate:
    """Stands in for `os.preadv` or `os.pwritev`: says that it was entered, and waits to be let through."""

    def __init__(self, real):
        self.real = real
        self.entered = threading.Event()
        self.open = threading.Event()
        self.left = threading.Event()
        self.inside = 0

    def __call__(self, *args):
        self.inside += 1
        self.entered.set()
        assert self.open.wait(30)
        try:
            return self.real(*args)
        finally:
            self.inside -= 1
            self.left.set()

    async def until_entered(self):
        while not self.entered.is_set():
            await anyio.sleep(0.001)


@pytest.fixture
def read_gate(monkeypatch):
    gate = Gate(os.preadv)
    monkeypatch.setattr(disk.os, "preadv", gate)
    yield gate
    gate.open.set()


@pytest.fixture
def write_gate(monkeypatch):
    gate = Gate(os.pwritev)
    monkeypatch.setattr(disk.os, "pwritev", gate)
    yield gate
    gate.open.set()


def open_later(gate):
    timer = threading.Timer(0.05, gate.open.set)
    timer.start()
    return timer


async def test_a_cancelled_load_ends_when_nothing_writes_to_its_buffer_any_more(tmp_path, read_gate):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, [0])
        buffer = bytearray(SEGMENT)
        async with anyio.create_task_group() as group:
            group.start_soon(store.load, [Read(key(0), 0, memoryview(buffer))])
            await read_gate.until_entered()
            timer = open_later(read_gate)
            group.cancel_scope.cancel()
        assert read_gate.left.is_set()
        timer.join()
        assert await whole(store, 0) == content(0)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("shares", [1, 3])
async def test_a_load_cancelled_by_asyncio_itself_does_so_too(tmp_path, read_gate, anyio_backend, shares):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, [0])
        data = bytes(shares * (2 << 20))
        await store.store([(key(1), memoryview(data[: 1 << 20]))])
        reads = [Read(key(1), 0, memoryview(bytearray(1 << 20))) for _ in range(len(data) >> 20)]
        task = asyncio.create_task(store.load(reads))
        await read_gate.until_entered()
        timer = open_later(read_gate)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.002)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert read_gate.inside == 0
        assert read_gate.left.is_set()
        timer.join()
        assert await whole(store, 0) == content(0)


async def test_a_call_that_is_cancelled_while_it_waits_for_a_thread_never_begins(tmp_path, read_gate):
    async with FileStore(LAYOUT, tmp_path, threads=1) as store:
        await store_all(store, [0])
        buffer = bytearray(SEGMENT)
        async with anyio.create_task_group() as group:
            group.start_soon(whole, store, 0)
            await read_gate.until_entered()
            with anyio.move_on_after(0.02) as scope:
                await store.load([Read(key(0), 0, memoryview(buffer))])
            assert scope.cancelled_caught
            read_gate.open.set()
        assert not any(buffer)


async def test_a_cancelled_store_leaves_whole_segments_or_none(tmp_path, write_gate, monkeypatch):
    monkeypatch.setattr("oasiskv.tiers.file_folder._GROUP_BYTES", SEGMENT)
    write_gate.open.set()
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, [100])
        write_gate.open.clear()
        write_gate.entered.clear()
        async with anyio.create_task_group() as group:
            group.start_soon(store_all, store, range(50))
            await write_gate.until_entered()
            timer = open_later(write_gate)
            group.cancel_scope.cancel()
        timer.join()
        held = await store.contains([key(n) for n in range(50)])
        assert held == [True] + [False] * 49  # the one under way, and none after it
        assert await whole(store, 0) == content(0)
    async with FileStore(LAYOUT, tmp_path) as store:
        assert await store.contains([key(n) for n in range(50)]) == held


async def test_closing_ends_calls_that_are_under_way_and_then_lets_the_folder_go(tmp_path, read_gate):
    store = FileStore(LAYOUT, tmp_path)
    await store.open()
    data = bytes(4 * SEGMENT)
    await store.store([(key(n), memoryview(data)) for n in range(600)])
    ends = []

    async def load():
        try:
            await store.load([Read(key(n), 0, memoryview(bytearray(len(data)))) for n in range(600)])
        except StateError:
            ends.append(time.monotonic())

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(load)
        await read_gate.until_entered()
        timer = open_later(read_gate)
        await store.aclose()
        closed = time.monotonic()
    timer.join()
    assert len(ends) == 3
    assert max(ends) - closed < 2
    await FileStore(LAYOUT, tmp_path).aclose()
    async with FileStore(LAYOUT, tmp_path) as again:
        assert again.used_bytes == 600 * len(data)


async def test_closing_does_not_wait_for_ever_and_the_last_call_lets_the_folder_go(tmp_path, read_gate, monkeypatch):
    monkeypatch.setattr("oasiskv.tiers.file._PATIENCE_S", 0.05)
    store = FileStore(LAYOUT, tmp_path)
    await store.open()
    await store_all(store, [0])
    before = fds()
    async with anyio.create_task_group() as group:
        group.start_soon(whole, store, 0)
        await read_gate.until_entered()
        await store.aclose()
        assert not read_gate.left.is_set()
        read_gate.open.set()
    assert fds() == before - 1
    async with FileStore(LAYOUT, tmp_path) as again:
        assert await whole(again, 0) == content(0)


async def test_an_opening_that_is_cancelled_lets_the_folder_go(tmp_path, write_gate, monkeypatch):
    entered = threading.Event()
    real = os.listdir

    def slow(path):
        entered.set()
        time.sleep(0.05)
        return real(path)

    monkeypatch.setattr("oasiskv.tiers.file_folder.os.listdir", slow)

    async def use():
        async with FileStore(LAYOUT, tmp_path):
            await anyio.sleep_forever()

    before = fds()
    async with anyio.create_task_group() as group:
        group.start_soon(use)
        while not entered.is_set():
            await anyio.sleep(0.001)
        group.cancel_scope.cancel()
    assert fds() == before
    async with FileStore(LAYOUT, tmp_path):
        pass


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 on, about forks of processes with threads
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_forked_child_is_refused_and_leaves_the_lock_to_its_parent(tmp_path, anyio_backend):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, [0])
        child = os.fork()
        if not child:
            code = 1
            try:
                for call in (store.store, store.load, store.contains, store.delete):
                    with pytest.raises(StateError, match="fork"):
                        call([]).send(None)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert await whole(store, 0) == content(0)
        with pytest.raises(Exception, match="in use by process"):
            await FileStore(LAYOUT, tmp_path).open()


def fds():
    return len(os.listdir("/proc/self/fd"))


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_ten_thousand_cycles_leave_memory_files_and_threads_as_they_were(tmp_path):
    def now():
        gc.collect()
        return resident_bytes(), fds(), threading.active_count()

    async with FileStore(LAYOUT, tmp_path, 64 * SEGMENT) as store:
        counts = []
        buffers = [bytearray(SEGMENT) for _ in range(8)]
        for cycle in range(0, 10_000, 8):
            numbers = [number % 5000 for number in range(cycle, cycle + 8)]
            await store.store([(key(number), memoryview(content(number % 100))) for number in numbers])
            reads = [Read(key(number), 0, memoryview(into)) for number, into in zip(numbers, buffers, strict=True)]
            assert await store.load(reads) == [Outcome.HIT] * 8
            assert all(into == content(number % 100) for number, into in zip(numbers, buffers, strict=True))
            if cycle in (3000, 9992):
                counts.append(now())
        assert store.used_bytes == 64 * SEGMENT
    (memory, files, threads), (memory_after, files_after, threads_after) = counts
    assert memory_after - memory < 4 << 20
    assert files_after == files
    assert threads_after <= threads


async def test_a_miss_changes_no_buffer_that_was_not_asked_for(tmp_path):
    async with FileStore(LAYOUT, tmp_path) as store:
        await store_all(store, [0])
        room = bytearray(b"\xaa" * 3 * SEGMENT)
        view = memoryview(room)
        outcomes = await store.load([Read(key(0), 0, view[SEGMENT : 2 * SEGMENT]), Read(key(1), 0, view[: LAYOUT.slot_bytes])])
        assert outcomes == [Outcome.HIT, Outcome.MISS]
        assert room[LAYOUT.slot_bytes : SEGMENT] == b"\xaa" * (SEGMENT - LAYOUT.slot_bytes)
        assert room[2 * SEGMENT :] == b"\xaa" * SEGMENT
        assert (await read(store, 0, 0, LAYOUT.slot_bytes))[1] == content(0)[: LAYOUT.slot_bytes]
