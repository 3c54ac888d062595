import os
import threading
import time

import pytest

from oasiskv.errors import InputError, LayoutMismatch, StateError, TierFull, TierUnavailable, WorkerError
from oasiskv.tiers import Outcome
from oasiskv.tiers.lane import TierLane
from oasiskv.tiers.tiered import TieredStore

from .moody import SLOT, Hang, Moody, buffer, entry, key, read, segment


@pytest.fixture
def store():
    return Moody()


@pytest.fixture
def lane(store):
    with TierLane(store) as lane:
        yield lane


def keep(lane, *numbers):
    results = []
    lane.submit_store([entry(number) for number in numbers], results.append)
    lane.drain(5)
    assert results == [None]


def soon(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.005)


def test_what_was_submitted_is_loaded(lane):
    keep(lane, 1, 2)
    reads = [read(1, slot=1), read(2, slots=4), read(3), read(2, slot=3, slots=2)]
    assert lane.load(reads, 5) == [Outcome.HIT, Outcome.HIT, Outcome.MISS, Outcome.MISS]
    assert reads[0].into == segment(1)[SLOT : 2 * SLOT]
    assert reads[1].into == segment(2)
    assert lane.contains([key(2), key(3)], 5) == [True, False]
    assert lane.load([], 5) == []
    counters = lane.counters()
    assert (counters.reads, counters.hits, counters.misses, counters.loaded_bytes) == (4, 2, 2, 5 * SLOT)
    assert (counters.stored_segments, counters.stored_bytes) == (2, 8 * SLOT)
    assert counters.load_s > 0
    assert counters.store_s > 0


def test_threads_load_at_the_same_time(lane):
    keep(lane, *range(8))
    wrong = []

    def work(number):
        for _ in range(50):
            one = read(number, slots=4)
            if lane.load([one], 5) != [Outcome.HIT] or one.into != segment(number):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert lane.counters().hits == 400


def test_batches_are_split_as_the_store_wants_them():
    store = Moody(max_batch=3)
    with TierLane(store) as lane:
        keep(lane, *range(7))
        assert lane.load([read(number) for number in range(7)], 5) == [Outcome.HIT] * 7
    assert store.calls == [("store", 3), ("store", 3), ("store", 1), ("load", 3), ("load", 3), ("load", 1)]


def test_a_delete_comes_after_the_store_before_it(lane, store):
    store.hang = Hang()
    results = []
    lane.submit_store([entry(1), entry(2)], results.append)
    lane.submit_delete([key(1)], results.append)
    store.hang.end()
    lane.drain(5)
    assert results == [None, None]
    assert lane.contains([key(1), key(2)], 5) == [False, True]


def test_an_unavailable_store_is_asked_once_and_then_refused_until_a_probe_succeeds(lane, store):
    keep(lane, 1)
    store.error = TierUnavailable("the peer is gone")
    with pytest.raises(TierUnavailable, match="the peer is gone"):
        lane.load([read(1)], 5)
    calls = len(store.calls)
    begin = time.perf_counter()
    for _ in range(100):
        with pytest.raises(TierUnavailable, match="not asked"):
            lane.load([read(1)], 5)
    assert time.perf_counter() - begin < 0.09
    assert len(store.calls) == calls
    soon(lambda: len(store.calls) >= calls + 2)  # probes go on while it is away
    assert set(store.calls[calls:]) == {("load", 1)}
    store.error = None
    soon(lambda: not lane._breaker.is_open)
    assert lane.load([read(1)], 5) == [Outcome.HIT]
    counters = lane.counters()
    assert (counters.breaker_openings, counters.refused, counters.failed_loads) == (1, 100, 101)


def test_a_late_load_is_cancelled_and_leaves_no_buffer_behind(lane, store):
    keep(lane, 1)
    store.hang = Hang()
    late = read(1)
    begin = time.perf_counter()
    with pytest.raises(TierUnavailable, match=r"within 0\.05 s"):
        lane.load([late], 0.05)
    assert time.perf_counter() - begin < 0.3
    assert not lane.unsettled(late.into)
    store.hang.end()
    time.sleep(0.02)
    assert late.into == buffer()
    assert lane.counters().timeouts == 1


