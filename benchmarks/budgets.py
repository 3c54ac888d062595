"""What it gains when the heads of a sequence share its budget: the real SmolLM2-135M, replayed with both kinds of budget.

A budget per head gives every head the same number of selected blocks; one per sequence gives a slot to every block whose mass
exceeds a threshold, at the same number of blocks on average. `quest` and `oracle` choose by the exact query of the step, by the
summary and by the keys, without correction; the defaults are as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from oasiskv import OasisConfig
from oasiskv.adapters.hf.measure import Spans
from oasiskv.testing import texts
from oasiskv.testing.models import load_smollm2

from .report import Row, at_most, run


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All rows."""
    model, tokenizer = load_smollm2()
    names = ("manual", "argparse") if options.quick else ("essays", "stdlib", "records", "chats")
    spans = []
    for name in names:
        ids = tokenizer(texts.read(name), return_tensors="pt", verbose=False).input_ids
        settings = OasisConfig(budget_tokens=512)
        spans.append(Spans.read(model, ids, 4096, 32 if options.quick else 64, 2, ["transform"], settings))
    together = Spans.join(spans)
    prose = len(spans[0].prompts)
    for label, config in (
        ("defaults", OasisConfig(budget_tokens=512)),
        ("exact query", OasisConfig(budget_tokens=512, predictor="quest", correction_blocks=0)),
        ("oracle", OasisConfig(budget_tokens=512, predictor="oracle", correction_blocks=0)),
    ):
        head, sequence = (
            together.measure(replace(config, budget_per="head")),
            together.measure(replace(config, budget_per="sequence")),
        )
        name = label.replace(" ", "-")
        moved = [f"{figures.moved:.2f} + {figures.read_in_place:.2f}" for figures in (head, sequence)]
        yield at_most(
            name,
            f"{label}: KL, budget per sequence over per head ({sequence.mean_kl:.4f} and {head.mean_kl:.4f}; blocks moved "
            f"and read in place {moved[1]} and {moved[0]})",
            sequence.mean_kl / head.mean_kl,
            "",
            1.0,
        )
        yield at_most(
            f"{name}-prose", f"{label}: KL per sequence on {names[0]}", float(sequence.kl[:prose].mean()), "nats", 0.018
        )


if __name__ == "__main__":
    raise SystemExit(run("budgets", __doc__ or "", measure))
