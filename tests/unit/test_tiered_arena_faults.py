"""Whatever call of the store fails, and however: a sound manager, the right KV or a typed error, and nothing left behind."""

import dataclasses
import logging
import os
import resource
import signal
import threading
import time

import anyio
import pytest
import torch

from oasiskv import KVManager, Phase, segment_writer, tiered_arena
from oasiskv.errors import ArenaExhausted, CapacityError, OasisError, StateError, TierError, TierUnavailable
from oasiskv.slot_table import SlotState
from oasiskv.testing.faults import Fault, FaultKind, FaultPlan
from oasiskv.testing.faulty import FaultyStore
from oasiskv.testing.latency import LatencyStore
from oasiskv.tiers import SegmentLayout, breaker, lane_jobs
from oasiskv.tiers.file import FileStore
from oasiskv.tiers.memory import MemoryStore

from .driver import PAGE_BYTES, SHAPE, Driver, Part, Rows, close_to, tiny
from .moody import Moody

CONFIG = tiny(arena_bytes=24 * PAGE_BYTES, segment_blocks=4, correction_blocks=1, workers=1)
LAYOUT = SegmentLayout.of(SHAPE, CONFIG)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(tiered_arena, "_READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(tiered_arena, "_BULK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(segment_writer, "_PATIENCE_S", 0.02)
    for module in (breaker, lane_jobs):
        for name in ("FIRST_BACK_OFF_S", "LAST_BACK_OFF_S", "_FIRST_PAUSE_S", "_LAST_PAUSE_S"):
            monkeypatch.setattr(module, name, 0.01, raising=False)


def attempt(action):
    """Run it. An error must be one that says what the store did."""
    try:
        action()
    except (TierError, CapacityError):
        return


def scenario(plan, to_the_end=False):
    """Prompts, decoding, a fork, a crop and an end, while the store does as planned. Returns the plan.

    Before the last check nothing fails any more, unless `to_the_end`.
    """
    before = set(threading.enumerate())
    driver = Driver(KVManager(SHAPE, CONFIG, tier=FaultyStore(MemoryStore(LAYOUT), plan)))
    manager = driver.manager

    def step(part):
        def run():
            part.rows = driver.draw(part.tokens)
            try:
                outputs = driver.run(part)
            finally:
                if manager.open_step:
                    manager.open_step.abort()
            assert all(output.isfinite().all() for output in outputs)

        attempt(run)
        attempt(driver.check)

    sequence = driver.create()
    for _ in range(3):
        step(Part(sequence, 4 * 12))
        manager.flush()
    for _ in range(3):
        step(Part(sequence, 1))
    step(Part(sequence, 4, 3, 2))
    attempt(lambda: driver.fork(sequence))
    for one in manager.sequences:
        step(Part(one, 1))
    attempt(lambda: driver.crop(sequence, sequence.length - 30))
    driver.texts[sequence] = tuple(tensor[:, : sequence.length] for tensor in driver.texts[sequence])
    step(Part(sequence, 1))

    if not to_the_end:
        plan.clear()
    until = time.monotonic() + 10
    while True:
        try:
            driver.check()  # nothing was lost: the store has all of it now
            break
        except TierUnavailable:  # it is taken for dead until it answers a probe
            assert time.monotonic() < until
            time.sleep(0.02)
    for one in manager.sequences:
        driver.free(one)
    arena = manager.rooms.arena
    assert arena.used_pages == 0
    manager.close()
    until = time.monotonic() + 5
    while not set(threading.enumerate()) <= before:  # idle threads of anyio end a moment after their loop
        assert time.monotonic() < until
        time.sleep(0.01)
    return plan


def test_the_scenario_reaches_the_store():
    calls = scenario(FaultPlan()).calls
    for operation, last in LAST.items():
        assert calls[operation] >= last


LAST = {"store": 8, "load": 24, "delete": 6}
CASES = [
    (kind, operation)
    for kind, operations in {
        FaultKind.UNAVAILABLE: ("store", "load", "delete"),
        FaultKind.FULL: ("store",),
        FaultKind.SHORT: ("load",),
        FaultKind.FLIP: ("load",),
        FaultKind.LATE: ("load",),
        FaultKind.HANG: ("load",),
    }.items()
    for operation in operations
]


@pytest.mark.parametrize("onwards", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(("kind", "operation"), CASES, ids=lambda value: getattr(value, "name", value))
def test_the_nth_call_fails(kind, operation, onwards):
    for call in range(1, LAST[operation] + 1):
        plan = scenario(FaultPlan(Fault(kind, operation, call, onwards, delay_s=0.2)), to_the_end=operation == "delete")
        assert plan.struck


def test_a_late_write_lands_in_no_slot_that_is_free_or_holds_a_block():
    plan = FaultPlan()
    driver = Driver(KVManager(SHAPE, CONFIG, tier=FaultyStore(MemoryStore(LAYOUT), plan)))
    sequence = driver.create(4 * 48, chunk=40)
    driver.manager.flush()
    driver.decode(sequence)
    arena = driver.manager.rooms.arena
    plan.add(Fault(FaultKind.LATE, "load", onwards=True, delay_s=0.4))
    pages = torch.tensor(sequence.pages[2:9]).expand(1, SHAPE.kv_heads, -1)
    for _ in range(2):
        arena.begin_step()
    assert (arena.locate(0, pages) < 0).any()
    assert driver.manager.stats().quarantined_blocks > 0
    assert (arena._table.state == SlotState.QUARANTINE).any()
    free = list(arena._table.free[0])
    held = arena.layers[0][free].clone()
    plan.clear()
    time.sleep(0.6)
    assert torch.equal(arena.layers[0][free], held)
    for _ in range(40):
        arena.begin_step()
        arena.locate(0, torch.tensor(sequence.pages[10:18]).expand(1, SHAPE.kv_heads, -1))
        arena.locate(0, torch.tensor(sequence.pages[20:28]).expand(1, SHAPE.kv_heads, -1))
    assert not (arena._table.state[0] == SlotState.QUARANTINE).any()
    driver.check()
    driver.manager.close()


def test_ten_thousand_fetches_and_evictions_leave_memory_threads_and_files_as_they_were(tmp_path):
    config = tiny(arena_bytes=24 * PAGE_BYTES, segment_blocks=4)
    driver = Driver(KVManager(SHAPE, config, tier=FileStore(LAYOUT, tmp_path)))
    sequence = driver.create(4 * 48, chunk=40)
    driver.manager.flush()
    arena = driver.manager.rooms.arena
    parts = torch.tensor(sequence.pages).view(-1, 1, 4).expand(-1, SHAPE.kv_heads, -1)

    def cycles(count):
        for number in range(count):
            arena.begin_step()
            assert (arena.locate(number % 2, parts[number // 2 % len(parts)][None]) >= 0).all()

    cycles(2000)
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cycles(10_000)
    assert driver.manager.stats().fetched_blocks > 50_000
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() == threads
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < resident + (8 << 10)
    driver.check()
    driver.manager.close()


def test_closing_while_a_read_hangs_is_bounded(monkeypatch):
    monkeypatch.setattr(tiered_arena, "_READ_TIMEOUT_S", 30.0)
    plan = FaultPlan()
    driver = Driver(KVManager(SHAPE, CONFIG, tier=FaultyStore(MemoryStore(LAYOUT), plan)))
    sequence = driver.create(4 * 48, chunk=40)
    driver.manager.flush()
    plan.add(Fault(FaultKind.HANG, "store", onwards=True))
    for _ in range(20):
        driver.decode(sequence)
    begin = time.monotonic()
    driver.manager.close()
    assert time.monotonic() - begin < 15


def test_steps_that_fail_or_are_aborted_let_nothing_be_evicted_that_background_work_will_copy():
    config = tiny(arena_bytes=24 * PAGE_BYTES, segment_blocks=2, workers=1)
    for seed in range(6):
        store = LatencyStore(MemoryStore(SegmentLayout.of(SHAPE, config)), load_s=0.02)
        driver = Driver(KVManager(SHAPE, config, tier=store), seed)
        manager = driver.manager
        first, second = driver.create(4 * 40, chunk=32), driver.create(4 * 4)
        manager.flush()
        for _ in range(3):
            driver.decode(first)
            with pytest.raises(ArenaExhausted):
                driver.begin(Part(second, 4 * 30))
            for _ in range(2):
                driver.begin(Part(second, 4 * 8)).abort()
        driver.check()
        manager.close()


def wait_until(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


PATIENT = dataclasses.replace(CONFIG, tier_patience_s=20.0)


def stored_prompt(store, config=PATIENT):
    """A prompt that is stored, a fifth of it in the store alone, and a store that fails from now on."""
    driver = Driver(KVManager(SHAPE, config, tier=store))
    sequence = driver.create(4 * 30, chunk=40)
    driver.manager.flush()
    driver.decode(sequence)
    store.error = TierUnavailable("down")
    return driver, sequence


def fill(driver, sequence):
    """Decode more than the arena holds."""
    for _ in range(30):
        driver.decode(sequence, 4, 3, 4)


class Mender(logging.Handler):
    """Mends a store a moment after somebody has begun to wait for it."""

    def __init__(self, store):
        super().__init__()
        self.store = store
        self.waits = []

    def emit(self, record):
        if getattr(record, "event", None) == "tier-wait":
            self.waits.append(record.values)
            threading.Timer(0.3, self.mend).start()

    def mend(self):
        self.store.error = None


@pytest.fixture
def mender():
    made = Mender(Moody(LAYOUT))
    logger = logging.getLogger("oasiskv")
    logger.addHandler(made)
    yield made
    logger.removeHandler(made)


@pytest.mark.parametrize("what", ["no room in the arena", "all blocks of a sequence"])
def test_an_outage_is_waited_for(what, mender):
    driver, sequence = stored_prompt(mender.store)
    with driver.manager:
        if what == "no room in the arena":
            fill(driver, sequence)
        else:
            part = Part(sequence, 9, rows=driver.draw(9))
            expected = driver.full(sequence, part.rows)
            close_to(driver.run(part)[0], expected)
        assert [wait["patience_s"] for wait in mender.waits] == [20]
        driver.manager.flush()
        driver.check()


@pytest.mark.parametrize(("what", "error"), [("room", ArenaExhausted), ("all", TierUnavailable)])
def test_patience_ends(what, error):
    store = Moody(LAYOUT)
    driver, sequence = stored_prompt(store, dataclasses.replace(CONFIG, tier_patience_s=0.3))
    with driver.manager:
        begin = time.monotonic()
        with pytest.raises(error):
            fill(driver, sequence) if what == "room" else driver.manager.full_kv(sequence, 0)
        assert 0.3 <= time.monotonic() - begin < 5
        store.error = None


def test_an_outage_has_one_patience_for_all_calls():
    store = Moody(LAYOUT)
    driver, sequence = stored_prompt(store, dataclasses.replace(CONFIG, tier_patience_s=0.5))
    with driver.manager:
        begin = time.monotonic()
        for _ in range(6):
            with pytest.raises(TierUnavailable):
                driver.manager.full_kv(sequence, 0)
        assert 0.5 <= time.monotonic() - begin < 2.5
        store.error = None
        driver.manager.flush()
        eventually(lambda: driver.manager.full_kv(sequence, 0))
        store.error = TierUnavailable("down once more")
        begin = time.monotonic()
        with pytest.raises(TierUnavailable):
            driver.manager.full_kv(sequence, 0)
        assert time.monotonic() - begin >= 0.5
        store.error = None


def eventually(read):
    """A store that has failed is taken for dead until it answers a probe."""
    until = time.monotonic() + 10
    while True:
        try:
            return read()
        except TierUnavailable:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_nothing_is_waited_for_that_can_be_done_without():
    """A new fit summarises all sparse sequences anew; those that cannot be read settle again later."""
    store = Moody(LAYOUT)
    config = dataclasses.replace(PATIENT, summary="transform", arena_bytes=44 * PAGE_BYTES)
    driver = Driver(KVManager(SHAPE, config, tier=store))
    with driver.manager:
        shorts = [driver.create(50) for _ in range(4)]
        for short in shorts:
            driver.decode(short)
        driver.manager.flush()
        long = driver.create(120)
        driver.manager.flush()
        store.error = TierUnavailable("down")
        begin = time.monotonic()
        driver.decode(long)
        assert time.monotonic() - begin < 10
        assert long.phase is Phase.SPARSE
        assert Phase.UNSETTLED in [short.phase for short in shorts]
        store.error = None
        eventually(driver.check)


def test_closing_ends_all_waiting():
    store = Moody(LAYOUT)
    driver, sequence = stored_prompt(store)
    for _ in range(4):
        driver.decode(sequence, 4, 3, 4)  # a segment that cannot be stored
    failed = []

    def allocate():
        try:
            driver.manager.rooms.arena.allocate(24)
        except OasisError as error:
            failed.append(error)

    thread = threading.Thread(target=allocate)
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive()
    driver.manager.close()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(failed[0], ArenaExhausted)


def test_what_cannot_be_deleted_still_counts():
    plan = FaultPlan()
    store = FaultyStore(MemoryStore(LAYOUT), plan)
    driver = Driver(KVManager(SHAPE, CONFIG, tier=store))
    sequence = driver.create(4 * 20, chunk=40)
    driver.manager.flush()
    held = driver.manager.stats().tier_bytes
    assert held > 0
    plan.add(Fault(FaultKind.UNAVAILABLE, "delete", onwards=True))
    driver.free(sequence)
    wait_until(lambda: plan.calls["delete"] >= 6)
    assert driver.manager.stats().tier_bytes == store.used_bytes == held
    plan.clear()
    wait_until(lambda: not store.used_bytes)
    wait_until(lambda: not driver.manager.stats().tier_bytes)
    driver.manager.close()


class Broken(MemoryStore):
    def variants(self, data):
        raise ZeroDivisionError("a plug-in")


def test_a_plug_in_that_raises_what_it_should_not_hangs_nothing():
    driver = Driver(KVManager(SHAPE, CONFIG, tier=Broken(LAYOUT)))
    sequence = driver.create(4 * 20, chunk=40)
    driver.manager.flush()
    with pytest.raises(ArenaExhausted, match="ZeroDivisionError: a plug-in"):
        driver.run(Part(sequence, 4 * 12))
    driver.check()
    driver.manager.close()


def test_a_forked_child_is_told_and_closes_without_the_store():
    driver = Driver(KVManager(SHAPE, CONFIG, tier=MemoryStore(LAYOUT)))
    driver.create(4 * 20, chunk=40)
    child = os.fork()
    if not child:
        signal.alarm(10)
        code = 1
        try:
            driver.manager.flush()
        except StateError:
            driver.manager.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    driver.manager.close()


def test_an_arena_that_cannot_be_pinned_keeps_its_slots(monkeypatch):
    driver = Driver(KVManager(SHAPE, CONFIG, tier=MemoryStore(LAYOUT)))
    arena = driver.manager.rooms.arena

    def refuse(num_slots):
        raise ArenaExhausted("page-locking failed")

    with monkeypatch.context() as patch:
        patch.setattr(arena._memory, "pin", refuse)
        with pytest.raises(ArenaExhausted):
            arena.allocate(3)
    assert arena.used_bytes == arena.used_pages == 0
    assert arena.faults() == []
    driver.create(4 * 20, chunk=40)
    driver.check()
    driver.manager.close()


def test_a_read_in_bulk_that_is_given_up_keeps_its_memory(monkeypatch):
    plan = FaultPlan()
    driver = Driver(KVManager(SHAPE, CONFIG, tier=FaultyStore(MemoryStore(LAYOUT), plan)))
    sequence = driver.create(4 * 40, chunk=40)
    driver.manager.flush()
    plan.add(Fault(FaultKind.LATE, "load", onwards=True, delay_s=0.5))
    kept = len(tiered_arena._abandoned)
    with pytest.raises(TierUnavailable):
        driver.manager.full_kv(sequence, 0)
    assert len(tiered_arena._abandoned) == kept + 1
    plan.clear()
    driver.manager.close()


def test_a_dense_sequence_is_cropped_without_the_store():
    plan = FaultPlan()
    config = tiny(arena_bytes=24 * PAGE_BYTES, segment_blocks=4, dense_threshold=400)
    driver = Driver(KVManager(SHAPE, config, tier=FaultyStore(MemoryStore(LAYOUT), plan)))
    sequence = driver.create(4 * 60, chunk=40)
    driver.manager.flush()
    plan.add(Fault(FaultKind.UNAVAILABLE, "load", onwards=True))
    assert sequence.phase is Phase.DENSE
    driver.crop(sequence, 4 * 33 + 2)
    rows = driver.draw(3)
    expected = driver.full(sequence, rows)
    for row in range(3):
        one = Rows(*(part[:, row : row + 1] for part in rows))
        close_to(driver.run(Part(sequence, 1, rows=one))[0], expected[:, row : row + 1])
    driver.manager.close()


class GatedStore(MemoryStore):
    """Takes segments one by one, each when it is let in; knows what it holds."""

    def __init__(self):
        super().__init__(LAYOUT)
        self.gate = threading.Semaphore(0)
        self.waiting = threading.Semaphore(0)
        self.held = set()

    async def store(self, objects):
        self.waiting.release()
        await anyio.to_thread.run_sync(self.gate.acquire)
        await super().store(objects)
        self.held |= {key for key, _ in objects}

    async def delete(self, keys):
        await super().delete(keys)
        self.held -= set(keys)


@pytest.mark.parametrize("freed", [False, True], ids=["in use", "freed meanwhile"])
def test_a_close_in_the_middle_of_a_segment_leaves_nothing_in_the_store(freed, monkeypatch):
    monkeypatch.setattr(segment_writer, "_BATCH_BYTES", 1)  # a layer at a time
    store = GatedStore()
    driver = Driver(KVManager(SHAPE, CONFIG, tier=store))
    sequence = driver.create()
    part = Part(sequence, 4 * 8)
    part.rows = driver.draw(part.tokens)
    driver.run(part)
    assert store.waiting.acquire(timeout=10)  # the first layer is on its way
    if freed:
        driver.free(sequence)
    store.gate.release()
    assert store.waiting.acquire(timeout=10)  # the second one
    assert store.held or freed
    closing = threading.Thread(target=driver.manager.close)
    lane = driver.manager.rooms.arena._lane
    closing.start()
    while not lane._closing:
        time.sleep(0.001)
    for _ in range(2 * SHAPE.num_layers):
        store.gate.release()
    closing.join(20)
    assert not closing.is_alive()
    assert not store.held
