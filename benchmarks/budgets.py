"""What it gains when the heads of a sequence share its budget: the real SmolLM2-135M, decoding with both kinds of budget.

A budget per head gives every head the same number of selected blocks; one per sequence gives a slot to every block whose mass
exceeds a threshold that follows the slots that are left. Both hold the same memory. No replay: how full the slots are after
each step decides what the next one finds. `quest` chooses by the exact query of the step and `oracle` by the keys themselves,
without correction.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import torch

from oasiskv import OasisConfig
from oasiskv.adapters.hf.fidelity import teacher_forced
from oasiskv.testing import texts
from oasiskv.testing.models import load_smollm2

from .report import Row, at_most, run

CONTEXT = 4096


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All rows."""
    model, tokenizer = load_smollm2()
    names = ("manual",) if options.quick else ("essays", "stdlib", "licences", "records")
    tokens = 24 if options.quick else 64
    spans = {}
    for name in names:
        ids = tokenizer(texts.read(name), return_tensors="pt", verbose=False).input_ids
        spans[name] = ids[:, : CONTEXT + tokens]
    settings = [("defaults", OasisConfig(budget_tokens=512))]
    if not options.quick:
        settings.append(("exact query", OasisConfig(budget_tokens=512, predictor="quest", correction_blocks=0)))
        settings.append(("oracle", OasisConfig(budget_tokens=512, predictor="oracle", correction_blocks=0)))
    for label, config in settings:
        kl = []
        for ids in spans.values():
            for settled in (config, replace(config, budget_per="sequence")):
                divergence, _ = teacher_forced(model, ids, CONTEXT, settled)
                kl.append(torch.tensor(divergence.kl))
        head, sequence = torch.stack(kl[::2]), torch.stack(kl[1::2])
        name = label.replace(" ", "-")
        pairs = ", ".join(f"{text} {a:.4f} / {b:.4f}" for text, a, b in zip(names, sequence.mean(1), head.mean(1), strict=True))
        yield at_most(
            name, f"{label}: KL, budget per sequence over per head ({pairs})", float(sequence.mean() / head.mean()), "", 1.0
        )
        yield at_most(f"{name}-prose", f"{label}: KL per sequence on {names[0]}", float(sequence[0].mean()), "nats", 0.018)


if __name__ == "__main__":
    raise SystemExit(run("budgets", __doc__ or "", measure))
