"""What the fakes do to the stores that they wrap."""

import threading
import time

import anyio
import pytest
import trio.testing

from oasiskv.errors import ConfigError, InputError, StateError, TierFull, TierUnavailable
from oasiskv.testing.faults import Fault, FaultKind, FaultPlan
from oasiskv.testing.faulty import FaultyStore
from oasiskv.testing.latency import LatencyStore
from oasiskv.testing.throttled import ThrottledStore
from oasiskv.testing.tier_kit.suite import LAYOUT, POISON, blank, content, key
from oasiskv.tiers import Location, Outcome, Read
from oasiskv.tiers.memory import MemoryStore

pytestmark = pytest.mark.anyio

SIZE = LAYOUT.segment_bytes


async def filled(store, *numbers):
    await store.store([(key(number), memoryview(content(key(number)))) for number in numbers])
    return store


async def faulty(*faults):
    inner = await filled(MemoryStore(LAYOUT), 1, 2, 3)
    return FaultyStore(inner, FaultPlan(*faults))


def reads(*numbers):
    return [Read(key(number), 0, blank(SIZE)) for number in numbers]


def on_a_simulated_clock(function):
    return anyio.run(function, backend="trio", backend_options={"clock": trio.testing.MockClock(autojump_threshold=0)})


def test_delays_are_waited_side_by_side():
    async def main():
        store = await filled(LatencyStore(MemoryStore(LAYOUT), load_s=1.0, store_s=2.0), 1)
        assert anyio.current_time() - start == pytest.approx(2.0)
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(store.load, reads(1))
            tasks.start_soon(store.contains, [key(1)])
        assert anyio.current_time() - start == pytest.approx(3.0)
        await store.delete([key(1)])
        return anyio.current_time() - start

    start = 0.0

    async def timed():
        nonlocal start
        start = anyio.current_time()
        return await main()

    assert on_a_simulated_clock(timed) == pytest.approx(5.0)


def test_a_link_carries_exactly_its_rate():
    async def main():
        store = ThrottledStore(await filled(MemoryStore(LAYOUT), 1), bytes_per_s=SIZE)  # a segment per second
        start, ended = anyio.current_time(), []

        async def one():
            await store.load(reads(1))
            ended.append(anyio.current_time() - start)

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(one)
        assert ended == pytest.approx(list(range(1, 11)))
        await anyio.sleep(5)  # idle: nothing is saved up
        await store.load(reads(1, 1))
        await filled(store, 2)
        return anyio.current_time() - start

    assert on_a_simulated_clock(main) == pytest.approx(18.0)


def test_a_transfer_that_is_cancelled_gives_its_time_back():
    async def main():
        store = ThrottledStore(await filled(MemoryStore(LAYOUT), 1), bytes_per_s=SIZE)
        start = anyio.current_time()
        with anyio.move_on_after(0.5):
            await store.load(reads(*[1] * 100))
        await store.load(reads(1))
        return anyio.current_time() - start

    assert on_a_simulated_clock(main) == pytest.approx(1.5)


async def test_a_late_wake_up_does_not_slow_the_link_down():
    store = ThrottledStore(await filled(MemoryStore(LAYOUT), 1), bytes_per_s=100 * SIZE)
    start = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(store.load, reads(1))
        for _ in range(3):
            await anyio.sleep(0.02)
            time.sleep(0.03)  # the event loop is held: whoever is due meanwhile wakes late
    assert anyio.current_time() - start >= 0.2
    assert anyio.current_time() - start < 0.28  # three times 0.03 more if the delays added up


async def test_waiting_for_a_link_takes_no_processor_time():
    store = ThrottledStore(await filled(MemoryStore(LAYOUT), 1), bytes_per_s=SIZE / 0.3)
    before = time.thread_time()
    await store.load(reads(1))
    assert time.thread_time() - before < 0.1


@pytest.mark.parametrize("operation", ["store", "load", "contains", "delete"])
async def test_the_call_that_is_named_fails_once(operation):
    store = await faulty(Fault(FaultKind.UNAVAILABLE, operation, call=2))
    calls = {
        "store": lambda: filled(store, 1),
        "load": lambda: store.load(reads(1)),
        "contains": lambda: store.contains([key(1)]),
        "delete": lambda: store.delete([key(9)]),
    }
    await calls[operation]()
    with pytest.raises(TierUnavailable, match="by plan"):
        await calls[operation]()
    for call in calls.values():
        await call()
    assert [fault.call for fault in store.plan.struck] == [2]
    assert store.plan.calls[operation] == 3


async def test_a_fault_may_go_on_until_the_plan_is_cleared():
    store = await faulty(Fault(FaultKind.UNAVAILABLE, call=2, onwards=True))
    await store.load(reads(1))
    for _ in range(3):
        with pytest.raises(TierUnavailable):
            await store.load(reads(1))
    store.plan.clear()
    assert await store.load(reads(1)) == [Outcome.HIT]
    store.plan.add(Fault(FaultKind.UNAVAILABLE, call=6))
    with pytest.raises(TierUnavailable):
        await store.load(reads(1))


@pytest.mark.parametrize(("kind", "error"), [(FaultKind.UNAVAILABLE, TierUnavailable), (FaultKind.FULL, TierFull)])
async def test_entries_before_the_one_that_fails_are_stored(kind, error):
    store = await faulty(Fault(kind, "store", entry=1))
    with pytest.raises(error):
        await filled(store, 7, 8)
    assert await store.contains([key(7), key(8)]) == [True, False]


