"""What managers and metered tiers have counted, for Prometheus: `register`, then `serve`.

Reading happens when Prometheus asks, in its own thread, and takes nothing that decoding waits for. On a GPU it waits for the
device, which decoding does not notice. Needs the extra `metrics`.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from .errors import ConfigError, InputError
from .manager import KVManager
from .meters import Distribution
from .metrics import Stats, Totals
from .tiers.metered import CALLS, CallStats, MeteredStore

try:
    from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector as BaseCollector
except ImportError as missing:
    raise ImportError("oasiskv.prometheus needs prometheus-client: pip install 'oasiskv[metrics]'") from missing

DEFAULT_PORT = 9464
"""Where exporters of applications usually listen."""


@dataclass(frozen=True)
class ManagerMetric:
    """One number of a manager. Prometheus appends `_total` to the names of counters."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    get: Callable[[Stats, Totals], float]


MANAGER_METRICS = (
    ManagerMetric("sequences", "gauge", "Live sequences.", lambda s, _: s.sequences),
    ManagerMetric("sparse_sequences", "gauge", "Live sequences with a bounded working set.", lambda s, _: s.sparse_sequences),
    ManagerMetric("tokens", "gauge", "Tokens of the live sequences.", lambda s, _: s.tokens),
    ManagerMetric("steps", "counter", "Committed steps.", lambda s, _: s.steps),
    ManagerMetric("decoded_tokens", "counter", "Tokens kept by decoding.", lambda s, _: s.decoded_tokens),
    ManagerMetric("prefilled_tokens", "counter", "Prompt tokens read.", lambda s, _: s.prefilled_tokens),
    ManagerMetric("pool_bytes", "gauge", "Device memory of the pool.", lambda s, _: s.pool_bytes),
    ManagerMetric("summary_bytes", "gauge", "Device memory of the key summaries.", lambda s, _: s.summary_bytes),
    ManagerMetric("table_bytes", "gauge", "Device memory of tables and recent queries.", lambda s, _: s.table_bytes),
    ManagerMetric("arena_bytes", "gauge", "Host memory of sealed blocks.", lambda s, _: s.arena_bytes),
    ManagerMetric("arena_peak_bytes", "gauge", "The most that sealed blocks took.", lambda s, _: s.arena_peak_bytes),
    ManagerMetric("full_kv_bytes", "gauge", "What full attention would keep on the device.", lambda s, _: s.full_kv_bytes),
    ManagerMetric("block_hits", "counter", "Wanted blocks that were resident.", lambda _, c: c.resident_blocks),
    ManagerMetric("block_misses", "counter", "Wanted blocks that were not.", lambda _, c: c.wanted_blocks - c.resident_blocks),
    ManagerMetric("loaded_blocks", "counter", "Blocks moved from arena to pool.", lambda s, _: s.loaded_blocks),
    ManagerMetric("corrected_blocks", "counter", "Blocks read in place from the arena.", lambda s, _: s.corrected_blocks),
    ManagerMetric("stored_blocks", "counter", "Blocks written to the arena.", lambda s, _: s.stored_blocks),
    ManagerMetric("late_blocks", "counter", "Blocks left out because their move was not done.", lambda s, _: s.late_blocks),
    ManagerMetric("late_layers", "counter", "Layers that did not wait for their work.", lambda s, _: s.late_layers),
    ManagerMetric("tier_held_bytes", "gauge", "What the tier store holds of live sequences.", lambda s, _: s.tier_bytes),
    ManagerMetric("fetched_blocks", "counter", "Blocks that came back from the tier store.", lambda s, _: s.fetched_blocks),
    ManagerMetric("lost_blocks", "counter", "Blocks that were not to be had there.", lambda s, _: s.lost_blocks),
    ManagerMetric("checksum_failures", "counter", "Blocks that came back changed.", lambda s, _: s.corrupt_blocks),
    ManagerMetric("quarantined_blocks", "counter", "Slots that waited for late writes.", lambda s, _: s.quarantined_blocks),
    ManagerMetric("tier_retries", "counter", "Calls of the tier store that were made again.", lambda s, _: s.tier_retries),
    ManagerMetric("tier_timeouts", "counter", "Calls of the tier store that took too long.", lambda s, _: s.tier_timeouts),
    ManagerMetric("coverage_ratio", "gauge", "Mean share of attention that was seen, estimated.", lambda s, _: s.coverage),
)
"""Another number is another line. Rates and means are left to Prometheus, wherever their parts are here."""


TIER_COUNTERS: tuple[tuple[str, str, Callable[[CallStats], int]], ...] = (
    ("tier_operations", "Calls that have ended.", lambda call: call.operations),
    ("tier_entries", "Objects, reads or keys in these calls.", lambda call: call.entries),
    ("tier_bytes", "Bytes stored, or loaded by reads that hit.", lambda call: call.bytes),
    ("tier_hits", "Reads or keys that were there.", lambda call: call.hits),
    ("tier_misses", "Reads or keys that were not there.", lambda call: call.misses),
    ("tier_corrupt", "Reads that found something else than was stored.", lambda call: call.corrupt),
)
"""Name, help and getter of what is counted for each kind of call of a tier."""

TIER_HISTOGRAMS: tuple[tuple[str, str, Callable[[CallStats], Distribution]], ...] = (
    ("tier_seconds", "How long calls took.", lambda call: call.seconds),
    ("tier_batch", "Entries per call.", lambda call: call.batch),
)
"""The same for distributions."""