def test_a_buffer_that_a_store_does_not_let_go_of_is_unsettled_until_it_does(lane, store):
    keep(lane, 1)
    block = store.block = threading.Event()
    late = read(1, slots=2)
    whole = late.into.obj
    with pytest.raises(TierUnavailable):
        lane.load([late], 0.02)
    assert lane.unsettled(late.into)
    assert lane.unsettled(memoryview(whole)[SLOT:])  # part of it
    assert not lane.unsettled(buffer())
    store.block = None
    block.set()
    soon(lambda: not lane.unsettled(late.into))


def test_a_store_is_tried_again(lane, store):
    store.error = TierUnavailable("busy")
    results = []
    lane.submit_store([entry(1)], results.append)
    soon(lambda: lane.counters().retries)
    store.error = None
    lane.drain(5)
    assert results == [None]
    assert lane.contains([key(1)], 5) == [True]


def test_after_the_last_retry_the_error_is_reported():
    store = Moody()
    with TierLane(store, store_retries=1) as lane:
        store.error = TierUnavailable("gone")
        results = []
        lane.submit_store([entry(1)], results.append)
        lane.submit_delete([key(1)], results.append)
        lane.drain(5)
        assert [type(error) for error in results] == [TierUnavailable, TierUnavailable]
        counters = lane.counters()
        assert (counters.failed_stores, counters.failed_deletes, counters.stored_segments) == (1, 1, 0)


def test_a_silent_store_does_not_hold_up_what_was_submitted():
    store = Moody()
    with TierLane(store, store_retries=0, store_timeout_s=0.05) as lane:
        store.hang = Hang()
        results = []
        lane.submit_store([entry(1)], results.append)
        lane.drain(5)
        assert [type(error) for error in results] == [TierUnavailable]
        assert lane.counters().timeouts == 1
        store.hang.end()


def test_what_trying_again_cannot_mend_is_reported_at_once():
    with TierLane(Moody(limit_bytes=SLOT)) as lane:
        results = []
        lane.submit_store([entry(1)], results.append)
        lane.submit_store([(key(1), memoryview(b"odd"))], results.append)
        lane.drain(5)
        assert sorted(type(error).__name__ for error in results) == [InputError.__name__, TierFull.__name__]
        assert (lane.counters().retries, lane.counters().breaker_openings) == (0, 0)


def test_an_exception_that_no_store_should_raise_is_a_worker_error(lane, store):
    store.error = KeyError("a bug")
    results = []
    lane.submit_store([entry(1)], results.append)
    lane.drain(5)
    with pytest.raises(WorkerError, match="a bug") as caught:
        lane.load([read(1)], 5)
    for error in (caught.value, *results):
        assert isinstance(error, WorkerError)
        assert error.__cause__ is store.error


def test_a_callback_that_raises_breaks_nothing_and_is_reported(lane):
    def broken(error):
        raise RuntimeError("mine")

    lane.submit_store([entry(1)], broken)
    with pytest.raises(WorkerError, match="mine"):
        lane.drain(5)
    lane.drain(5)
    assert lane.contains([key(1)], 5) == [True]


def test_a_callback_must_not_wait_for_the_lane(lane):
    seen = []

    def waits(error):
        for call in (lane.drain, lane.close, lambda: lane.load([read(1)], 5)):
            with pytest.raises(StateError, match="another thread"):
                call()
        lane.submit_delete([key(1)])
        seen.append(error)

    lane.submit_store([entry(1)], waits)
    soon(lambda: seen)
    lane.drain(5)
    assert lane.contains([key(1)], 5) == [False]


def test_closing_ends_what_runs_and_may_be_repeated():
    store = Moody()
    lane = TierLane(store, store_retries=0)
    store.hang = Hang()
    results = []
    lane.submit_store([entry(1)], results.append)
    lane.submit_delete([key(1)], results.append)
    errors = []

    def load():
        try:
            lane.load([read(1)], 60)
        except StateError as error:
            errors.append(error)

    waiting = threading.Thread(target=load)
    waiting.start()
    soon(lambda: ("load", 1) in store.calls)
    begin = time.perf_counter()
    lane.close(0.05)
    lane.close()
    waiting.join(5)
    assert time.perf_counter() - begin < 2
    assert [type(error) for error in (*results, *errors)] == [StateError] * 3
    for call in (
        lambda: lane.load([read(1)], 1),
        lambda: lane.contains([key(1)], 1),
        lambda: lane.submit_store([entry(1)], results.append),
        lambda: lane.submit_delete([key(1)]),
    ):
        with pytest.raises(StateError, match="closed"):
            call()
    assert not any(thread.name == "oasiskv-tier" for thread in threading.enumerate())


