"""The common part of predictors that ask nothing about a block but whether it exists."""

from __future__ import annotations

import torch

from ..abc import BlockIndex, Predictor


class Static(Predictor):
    """Scores every step as `begin` scores the first; a block exists where it has mass."""

    def score(self, layer: int, queries: torch.Tensor, index: BlockIndex) -> torch.Tensor:
        return (index.summary_mass(queries) > 0).float()

    def aggregate(self, layer: int, mass: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self.begin(layer, mass, rows)