async def test_a_load_and_a_delete_may_fail_half_done():
    store = await faulty(Fault(FaultKind.UNAVAILABLE, entry=1), Fault(FaultKind.UNAVAILABLE, "delete", entry=1))
    wanted = reads(1, 2)
    with pytest.raises(TierUnavailable):
        await store.load(wanted)
    assert bytes(wanted[0].into) == content(key(1))
    assert set(wanted[1].into) == {POISON}
    with pytest.raises(TierUnavailable):
        await store.delete([key(1), key(2)])
    assert await store.contains([key(1), key(2)]) == [False, True]


async def test_a_short_read_is_a_hit_with_half_the_bytes():
    store = await faulty(Fault(FaultKind.SHORT, entry=1))
    wanted = reads(1, 2, 3)
    assert await store.load(wanted) == [Outcome.HIT] * 3
    assert bytes(wanted[0].into) == content(key(1))
    assert bytes(wanted[1].into) == content(key(2))[: SIZE // 2] + bytes([POISON]) * (SIZE // 2)
    assert bytes(wanted[2].into) == content(key(3))


async def test_a_flipped_bit_is_a_hit_with_one_wrong_byte():
    store = await faulty(Fault(FaultKind.FLIP, entry=9))
    wanted = reads(1, 2)
    assert await store.load(wanted) == [Outcome.HIT] * 2
    assert bytes(wanted[0].into) == content(key(1))
    wrong = [index for index, (got, right) in enumerate(zip(wanted[1].into, content(key(2)), strict=True)) if got != right]
    assert len(wrong) == 1
    assert await store.load(wanted) == [Outcome.HIT] * 2
    assert bytes(wanted[1].into) == content(key(2)), "the object itself is not damaged"


@pytest.mark.parametrize("kind", [FaultKind.SHORT, FaultKind.FLIP])
async def test_damage_to_a_miss_is_a_miss(kind):
    store = await faulty(Fault(kind))
    wanted = reads(9)
    assert await store.load(wanted) == [Outcome.MISS]
    assert set(wanted[0].into) == {POISON}


async def test_a_call_that_hangs_is_cancelled_or_ends_with_the_store():
    store = await faulty(Fault(FaultKind.HANG, onwards=True))
    with anyio.move_on_after(0.02) as scope:
        await store.load(reads(1))
    assert scope.cancelled_caught

    async def hang():
        with pytest.raises(StateError, match="hung by plan"):
            await store.load(reads(1))
        ended.set()

    ended = anyio.Event()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hang)
            await anyio.sleep(0.01)
            await store.aclose()
            await ended.wait()


async def test_a_slow_call_is_late_and_right():
    store = await faulty(Fault(FaultKind.SLOW, delay_s=0.05))
    start, wanted = anyio.current_time(), reads(1)
    assert await store.load(wanted) == [Outcome.HIT]
    assert anyio.current_time() - start >= 0.05
    assert bytes(wanted[0].into) == content(key(1))


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_late_write_comes_after_the_call_and_is_announced(cancelled):
    store = await faulty(Fault(FaultKind.LATE, delay_s=0.2))
    wanted = reads(1)
    into = wanted[0].into
    if cancelled:
        with anyio.move_on_after(0.01) as scope:
            await store.load(wanted)
        assert scope.cancelled_caught
    else:
        with pytest.raises(TierUnavailable):
            await store.load(wanted)
    assert set(into) == {POISON}
    assert store.unsettled(into)
    assert store.unsettled(into[-1:])
    assert not store.unsettled(blank(SIZE))
    with anyio.fail_after(5):
        while store.unsettled(into):
            await anyio.sleep(0.005)
    assert bytes(into) == content(key(1))
    await store.aclose()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_closing_settles_late_writes(cancelled):
    store = await faulty(Fault(FaultKind.LATE, delay_s=30.0))
    wanted = reads(1)
    with anyio.move_on_after(0.01):
        await store.load(wanted)
    assert store.unsettled(wanted[0].into)
    threads = threading.active_count()
    with anyio.CancelScope() as scope:
        if cancelled:
            scope.cancel()
        await store.aclose()
    with pytest.raises(StateError):
        await store.load(wanted)
    assert not store.unsettled(wanted[0].into)
    assert set(wanted[0].into) == {POISON}
    assert threading.active_count() <= threads


async def test_calls_that_break_the_contract_are_refused_and_do_nothing():
    store = await faulty(Fault(FaultKind.FULL, "store", onwards=True), Fault(FaultKind.UNAVAILABLE, onwards=True))
    with pytest.raises(InputError):
        await store.store([(key(7), blank(3))])
    with pytest.raises(InputError):
        await store.load([Read(key(1), 1, blank(LAYOUT.slot_bytes))])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"kind": FaultKind.FLIP, "operation": "store"}, "operation"),
        ({"kind": FaultKind.FULL}, "operation"),
        ({"kind": FaultKind.SLOW, "operation": "open"}, "operation"),
        ({"kind": FaultKind.SLOW, "call": 0}, "call"),
        ({"kind": FaultKind.SLOW, "entry": -1}, "entry"),
        ({"kind": FaultKind.SLOW, "delay_s": float("nan")}, "delay_s"),
    ],
)
def test_faults_that_cannot_be_are_refused(arguments, field):
    with pytest.raises(ConfigError, match=f"Fault.{field}"):
        Fault(**arguments)


def test_fakes_that_cannot_be_are_refused():
    inner = MemoryStore(LAYOUT)
    with pytest.raises(ConfigError, match="load_s"):
        LatencyStore(inner, -1)
    with pytest.raises(ConfigError, match="bytes_per_s"):
        ThrottledStore(inner, 0)
    with pytest.raises(ConfigError, match="make it in Python"):
        ThrottledStore.at(Location.parse("slow:"), LAYOUT)