def test_a_store_that_does_not_open_is_no_lane():
    class Broken(Moody):
        async def open(self):
            raise LayoutMismatch("written for another model")

    with pytest.raises(LayoutMismatch, match="another model"):
        TierLane(Broken())

    class Silent(Moody):
        async def open(self):
            await Hang().wait()

    with pytest.raises(TierUnavailable, match=r"open within 0\.05 s"):
        TierLane(Silent(), open_timeout_s=0.05)


def test_a_store_that_does_not_close_is_reported(monkeypatch):
    monkeypatch.setattr("oasiskv.tiers.lane_thread.CLOSE_S", 0.05)

    class Clinging(Moody):
        async def aclose(self):
            await Hang().wait()

    lane = TierLane(Clinging())
    with pytest.raises(TierUnavailable, match=r"close within 0\.05 s"):
        lane.close()


class Fatal(BaseException):
    pass


def test_no_exception_of_a_load_ends_the_lane(lane, store):
    store.error = Fatal()
    with pytest.raises(WorkerError, match="Fatal"):
        lane.load([read(1)], 5)
    store.error = None
    soon(lambda: not lane._breaker.is_open)
    assert lane.load([read(1)], 5) == [Outcome.MISS]


def test_a_call_that_outlives_the_lane_keeps_its_buffer(monkeypatch, store):
    monkeypatch.setattr("oasiskv.tiers.lane_thread.CLOSE_S", 0.1)
    lane = TierLane(store)
    store.block = threading.Event()
    late = read(1)
    with pytest.raises(TierUnavailable):
        lane.load([late], 0.02)
    with pytest.raises(TierUnavailable, match="did not close"):
        lane.close()
    assert lane.unsettled(late.into)
    store.block.set()


def test_what_is_asked_for_after_the_lane_has_died_fails_at_once(store):
    lane = TierLane(store)
    store.error = Fatal()
    results = []
    lane.submit_store([entry(1)], results.append)
    soon(lambda: not lane._thread.alive)
    lane.submit_store([entry(1)], results.append)
    assert [type(error) for error in results] == [StateError, StateError]
    with pytest.raises(StateError):
        lane.load([read(1)], 5)
    with pytest.raises(WorkerError, match="the lane of the tier store failed"):
        lane.close()


def test_a_region_is_registered_in_the_lane():
    seen = []

    class Registering(Moody):
        def register_buffer(self, region):
            seen.append((region, threading.current_thread().name))

    region = buffer()
    with TierLane(Registering(max_batch=3)) as lane:
        lane.register_buffer(region)
        assert lane.traits.max_batch == 3
    assert seen == [(region, "oasiskv-tier")]
    with pytest.raises(StateError):
        lane.register_buffer(region)


def test_a_fast_tier_serves_while_a_slow_one_is_dead():
    fast, slow = Moody(), Moody()
    with TierLane(TieredStore([fast, slow])) as lane:
        keep(lane, 1)
        slow.hang = Hang()
        with pytest.raises(TierUnavailable, match="within"):
            lane.load([read(2)], 0.1)  # which only the slow one could have
        soon(lambda: not lane._breaker.is_open)
        for _ in range(50):
            assert lane.load([read(1), read(2)], 0.1) == [Outcome.HIT, Outcome.MISS]
            time.sleep(0.01)
        assert lane.counters().timeouts == 1
        slow.hang.end()


def test_a_failure_while_it_closes_starts_no_probe(store):
    lane = TierLane(store)
    lane.close()
    lane._trip(key(1))
    assert lane.counters().breaker_openings == 1


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_a_wait_without_end_is_refused(lane, timeout_s):
    with pytest.raises(InputError, match="timeout_s"):
        lane.load([read(1)], timeout_s)


def test_a_forked_child_gets_an_error_and_does_not_hang(lane):
    keep(lane, 1)
    child = os.fork()
    if not child:
        refused = 0
        for call in (
            lambda: lane.load([read(1)], 60),
            lambda: lane.submit_store([entry(2)], print),
            lambda: lane.submit_delete([key(1)]),
            lane.drain,
            lane.counters,
            lambda: lane.unsettled(buffer()),
        ):
            try:
                call()
            except StateError:
                refused += 1
        lane.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
    assert lane.load([read(1)], 5) == [Outcome.HIT]
