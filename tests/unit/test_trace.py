import json
import threading
import time

import pytest
import torch

from oasiskv import KVManager, ModelShape, Trace
from oasiskv.errors import ConfigError, WorkerError
from oasiskv.scheduler import InlineScheduler
from oasiskv.trace import now
from oasiskv.traced import TracedScheduler

from .driver import SHAPE, Driver, Part, tiny
from .traces import check, check_nesting


def names(slices):
    return [event["name"] for event in slices]


def run(trace, steps=4, **settings):
    with KVManager(SHAPE, tiny(**settings), trace=trace) as manager:
        driver = Driver(manager)
        sequence = driver.create(80)
        for _ in range(steps):
            driver.decode(sequence)
        driver.check()
        return manager.stats()


def test_a_step_is_around_its_layers():
    trace = Trace()
    run(trace, steps=2)
    tracks = check(trace.as_dict())
    foreground = tracks["foreground"]
    assert names(foreground[-5:]) == ["step", "begin_step", "attend 0", "attend 1", "commit"]
    step, *parts = foreground[-5:]
    assert step["args"] == {"step": 3, "rows": 1}
    assert all(part["ts"] + part["dur"] <= step["ts"] + step["dur"] + 1e-6 for part in parts)
    assert parts[2]["args"] == {"layer": 1, "rows": 1}


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_background_stages_have_lanes_with_layers_and_what_was_moved(workers):
    trace = Trace()
    stats = run(trace, steps=8, workers=workers)
    tracks = check(json.loads(json.dumps(trace.as_dict())))
    for stage in ("predict", "select", "mark", "transfer"):
        own = [track for track in tracks if track.split(" (")[0] == stage]
        assert len(own) == max(1, workers)
        slices = [event for track in own for event in tracks[track]]
        assert {event["args"]["layer"] for event in slices} == {0, 1}
        assert len(slices) == 8 * SHAPE.num_layers
    moved = [event["args"] for track in tracks if track.startswith("transfer") for event in tracks[track]]
    assert sum(one["blocks"] for one in moved) == stats.loaded_blocks > 0
    assert sum(one["bytes"] for one in moved) == stats.loaded_blocks * SHAPE.slot_bytes(4)


def test_hints_are_parts_of_a_step():
    trace = Trace()
    with KVManager(SHAPE, tiny(), trace=trace) as manager:
        driver = Driver(manager)
        sequence = driver.create(80)
        part = Part(sequence, 1)
        step = driver.begin(part)
        step.hint(1, torch.randn(1, 32))
        for layer in range(2):
            driver.attend(step, layer, part)
        step.commit()
    foreground = check(trace.as_dict())["foreground"]
    assert names(foreground[-6:]) == ["step", "begin_step", "hint 1", "attend 0", "attend 1", "commit"]


