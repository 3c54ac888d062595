import gc
import subprocess
import sys
import threading
import urllib.request
from dataclasses import fields

import anyio
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from oasiskv import KVManager, Stats, prometheus
from oasiskv.errors import ConfigError, InputError
from oasiskv.tiers import Read, SegmentKey, SegmentLayout
from oasiskv.tiers.memory import MemoryStore
from oasiskv.tiers.metered import MeteredStore

from .driver import SHAPE, Driver, tiny

LAYOUT = SegmentLayout(kv_heads=2, num_blocks=4, block_size=4, head_dim=8)
DERIVED = {
    "hit_rate": "block_hits / (block_hits + block_misses)",
    "moved_bytes_per_token": "a rate of loaded_blocks and corrected_blocks over decoded_tokens",
    "most_new_blocks": "a maximum since the start, of no use in a series",
    "most_corrected_blocks": "the same",
}


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def manager():
    with KVManager(SHAPE, tiny()) as manager:
        yield manager


def samples(registry):
    """All samples by name and the values of their labels, in the order of the labels' names, as Prometheus reads them."""
    text = generate_latest(registry).decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {(s.name, *(s.labels[label] for label in sorted(s.labels))): s.value for family in families for s in family.samples}


def test_what_a_manager_counts_is_there_under_its_name(registry, manager):
    driver = Driver(manager)
    sequence = driver.create(80)
    for _ in range(5):
        driver.decode(sequence)
    prometheus.register(manager, "chat", registry)
    found, stats = samples(registry), manager.stats()
    assert found["oasiskv_decoded_tokens_total", "chat"] == 5
    assert found["oasiskv_prefilled_tokens_total", "chat"] == 80
    assert found["oasiskv_sparse_sequences", "chat"] == 1
    assert found["oasiskv_pool_bytes", "chat"] == stats.pool_bytes > 0
    hits, misses = found["oasiskv_block_hits_total", "chat"], found["oasiskv_block_misses_total", "chat"]
    assert hits / (hits + misses) == pytest.approx(stats.hit_rate)


OTHER_NAMES = {
    "coverage": "coverage_ratio",
    "tier_bytes": "tier_held_bytes",  # what passes through a tier is tier_bytes
    "corrupt_blocks": "checksum_failures",
}


def test_every_statistic_is_a_metric_or_left_out_for_a_reason():
    names = {metric.name for metric in prometheus.MANAGER_METRICS}
    for field in fields(Stats):
        shown = OTHER_NAMES.get(field.name, field.name)
        assert (shown in names) != (field.name in DERIVED), f"Stats.{field.name} needs a line in MANAGER_METRICS, or in DERIVED"


def test_two_managers_share_the_families(registry, manager):
    with KVManager(SHAPE, tiny()) as other:
        prometheus.register(manager, "one", registry)
        prometheus.register(other, "two", registry)
        found = samples(registry)
        assert ("oasiskv_steps_total", "one") in found
        assert ("oasiskv_steps_total", "two") in found


def test_a_name_is_taken_until_its_manager_is_closed(registry, manager):
    prometheus.register(manager, registry=registry)
    prometheus.register(manager, registry=registry)
    with KVManager(SHAPE, tiny()) as other:
        with pytest.raises(InputError, match="'default'"):
            prometheus.register(other, registry=registry)
        manager.close()
        prometheus.register(other, registry=registry)


def test_a_closed_manager_yields_nothing(registry, manager):
    prometheus.register(manager, registry=registry)
    assert samples(registry)
    manager.close()
    assert not [name for name in samples(registry) if "default" in name]


def test_a_manager_that_closes_while_it_is_read_yields_nothing(registry, manager, monkeypatch):
    prometheus.register(manager, registry=registry)

    def gone():
        manager.close()
        raise RuntimeError("memory has gone")

    monkeypatch.setattr(manager, "stats", gone)
    assert not [name for name in samples(registry) if "default" in name]


