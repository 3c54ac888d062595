"""What the vLLM adapter counts, over ranks, over both sides and over steps."""

import json
from types import SimpleNamespace

import pytest

from oasiskv.errors import InputError

pytest.importorskip("vllm", reason="vllm is not installed here; make test-vllm runs this")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from oasiskv.adapters.vllm.metrics import METRICS, PREFIX, OasisKVPromMetrics, OasisKVStats


def step():
    """What two workers and the scheduler report, as vLLM adds it up, after a trip between processes."""
    first = OasisKVStats.of({"arena_bytes": 100, "stored_blocks": 5, "decoded_tokens": 3, "host_tokens": 64}, rank=0)
    second = OasisKVStats.of({"arena_bytes": 120, "stored_blocks": 7, "decoded_tokens": 3, "host_tokens": 64}, rank=1)
    scheduler = OasisKVStats.of({"running_requests": 2, "handovers": 1, "refused_handovers.pool": 1})
    return json.loads(json.dumps(first.aggregate(second).aggregate(scheduler).to_dict()))


ONE_STEP = {
    "arena_bytes": 220,
    "stored_blocks": 12,
    "decoded_tokens": 3,
    "host_tokens": 64,
    "running_requests": 2,
    "handovers": 1,
    "refused_handovers.pool": 1,
}


def test_what_is_the_same_for_all_ranks_counts_once_though_they_report_in_different_steps():
    reports = [OasisKVStats.of({"decoded_tokens": 3, "stored_blocks": 2}, rank=rank).reduce() for rank in range(4)]
    assert sum(report.get("decoded_tokens", 0) for report in reports) == 3
    assert sum(report["stored_blocks"] for report in reports) == 8


def test_ranks_are_added_up_where_each_has_its_part():
    assert OasisKVStats(data=step()).reduce() == ONE_STEP


def test_counters_add_up_over_steps_and_gauges_keep_the_last_value():
    both = OasisKVStats(data=step()).aggregate(OasisKVStats(data=step()))
    twice = {"stored_blocks": 24, "decoded_tokens": 6, "handovers": 2, "refused_handovers.pool": 2}
    assert both.reduce() == ONE_STEP | twice
    later = both.aggregate(OasisKVStats.of({"running_requests": 0}))
    assert later.reduce() == ONE_STEP | twice | {"running_requests": 0}


def test_the_other_report_is_left_as_it_is():
    other = OasisKVStats.of({"stored_blocks": 1}, rank=0)
    OasisKVStats.of({"stored_blocks": 2}, rank=0).aggregate(other)
    assert other.data == {"stored_blocks@0": 1}


def test_empty_and_reset():
    assert OasisKVStats().is_empty()
    assert not OasisKVStats.of({"running_requests": 0}).is_empty()  # the last one has ended
    stats = OasisKVStats.of({"handovers": 1})
    stats.reset()
    assert stats.is_empty()
    assert stats.reduce() == {}


@pytest.mark.parametrize("key", ["handover", "handovers.pool", "refused_handovers", "stored_blocks@0"])
def test_unknown_names(key):
    with pytest.raises(InputError, match=r"there are running_requests, .*refused_handovers.REASON"):
        OasisKVStats.of({key: 1})


@pytest.fixture
def shown():
    """The Prometheus metrics of two engines, and a function that reads one of them."""
    registry = CollectorRegistry()
    kinds = {
        kind: type(
            kind.__name__,
            (kind,),
            {"__init__": lambda self, *a, _kind=kind, **k: _kind.__init__(self, *a, **k, registry=registry)},
        )
        for kind in (Gauge, Counter, Histogram)
    }
    labels = ["model_name", "engine"]
    metrics = OasisKVPromMetrics(SimpleNamespace(kv_transfer_config=None), kinds, labels, {0: ["m", "0"], 1: ["m", "1"]})

    def read(name, engine=0, **more):
        return registry.get_sample_value(f"{PREFIX}{name}", {"model_name": "m", "engine": str(engine), **more})

    return metrics, read


def test_all_are_shown_from_the_start(shown):
    _, read = shown
    for metric in METRICS:
        value = read(metric.name + ("_total" if metric.kind == "counter" else ""))
        assert value == (0 if metric.label is None else None)


def test_they_are_shown_per_engine(shown):
    metrics, read = shown
    metrics.observe(step(), 1)
    metrics.observe(step(), 1)
    assert (read("stored_blocks_total", 1), read("decoded_tokens_total", 1), read("arena_bytes", 1)) == (24, 6, 220)
    assert read("refused_handovers_total", 1, reason="pool") == 2
    assert read("stored_blocks_total", 0) == 0


def test_a_rank_that_says_nothing_keeps_its_gauge(shown):
    metrics, read = shown
    metrics.observe(step(), 0)
    metrics.observe(OasisKVStats.of({"arena_bytes": 10}, rank=1).to_dict(), 0)
    assert read("arena_bytes") == 110
    metrics.observe(OasisKVStats.of({"running_requests": 0}).to_dict(), 0)
    assert (read("arena_bytes"), read("running_requests"), read("handovers_total")) == (110, 0, 1)


def test_every_metric_has_a_line_of_help():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.help.endswith(".") and "\n" not in metric.help for metric in METRICS)
