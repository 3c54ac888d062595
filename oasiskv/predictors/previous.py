"""The next query will look where the last one looked: the simplest guess, and the one that needs no drafts."""

from __future__ import annotations

import torch

from ..abc import BlockIndex, Predictor


class Previous(Predictor):
    """Scores by the last accepted row alone."""

    def score(self, layer: int, queries: torch.Tensor, index: BlockIndex) -> torch.Tensor:
        return index.summary_mass(queries)

    def aggregate(self, layer: int, mass: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        last = ((weights >= 0.5).sum(1) - 1).clamp(min=0)[:, None, None, None].expand(-1, 1, *mass.shape[2:])
        return mass.gather(1, last)[:, 0]