def test_a_fault_of_an_open_manager_is_not_hidden(registry, manager, monkeypatch):
    prometheus.register(manager, registry=registry)
    monkeypatch.setattr(manager, "stats", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        samples(registry)


def test_a_registry_keeps_no_manager_alive(registry):
    manager = KVManager(SHAPE, tiny())
    prometheus.register(manager, registry=registry)
    manager.close()
    collector = next(iter(registry._collector_to_names))
    del manager
    gc.collect()
    assert not collector._managers


def test_reading_from_another_thread_disturbs_no_step(registry):
    with KVManager(SHAPE, tiny(workers=1)) as manager:
        prometheus.register(manager, registry=registry)
        driver, stop, seen = Driver(manager), threading.Event(), []

        def scrape():
            while not stop.is_set():
                seen.append(samples(registry)["oasiskv_steps_total", "default"])

        thread = threading.Thread(target=scrape)
        thread.start()
        sequence = driver.create(80)
        for number in range(30):
            driver.decode(sequence)
            if number % 10 == 0:
                driver.free(driver.create(12))
        stop.set()
        thread.join()
        driver.check()
        assert seen == sorted(seen)
        assert samples(registry)["oasiskv_steps_total", "default"] == manager.stats().steps


def test_tiers_have_counters_histograms_and_errors_by_direction(registry):
    store = MeteredStore(MemoryStore(LAYOUT, 1 << 20), "disk")

    async def use():
        async with store:
            key = SegmentKey("test", bytes(16), 0)
            await store.store([(key, memoryview(bytes(LAYOUT.segment_bytes)))])
            missing = SegmentKey("test", bytes(32), 0)
            await store.load([Read(one, 0, memoryview(bytearray(LAYOUT.slot_bytes))) for one in (key, key, missing)])
            with pytest.raises(InputError):
                await store.load([Read(key, 1, memoryview(bytearray(LAYOUT.slot_bytes)))])
            prometheus.register(store, registry=registry)
            return samples(registry)

    found = anyio.run(use)
    assert found["oasiskv_tier_bytes_total", "store", "disk"] == LAYOUT.segment_bytes
    assert found["oasiskv_tier_bytes_total", "load", "disk"] == 2 * LAYOUT.slot_bytes
    assert found["oasiskv_tier_hits_total", "load", "disk"] == 2
    assert found["oasiskv_tier_misses_total", "load", "disk"] == 1
    assert found["oasiskv_tier_errors_total", "load", "InputError", "disk"] == 1
    assert found["oasiskv_tier_batch_bucket", "load", "1.0", "disk"] == 1
    assert found["oasiskv_tier_batch_bucket", "load", "4.0", "disk"] == 2
    assert found["oasiskv_tier_seconds_bucket", "load", "+Inf", "disk"] == 2
    assert found["oasiskv_tier_seconds_count", "load", "disk"] == 2
    assert found["oasiskv_tier_used_bytes", "disk"] == LAYOUT.segment_bytes
    assert found["oasiskv_tier_limit_bytes", "disk"] == 1 << 20


def test_two_tiers_need_two_names(registry):
    first, second = (MeteredStore(MemoryStore(LAYOUT), "disk") for _ in range(2))
    prometheus.register(first, registry=registry)
    with pytest.raises(InputError, match="'disk'"):
        prometheus.register(second, registry=registry)


def test_it_serves_this_machine_only_and_stops(registry, manager):
    prometheus.register(manager, registry=registry)
    with prometheus.serve(0, registry=registry) as server:
        assert server._server.server_address[0] == "127.0.0.1"
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            assert b"oasiskv_steps_total" in answer.read()
        with pytest.raises(ConfigError, match=f"port is {server.port}"):
            prometheus.serve(server.port, registry=registry)
    server.close()


def test_without_prometheus_client_the_error_says_what_to_install():
    program = "import sys; sys.modules['prometheus_client'] = None; import oasiskv.prometheus"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "ImportError: oasiskv.prometheus needs prometheus-client: pip install 'oasiskv[metrics]'" in result.stderr