class Collector(BaseCollector):
    """Reads managers and tiers when it is asked. It keeps none of them alive, and closed managers yield nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._managers: weakref.WeakValueDictionary[str, KVManager] = weakref.WeakValueDictionary()
        self._stores: weakref.WeakValueDictionary[str, MeteredStore] = weakref.WeakValueDictionary()

    def add_manager(self, manager: KVManager, name: str) -> None:
        """Read it from now on. Raises `InputError` if another open manager has this name."""
        with self._lock:
            other = self._managers.get(name)
            if other is not None and other is not manager and not other.closed:
                raise InputError(f"name is {name!r}, which another open manager is registered by; choose another name")
            self._managers[name] = manager

    def add_store(self, store: MeteredStore, name: str) -> None:
        """Read it from now on. Raises `InputError` if another tier has this name."""
        with self._lock:
            if self._stores.get(name, store) is not store:
                raise InputError(f"another tier named {name!r} is registered; name each MeteredStore differently")
            self._stores[name] = store

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering reads no manager."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, in any thread."""
        with self._lock:
            managers, stores = list(self._managers.items()), list(self._stores.items())
        yield from _manager_families([(name, *read) for name, one in managers if (read := _read(one)) is not None])
        yield from _tier_families(stores)


def _read(manager: KVManager) -> tuple[Stats, Totals] | None:
    try:
        return None if manager.closed else (manager.stats(), manager.rooms.counters.totals())
    except Exception:
        if manager.closed:  # meanwhile, by its own thread: what was read has gone
            return None
        raise


def _manager_families(readings: list[tuple[str, Stats, Totals]]) -> Iterator[Metric]:
    for metric in MANAGER_METRICS:
        family = _KINDS[metric.kind](f"oasiskv_{metric.name}", metric.help, labels=["manager"])
        for name, stats, counters in readings:
            family.add_metric([name], metric.get(stats, counters))
        yield family


def _tier_families(stores: list[tuple[str, MeteredStore]]) -> Iterator[Metric]:
    readings = [([name, call], store.stats(call)) for name, store in stores for call in CALLS]
    labels = ["tier", "call"]
    for title, text, count in TIER_COUNTERS:
        counter = CounterMetricFamily(f"oasiskv_{title}", text, labels=labels)
        for own, reading in readings:
            counter.add_metric(own, count(reading))
        yield counter
    for title, text, spread in TIER_HISTOGRAMS:
        histogram = HistogramMetricFamily(f"oasiskv_{title}", text, labels=labels)
        for own, reading in readings:
            values = spread(reading)
            histogram.add_metric(own, [(_bound(bound), up_to) for bound, up_to in values.cumulative()], values.total)
        yield histogram
    errors = CounterMetricFamily("oasiskv_tier_errors", "Calls that raised.", labels=[*labels, "error"])
    for own, reading in readings:
        for error, times in reading.errors.items():
            errors.add_metric([*own, error], times)
    yield errors
    used = GaugeMetricFamily("oasiskv_tier_used_bytes", "What the tier's objects take.", labels=["tier"])
    limit = GaugeMetricFamily("oasiskv_tier_limit_bytes", "What they may take; absent without a limit.", labels=["tier"])
    for name, store in stores:
        used.add_metric([name], store.used_bytes)
        if store.limit_bytes is not None:
            limit.add_metric([name], store.limit_bytes)
    yield used
    yield limit


def _bound(bound: float) -> str:
    return "+Inf" if bound == math.inf else str(bound)


_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}

_collectors: weakref.WeakKeyDictionary[CollectorRegistry, Collector] = weakref.WeakKeyDictionary()
"""The collector of each registry: two in one would write every family twice, which Prometheus refuses."""

_collectors_lock = threading.Lock()


def register(source: KVManager | MeteredStore, name: str = "default", registry: CollectorRegistry = REGISTRY) -> None:
    """Show a manager or a tier in a registry of prometheus-client, from now on until it is closed or gone.

    Args:
        source: read whenever the registry is.
        name: of a manager, its label `manager`; it also goes before the names of its tiers, unless it is "default". A tier that
            is given alone has its own name.
        registry: the default one of prometheus-client.

    Raises:
        InputError: another one has the name.
    """
    with _collectors_lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = _collectors[registry] = Collector()
            registry.register(collector)
    if isinstance(source, KVManager):
        collector.add_manager(source, name)
        for meter in source.rooms.arena.meters:
            collector.add_store(meter, meter.name if name == "default" else f"{name}:{meter.name}")
    else:
        collector.add_store(source, source.name)


class Server:
    """A running exporter: `close` it, or use it in a `with` block."""

    def __init__(self, port: int, host: str, registry: CollectorRegistry) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"port is {port}, and nothing can listen at {host}:{port} ({error}); choose another") from error

    @property
    def port(self) -> int:
        """Where it listens; of use after port 0, which takes any that is free."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def serve(port: int = DEFAULT_PORT, host: str = "127.0.0.1", registry: CollectorRegistry = REGISTRY) -> Server:
    """Answer Prometheus at `http://host:port/metrics`, from a background thread. Only this machine can ask, unless `host` says
    otherwise. Raises `ConfigError` if nothing can listen there."""
    return Server(port, host, registry)
