"""What a mass threshold would gain over a fixed number of blocks per head: an experiment; no manager budgets like this yet.

A block is selected where its estimated mass exceeds a threshold, the same in all layers, heads and steps, with at most twice as
many places per head as a fixed budget has. The threshold is set so that no more blocks are selected on average. Both choose by
the exact query of the step (`quest`, and the oracle), without correction, in a replay.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from oasiskv import OasisConfig, ops
from oasiskv.adapters.hf.measure import Spans
from oasiskv.adapters.hf.replay import replay
from oasiskv.replay import Replay
from oasiskv.testing import texts
from oasiskv.testing.models import load_smollm2
from oasiskv.types import EMPTY
from oasiskv.whole import WholeIndex
from oasiskv.working_set import window_start

from .report import Row, at_most, run

CAP = 2
"""Most places of a head, relative to a fixed budget."""

ROUNDS = 6


class Threshold(Replay):
    """Selects by a threshold on the mass per query head; `threshold=None` selects a fixed number."""

    def __init__(self, *arguments: Any, threshold: float | None, counts: list[torch.Tensor]) -> None:  # noqa: ANN401 - as `Replay`
        super().__init__(*arguments)
        self._threshold = threshold
        self._counts = counts

    def choose(
        self, layer: int, queries: torch.Tensor, index: WholeIndex, text: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Replay.choose`; rows are steps here."""
        config, group = self.config, self.shape.group_size
        mass = self.predictor.score(layer, queries, index).flatten(0, 1)
        high = torch.tensor([window_start(config, length) for length in self.rows.lengths[:-1]]).repeat(len(self.histories))
        nothing = torch.full((*mass.shape[:2], 1), EMPTY)
        most = config.selected_blocks if self._threshold is None else CAP * config.selected_blocks
        blocks, gain = ops.top_missing(mass, nothing, torch.full_like(high, config.sink_blocks), high, most)
        if self._threshold is not None:
            blocks = torch.where(gain > self._threshold * group, blocks, EMPTY)
        self._counts.append((blocks >= 0).sum(2).float().mean())
        selected = blocks.unflatten(0, (len(self.histories), -1))
        return selected, torch.zeros(selected.shape[:3], dtype=torch.int64)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All rows."""
    model, tokenizer = load_smollm2()
    names = ("manual", "argparse") if options.quick else ("essays", "stdlib", "records", "chats")
    config = OasisConfig(budget_tokens=512, correction_blocks=0)
    spans = []
    for name in names:
        ids = tokenizer(texts.read(name), return_tensors="pt", verbose=False).input_ids
        spans.append(Spans.read(model, ids, 4096, 32 if options.quick else 64, 2, ["transform"], config))
    together = Spans.join(spans)
    for label, predictor in (("exact query", "quest"), ("oracle", "oracle")):
        chosen = OasisConfig(budget_tokens=512, correction_blocks=0, predictor=predictor)
        fixed, places = _kl(together, chosen, None)
        low, high = 0.0005, 0.05
        kl, count = _kl(together, chosen, high)
        for _ in range(ROUNDS):
            middle = (low * high) ** 0.5
            tried = _kl(together, chosen, middle)
            if tried[1] > places:
                low = middle
            else:
                high, (kl, count) = middle, tried
        prose = float(kl[: len(spans[0].prompts)].mean())
        yield at_most(
            f"threshold-{predictor}",
            f"{label}: KL by threshold at {count:.1f} places over fixed at {places:.1f} ({float(fixed.mean()):.4f})",
            float(kl.mean() / fixed.mean()),
            "",
            1.0,
        )
        yield at_most(f"threshold-prose-{predictor}", f"{label}: KL by threshold on {names[0]}", prose, "nats", 0.018)


def _kl(spans: Spans, config: OasisConfig, threshold: float | None) -> tuple[torch.Tensor, float]:
    """KL per span, and the mean number of selected blocks."""
    counts: list[torch.Tensor] = []
    kind = partial(Threshold, threshold=threshold, counts=counts)
    figures = spans.compare([replay(spans.model, spans.prompts, spans.ids, config, kind=kind)], config)
    return figures.kl.mean(1), float(torch.stack(counts).mean())


if __name__ == "__main__":
    raise SystemExit(run("mass_threshold", __doc__ or "", measure))
