import json
import threading
from dataclasses import fields

import pytest
import torch

from oasiskv.metrics import Counters, Stats

MIB = 1 << 20


def make_stats(**changes):
    values = {field.name: 0 for field in fields(Stats)}
    return Stats(**{**values, **changes})


def test_counters_add_by_name():
    counters = Counters()
    counters.add(steps=1, loaded_blocks=3)
    counters.add(steps=2, coverage_sum=0.5)
    assert (counters.steps, counters.loaded_blocks, counters.coverage_sum) == (3, 3, 0.5)


def test_an_unknown_counter_is_an_error():
    with pytest.raises(AttributeError):
        Counters().add(nonsense=1)


def test_maxima_only_rise():
    counters = Counters()
    for new, corrected in ((2, 1), (5, 0), (3, 3)):
        counters.keep_largest(most_new_blocks=torch.tensor(new), most_corrected_blocks=torch.tensor(corrected))
    assert counters.most_new_blocks == 5
    assert counters.most_corrected_blocks == 3


def test_tensors_are_added_as_they_are():
    counters = Counters()
    counters.add(loaded_blocks=torch.tensor(3))
    counters.add(loaded_blocks=torch.tensor(4))
    assert int(counters.loaded_blocks) == 7


def test_threads_lose_no_count():
    counters = Counters()
    threads = [threading.Thread(target=lambda: [counters.add(steps=1) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.steps == 2000


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
