import dataclasses
import json

import pytest
import torch

from benchmarks.quality import Cell, Table, settings
from benchmarks.quality_plots import BYTES, draw
from benchmarks.quality_tables import by_text, overview, read
from oasiskv import KVManager, ModelShape, OasisConfig


def cell(name, budget, kl, text="essays", context=4096):
    return Cell(
        text, context, name, budget, kl, 0.0, [kl, 2 * kl], 0.9, 0.1, 0.8, 1.0, 0.5, [1, 2, 3, 4], 0.1, [0.7] * 18
    )  # fmt: skip


def test_every_plot_is_drawn_from_what_it_needs_and_left_out_without(tmp_path):
    pytest.importorskip("matplotlib")
    assert draw([], tmp_path / "none") == []
    cells = [cell("defaults", 512, 0.02), cell("defaults", 1024, 0.005), cell("oracle", 512, 0.01)]
    cells += [cell("bit2, exact query", 512, 0.012), cell("minmax", 512, 0.1)]
    files = draw(cells, tmp_path)
    assert [file.name for file in files] == ["budget.svg", "frontier.svg", "coverage.svg"]
    assert all(file.read_text().startswith("<?xml") for file in files)


def test_the_table_averages_over_texts():
    table = Table(echo=False)
    for number, text in enumerate(("a", "b")):
        table.add(cell("defaults", 512, 0.02 * (number + 1), text))
    table.add(cell("defaults", 1024, 9.0))
    assert table.mean(4096, "defaults", 512) == pytest.approx(0.03)
    assert table.mean(4096, "defaults", 512, "agreement") == pytest.approx(0.9)
    spans = torch.tensor([0.02, 0.04, 0.04, 0.08])
    assert table.error(4096, "defaults", 512) == pytest.approx(float(spans.std() / 2))


@pytest.mark.parametrize("name", sorted(BYTES))
def test_the_bytes_in_the_plot_are_those_of_the_summary(name):
    config = OasisConfig(summary="transform" if name == "defaults" else name, workers=0)
    shape = ModelShape(num_layers=1, query_heads=3, kv_heads=3, head_dim=64, dtype=torch.float16)
    with KVManager(shape, config) as manager:
        assert manager.rooms.summary.bytes_per_token == BYTES[name]


def test_small_budgets_have_small_windows():
    for budget in (128, 256, 512, 2048):
        assert settings(budget).selected_blocks >= 1
    assert settings(512) == dataclasses.replace(OasisConfig(), budget_tokens=512)


def test_tables_are_means_over_texts(tmp_path):
    cells = [cell("defaults", 512, 0.02, "a"), cell("defaults", 512, 0.04, "b"), cell("random", 512, 0.5, "a")]
    path = tmp_path / "cells.jsonl"
    path.write_text("\n".join(json.dumps(dataclasses.asdict(each)) for each in cells))
    assert read([path]) == cells
    rows = list(overview(cells))
    assert rows[2] == "| 4,096 | 512 | defaults | 0.0300 (0.0126) | 0.900 | +0.1000 | 1.00 + 0.50 |"
    assert list(by_text(cells, 4096, 512)) == [
        "| | a | b | mean |",
        "|---|---|---|---|",
        "| defaults | 0.0200 | 0.0400 | 0.0300 |",
    ]
