import json
import threading
from dataclasses import fields

import pytest
import torch

from oasiskv.metrics import Counters, Stats, Totals

MIB = 1 << 20


def make_stats(**changes):
    values = {field.name: 0 for field in fields(Stats)}
    return Stats(**{**values, **changes})


def test_counters_add_by_name():
    counters = Counters()
    counters.add(steps=1, stored_blocks=3)
    counters.add(steps=2, late_blocks=5)
    totals = counters.totals()
    assert (totals.steps, totals.stored_blocks, totals.late_blocks) == (3, 3, 5)


def test_an_unknown_counter_is_an_error():
    with pytest.raises(AttributeError):
        Counters().add(nonsense=1)
    with pytest.raises(KeyError):
        Counters().record("nonsense", torch.zeros(1, 2))


@pytest.mark.parametrize("times", [1, 255, 256, 700])
def test_rows_add_up_however_many_there_are(times):
    counters = Counters()
    assert counters.totals() == Totals()
    for number in range(times):
        counters.record("selection", torch.tensor([[3, 4], [1, 2]]))
        counters.record("loads", torch.tensor([[5, 2], [0, 0], [1, number % 9]]))
        counters.record("corrections", torch.tensor([[7.0, 3.0, 0.25]]))
        if number % 100 == 7:
            counters.totals()
    totals = counters.totals()
    assert (totals.resident_blocks, totals.wanted_blocks) == (4 * times, 6 * times)
    assert (totals.loaded_blocks, totals.most_new_blocks) == (6 * times, max(2, min(times - 1, 8)))
    assert (totals.corrected_blocks, totals.most_corrected_blocks) == (7 * times, 3)
    assert (totals.coverage_sum, totals.coverage_count) == (0.25 * times, times)
    assert counters.totals() == totals


def test_threads_lose_no_count():
    def count():
        for _ in range(500):
            counters.add(steps=1)
            counters.record("loads", torch.tensor([[1, 1]]))

    counters = Counters()
    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.totals().steps == counters.totals().loaded_blocks == 2000


def test_the_report_says_what_it_was_given():
    stats = make_stats(
        sequences=3,
        sparse_sequences=2,
        tokens=1234,
        pool_bytes=4 * MIB,
        summary_bytes=2 * MIB,
        table_bytes=1 * MIB,
        full_kv_bytes=28 * MIB,
        arena_bytes=20 * MIB,
        hit_rate=0.925,
        coverage=0.815,
        moved_bytes_per_token=3072.0,
        loaded_blocks=17,
        corrected_blocks=6,
        late_blocks=4,
        late_layers=1,
    )
    text = str(stats)
    for part in (
        "3 (2 sparse), 1234 tokens",
        "7.0 MiB: pool 4.0, summaries 2.0, tables 1.0",
        "28.0 MiB (device holds 25.0%)",
        "20.0 MiB on the host",
        "92.5% of wanted",
        "81.5% of attention",
        "3.0 KiB per decoded token (17 blocks loaded, 6 read in place)",
        "4 blocks, 1 layers",
    ):
        assert part in text


def test_the_report_of_an_empty_manager_divides_by_nothing():
    assert "0.0%" in str(make_stats())


def test_a_dictionary_for_json_holds_all_fields_and_the_device_bytes():
    stats = make_stats(pool_bytes=5, summary_bytes=3, table_bytes=2)
    values = json.loads(json.dumps(stats.as_dict()))
    assert values["device_bytes"] == stats.device_bytes == 10
    assert set(values) == {field.name for field in fields(Stats)} | {"device_bytes"}
