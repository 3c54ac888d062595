"""The yardstick: the step's own queries against the keys themselves, before the step attends. No predictor can do better."""

from __future__ import annotations

import torch

from ..abc import BlockIndex
from .lookahead import Lookahead


class Oracle(Lookahead):
    """Chooses by the true attention mass of the present step; reads all keys from the arena, so it saves no traffic."""

    foreground = True

    def score(self, layer: int, queries: torch.Tensor, index: BlockIndex) -> torch.Tensor:
        return index.exact_mass(queries)
