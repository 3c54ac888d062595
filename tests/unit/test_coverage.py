"""The share of attention that a working set sees, as `stats` estimates it."""

import pytest
import torch

from oasiskv import KVManager

from .driver import SHAPE, Driver, Part, tiny
from .test_manager_sparse import uniform_blocks


def truth(driver, sequence, rows, selected):
    """Mean over layers and query heads, by the keys themselves; `selected[layer][head]` are block numbers."""
    keys, _ = driver.texts[sequence]
    past, shares = keys.shape[1], []
    always = driver.always(sequence)
    for layer in range(SHAPE.num_layers):
        for head in range(SHAPE.kv_heads):
            seen = torch.tensor([t // 4 in always | selected[layer][head] for t in range(past)] + [True])
            own = torch.cat([keys[layer, :, head], rows.keys[layer, :1, head]]).double()
            queries = rows.queries[layer, 0, 2 * head : 2 * head + 2].double()
            weights = (queries @ own.T * SHAPE.head_dim**-0.5).softmax(-1)
            shares.append(weights[:, seen].sum(1))
    return float(torch.cat(shares).mean())


def coverage_of(manager, before):
    totals = manager.rooms.counters.totals()
    return (totals.coverage_sum - before.coverage_sum) / (totals.coverage_count - before.coverage_count)


@pytest.mark.parametrize("workers", [0, 2])
def test_where_the_summary_is_exact_so_is_the_coverage(workers):
    # Bounds of blocks whose keys are all alike are the keys; with a margin that nothing meets, nothing is read in place.
    config = tiny(correction_blocks=1, correction_margin=1000.0, workers=workers)
    with KVManager(SHAPE, config) as manager:
        driver = Driver(manager)
        sequence, prompt = driver.create(), uniform_blocks(driver, 80)
        driver.run(Part(sequence, 80, rows=prompt))
        for _ in range(3):  # the blocks that seal stay in the window
            rows = driver.draw(1)
            step = driver.begin(Part(sequence, 1, rows=rows))
            manager.drain()
            selected = [driver.selected(sequence, layer) for layer in range(2)]
            before = manager.rooms.counters.totals()
            for layer in range(2):
                driver.attend(step, layer, Part(sequence, 1, rows=rows))
            expected = truth(driver, sequence, rows, selected)
            step.commit()
            driver.remember(Part(sequence, 1, rows=rows))
            assert coverage_of(manager, before) == pytest.approx(expected, abs=1e-5)
            assert 0.2 < expected < 0.999


def test_what_is_read_in_place_is_covered():
    found = []
    for correction in (1, 30):
        with KVManager(SHAPE, tiny(correction_blocks=correction, max_new_blocks=0)) as manager:
            driver = Driver(manager)
            sequence = driver.create(80)
            for _ in range(4):
                driver.decode(sequence)
            found.append(manager.stats().coverage)
    assert found[0] < 0.98
    assert found[1] == pytest.approx(1.0)


def test_padding_rows_count_for_nothing():
    def sums(together):
        with KVManager(SHAPE, tiny(correction_blocks=1, max_new_blocks=0)) as manager:
            driver = Driver(manager)
            parts = [Part(driver.create(80), 1), Part(driver.create(100), 4, 3, 4)]
            for part in parts:
                part.rows = driver.draw(part.tokens)
            found = []
            for group in [parts] if together else [parts[:1], parts[1:]]:
                before = manager.rooms.counters.totals().coverage_sum
                driver.run(*group)
                found.append(manager.rooms.counters.totals().coverage_sum - before)
            return found

    (whole,), (one, four) = sums(True), sums(False)
    assert whole == pytest.approx((one + 4 * four) / 5, abs=1e-5)
    assert one != pytest.approx(four, abs=1e-3)


def test_without_correction_nothing_is_estimated():
    with KVManager(SHAPE, tiny()) as manager:
        driver = Driver(manager)
        driver.decode(driver.create(80))
        assert manager.stats().coverage == 1.0
