"""What the adapter counts, in vLLM's log and under its `/metrics`, with the prefix `vllm:oasiskv_`.

Scheduler and workers each report an `OasisKVStats` per step; vLLM adds them up over ranks, over both sides and, for its log,
over steps. A gauge must be summed over ranks, but not over steps, and the tokens that every rank decodes count once: so each
number keeps the name of the rank that it comes from until it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from oasiskv.errors import InputError

PREFIX = "vllm:oasiskv_"

_RANK = "@"
_LABEL = "."


@dataclass(frozen=True)
class VllmMetric:
    """One number.

    Attributes:
        name: without the prefix. Prometheus appends `_total` to the names of counters.
        kind: a counter, of which each report has what came to it since the last one, or a gauge, of which it has the value.
        ranks: "sum" if each rank has its part, "same" if each has the whole.
        help: one line.
        label: name of its label, if it has one.
    """

    name: str
    kind: Literal["counter", "gauge"]
    ranks: Literal["sum", "same"]
    help: str
    label: str | None = None


METRICS = (
    VllmMetric("running_requests", "gauge", "same", "Requests that OasisKV serves now."),
    VllmMetric("handovers", "counter", "same", "Requests handed to OasisKV."),
    VllmMetric("refused_handovers", "counter", "same", "Requests that vLLM had to go on serving.", label="reason"),
    VllmMetric("host_resumes", "counter", "same", "Preempted requests that came back from the host."),
    VllmMetric("host_prefix_hit_tokens", "counter", "same", "Prompt tokens that were in the host already."),
    VllmMetric("freed_device_blocks", "counter", "same", "Blocks of vLLM that handed-over requests gave back."),
    VllmMetric("decoded_tokens", "counter", "same", "Tokens kept by decoding."),
    VllmMetric("host_tokens", "gauge", "same", "Tokens whose KV is in the host."),
    VllmMetric("arena_bytes", "gauge", "sum", "Host memory of sealed blocks."),
    VllmMetric("stored_blocks", "counter", "sum", "Blocks written to the host, per layer and kv head."),
    VllmMetric("loaded_blocks", "counter", "sum", "Blocks moved back to the device."),
    VllmMetric("corrected_blocks", "counter", "sum", "Blocks read in place from the host."),
    VllmMetric("late_layers", "counter", "sum", "Layers that did not wait for their work."),
)
"""Another number is another line."""

_BY_NAME = {metric.name: metric for metric in METRICS}


def _metric(key: str) -> tuple[VllmMetric, str]:
    """The metric that a key of the data belongs to, and the value of its label."""
    name, _, label = key.partition(_RANK)[0].partition(_LABEL)
    return _BY_NAME[name], label


class OasisKVStats(KVConnectorStats):
    """What the scheduler or a worker has to report of a step.

    `data` has numbers by `name`, `name@rank` or `name.label@rank`, and nothing else, so that it passes between processes.
    """

    @classmethod
    def of(cls, values: Mapping[str, float], rank: int | None = None) -> Self:
        """A report.

        Args:
            values: numbers by their names in `METRICS`, with the value of the label after a dot: `refused_handovers.pool`.
                What came to a counter since the last report, the value of a gauge.
            rank: the worker's rank; `None` for the scheduler. What is the same for all ranks is taken from the first one, since
                they need not report in the same steps.

        Raises:
            InputError: there is no such metric, or a label is missing or too many.
        """
        for key in values:
            name, _, label = key.partition(_LABEL)
            if name not in _BY_NAME or bool(label) != (_BY_NAME[name].label is not None):
                raise InputError(f"values has {key!r}; there are {', '.join(map(_spelling, METRICS))}")
        suffix = "" if rank is None else f"{_RANK}{rank}"
        own = {key: value for key, value in values.items() if not rank or _metric(key)[0].ranks == "sum"}
        return cls(data={f"{key}{suffix}": value for key, value in own.items()})

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Whether there is nothing to report. A gauge that has become 0 is something."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Take in another report: of another rank, of the other side, or a later one."""
        for key, value in other.data.items():
            counter = _metric(key)[0].kind == "counter"
            self.data[key] = self.data.get(key, 0) + value if counter else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The numbers, by name and label, over all ranks."""
        merged: dict[str, int | float] = {}
        for key, value in self.data.items():
            shown = key.partition(_RANK)[0]
            before = merged.get(shown, 0)
            merged[shown] = before + value if _metric(key)[0].ranks == "sum" else max(before, value)
        return merged


def _spelling(metric: VllmMetric) -> str:
    return metric.name if metric.label is None else f"{metric.name}{_LABEL}{metric.label.upper()}"


class OasisKVPromMetrics(KVConnectorPromMetrics):
    """The metrics in vLLM's Prometheus registry, one set per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        self._gauges: dict[int, dict[str, float]] = {engine: {} for engine in per_engine_labelvalues}
        for metric in METRICS:
            names = [*labelnames, *([metric.label] if metric.label is not None else [])]
            extra = {"multiprocess_mode": "mostrecent"} if metric.kind == "gauge" else {}
            made = metric_types[Gauge if metric.kind == "gauge" else Counter](
                name=f"{PREFIX}{metric.name}", documentation=metric.help, labelnames=names, **extra
            )
            self._metrics[metric.name] = made
            if metric.label is None:  # shown from the start, as 0
                for values in per_engine_labelvalues.values():
                    made.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Show a step's report, added up over ranks."""
        gauges = self._gauges.setdefault(engine_idx, {})
        gauges.update({key: value for key, value in transfer_stats_data.items() if _metric(key)[0].kind == "gauge"})
        for shown, value in OasisKVStats(data={**transfer_stats_data, **gauges}).reduce().items():
            metric, label = _metric(shown)
            labels = [*self.per_engine_labelvalues[engine_idx], *([label] if metric.label is not None else [])]
            child = self._metrics[metric.name].labels(*labels)
            if metric.kind == "gauge":
                child.set(value)
            else:
                child.inc(value)
