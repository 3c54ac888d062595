"""A text whose activations are not finite harms itself only: others are as if it had never been."""

import pytest
import torch

from oasiskv import KVManager
from oasiskv.finite import all_finite, finite_rows
from oasiskv.summaries.transform import _eigh

from .driver import SHAPE, Driver, Part, tiny

INF, NAN = float("inf"), float("nan")


def bad_rows(driver, tokens, at, value):
    """Rows as a model makes them from a bad token: it, and in later layers all behind it."""
    rows = driver.draw(tokens)
    for layer in range(SHAPE.num_layers):
        where = slice(at, None) if layer else slice(at, at + 1)
        for part in rows:
            part[layer, where] = value
    return rows


def good_text(driver):
    """The outputs of a text that turns sparse, over some steps."""
    sequence = driver.create()
    outputs = driver.run(Part(sequence, 90))
    for _ in range(6):
        outputs += driver.run(Part(sequence, 1))
    driver.run(Part(sequence, 4, drafts=3, accepted=2))
    return torch.cat([output.flatten(1) for output in outputs], 1)


@pytest.mark.parametrize("freed", [False, True], ids=["beside it", "after it"])
@pytest.mark.parametrize("value", [INF, NAN, 1e30])
@pytest.mark.parametrize("at", [0, 40])
@pytest.mark.parametrize("summary", ["transform", "transform-bit2", "bit2", "minmax"])
def test_a_good_text_is_as_if_the_bad_one_had_never_been(summary, at, value, freed):
    config = tiny(summary=summary, correction_blocks=1, predictor="lookahead")
    with KVManager(SHAPE, config) as alone:
        wanted = good_text(Driver(alone, seed=7))
        coverage = alone.stats().coverage
    with KVManager(SHAPE, config) as manager:
        driver = Driver(manager, seed=1)
        bad = driver.create()
        driver.run(Part(bad, 80, rows=bad_rows(driver, 80, at, value)))
        for _ in range(3):
            driver.run(Part(bad, 1, rows=bad_rows(driver, 1, 0, value)))
        manager.check_integrity()
        if freed:
            driver.free(bad)
        driver.generator.manual_seed(7)
        same = good_text(driver) == wanted
        # A transform code has seen the bad text's finite queries, as those of any text, and may rank a block otherwise.
        assert same.float().mean() > 0.95 if summary.startswith("transform") else bool(same.all())
        if not freed:
            for _ in range(3):
                driver.run(Part(bad, 1, rows=bad_rows(driver, 1, 0, value)))
        manager.check_integrity()
        assert manager.stats().coverage == pytest.approx(coverage, abs=0.2)


@pytest.mark.parametrize("where", ["its own", "a resident block"])
def test_a_decoding_row_sees_what_is_not_finite(where):
    with KVManager(SHAPE, tiny(summary="transform")) as manager:
        driver = Driver(manager)
        sequence = driver.create(80)
        driver.decode(sequence)
        rows = driver.draw(1)
        if where == "its own":
            rows.values[:, 0, :, 3] = NAN
        else:
            rows.keys[:] = NAN
            driver.run(Part(sequence, 1, rows=rows))
            rows = driver.draw(1)
        output = driver.run(Part(sequence, 1, rows=rows))[0]
        assert output[..., 3].isnan().all()
        assert bool(output.isnan().all()) == (where != "its own")


def test_a_text_without_one_finite_key_turns_sparse_and_the_next_one_is_what_the_summary_is_fitted_on():
    with KVManager(SHAPE, tiny(summary="transform")) as manager:
        driver = Driver(manager)
        bad = driver.create()
        driver.run(Part(bad, 80, rows=bad_rows(driver, 80, 0, NAN)))
        driver.run(Part(bad, 1, rows=bad_rows(driver, 1, 0, NAN)))
        assert bad.phase.value == "sparse"
        assert manager.fitted_length == 0
        good = driver.create(60)
        driver.decode(good)
        assert manager.fitted_length == 60
        driver.decode(bad)
        assert manager.fitted_length == 60


def test_a_new_fit_that_fails_leaves_the_old_one(monkeypatch, caplog):
    with KVManager(SHAPE, tiny(summary="transform")) as manager:
        driver = Driver(manager)
        first = driver.create(60)
        driver.decode(first)
        books = manager.rooms.summary._books

        def fail(samples):
            list(samples)
            raise ArithmeticError("no axes")

        monkeypatch.setattr(manager.rooms.summary, "fit", fail)
        long = driver.create(150)
        driver.decode(long)
        assert manager.rooms.summary._books is books
        assert [record.values["tokens"] for record in caplog.records if record.event == "refit-failed"] == [150]
        driver.decode(first)
        driver.check()
        monkeypatch.undo()
        driver.decode(driver.create(240))
        assert manager.fitted_length == 240
        driver.check()


def test_axes_that_cannot_be_found_are_those_that_are_there(caplog):
    good = torch.diag(torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64))
    values, axes = _eigh(torch.stack([good, torch.full((3, 3), NAN, dtype=torch.float64)]))
    assert values[0].tolist() == [1, 2, 3]
    torch.testing.assert_close(axes[0] @ values[0].diag() @ axes[0].T, good)
    assert values[1].isfinite().all()
    assert [record.event for record in caplog.records] == ["fit-without-axes"]


def test_rows_that_are_not_finite_are_zeros():
    rows = torch.ones((5, 2, 3))
    rows[1, 0, 0], rows[2, 1, 2], rows[3, 1, 1] = INF, NAN, 1e25
    kept = finite_rows(rows)
    assert torch.equal(kept, torch.ones((5, 2, 3)) * torch.tensor([1, 0, 0, 0, 1])[:, None, None])
    assert [all_finite(row) for row in rows] == [True, False, False, False, True]