def test_the_foreground_is_on_top():
    trace = Trace()
    run(trace)
    events = trace.as_dict()["traceEvents"]
    title = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rank = {title[event["tid"]]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert sorted(rank, key=rank.get) == ["foreground", "waits", "predict", "select", "mark", "transfer"]


def test_waits_have_a_lane():
    trace = Trace()
    run(trace, workers=1)
    waits = names(check(trace.as_dict())["waits"])
    assert {"wait 0", "wait 1", "drain"} <= set(waits)


class Never(InlineScheduler):
    """Work that is late for ever."""

    def submit(self, work):
        class Ticket:
            def skip(self):
                return work

            def wait(self):
                """It ends without being done."""

        return Ticket()


def test_late_layers_are_marked():
    trace = Trace()
    with KVManager(SHAPE, tiny(on_late="skip"), Never(), trace=trace) as manager:
        driver = Driver(manager)
        sequence = driver.create(80)
        driver.decode(sequence)
        driver.decode(sequence)
        assert manager.stats().late_layers == 2
    skips = [event for event in check(trace.as_dict())["waits"] if event["name"].startswith("skip")]
    assert [event["args"] for event in skips] == [{"layer": 0, "late": 1}, {"layer": 1, "late": 1}]


def test_the_same_happens_with_and_without_a_trace():
    outputs = []
    for trace in (None, Trace()):
        with KVManager(SHAPE, tiny(), trace=trace) as manager:
            driver = Driver(manager)
            sequence = driver.create(80)
            outputs.append(torch.cat([driver.decode(sequence, 3, 2, 2) for _ in range(6)]))
    assert torch.equal(*outputs)


def test_an_aborted_step_is_a_slice_too():
    trace = Trace()
    with KVManager(SHAPE, tiny(), trace=trace) as manager:
        driver = Driver(manager)
        sequence = driver.create(80)
        part = Part(sequence, 1)
        step = driver.begin(part)
        driver.attend(step, 0, part)
        step.abort()
        step.abort()
    assert names(check(trace.as_dict())["foreground"]).count("aborted step") == 1


class Broken:
    layer = 3

    def predict(self):
        raise RuntimeError("no idea")

    def end(self):
        pass


def test_work_that_fails_is_a_slice_and_fails():
    trace = Trace()
    scheduler = TracedScheduler(InlineScheduler(), trace, SHAPE, 4)
    with pytest.raises(WorkerError, match="layer 3"):
        scheduler.submit(Broken()).wait()
    tracks = check(trace.as_dict())
    assert names(tracks["predict"]) == ["predict 3"]
    assert names(tracks["waits"]) == ["wait 3"]


class Enqueued:
    layer = 0

    def predict(self):
        """Nothing to do, as for the others."""

    select = mark = transfer = predict

    def end(self):
        pass

    def pending_blocks(self):
        raise AssertionError("this would wait for the device")


def test_on_cuda_lanes_say_that_their_times_are_the_hosts_and_nothing_waits_for_the_device():
    trace = Trace()
    scheduler = TracedScheduler(InlineScheduler(), trace, ModelShape(1, 1, 1, 8, device=torch.device("cuda")), 4)
    scheduler.submit(Enqueued()).wait()
    whole = trace.as_dict()
    tracks = check(whole)
    assert set(tracks) == {f"{lane}, enqueued" for lane in ("predict", "select", "mark", "transfer", "waits")}
    assert tracks["transfer, enqueued"][0]["args"] == {"layer": 0}
    assert "when it enqueued" in whole["otherData"]["notes"][0]


def test_memory_is_bounded_and_what_was_dropped_is_counted():
    trace = Trace(max_events=5)
    for number in range(12):
        with trace.slice("lane", str(number)):
            pass
    whole = trace.as_dict()
    assert names(check(whole)["lane"]) == ["7", "8", "9", "10", "11"]
    assert trace.dropped == whole["otherData"]["dropped_events"] == 7


def test_a_lane_of_several_threads_has_a_track_for_each():
    trace = Trace()
    barrier = threading.Barrier(2, timeout=10)

    def work():
        with trace.slice("lane", "slice"):
            barrier.wait()

    threads = [threading.Thread(target=work, name=f"worker {number}") for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {"lane (worker 0)", "lane (worker 1)"} == set(check(trace.as_dict()))


def test_slices_that_overlap_are_pairs_with_their_own_ids():
    trace = Trace()
    first, second = now(), now()
    trace.add_overlapping("tier", "load", first, bytes=1)
    trace.add_overlapping("tier", "load", second, bytes=2)
    whole = trace.as_dict()
    check(whole)
    assert [event["ph"] for event in whole["traceEvents"] if event["ph"] != "M"] == ["b", "b", "e", "e"]


def test_the_file_is_the_dictionary(tmp_path):
    trace = Trace()
    with trace.slice("lane", "slice", layer=1) as values:
        values["blocks"] = 2
    trace.save(tmp_path / "trace.json")
    read = json.loads((tmp_path / "trace.json").read_text())
    assert read == trace.as_dict()
    assert check(read)["lane"][0]["args"] == {"layer": 1, "blocks": 2}


def test_a_trace_may_be_read_while_it_grows():
    trace, stop = Trace(max_events=100), threading.Event()

    def work():
        while not stop.is_set():
            trace.add("lane", "slice", now())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(50):
            check(trace.as_dict())
            time.sleep(0)
    finally:
        stop.set()
        thread.join()


def test_a_trace_of_nothing_is_one():
    assert check(Trace().as_dict()) == {}


def test_a_trace_keeps_something():
    with pytest.raises(ConfigError, match="max_events is 0"):
        Trace(0)


def test_the_check_of_nesting_can_fail():
    with pytest.raises(AssertionError, match="ends after"):
        check_nesting("lane", [{"name": "a", "ts": 0, "dur": 5}, {"name": "b", "ts": 3, "dur": 5}])
