"""A yardstick after Scissorhands (arXiv 2305.17118): importance persists, so count how often a block was above the average.

The paper drops what is seldom important; here it stays in the arena and may come back.
"""

from __future__ import annotations

import torch

from .remembering import Remembering

KEEP = 0.98
"""Weight of the past: a history window of about 50 rows."""


class Scissorhands(Remembering):
    """Scores by the share of recent rows that gave a block more than the mean mass."""

    prompt_rows = 32

    def begin(self, layer: int, mass: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        often = _above_average(mass).mean(1)
        self.memory.write(layer, rows, often)
        return self._as_mass(often)

    def fold(self, before: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        return KEEP * before + (1 - KEEP) * _above_average(mass)

    def aggregate(self, layer: int, mass: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self._as_mass(super().aggregate(layer, mass, weights, rows))

    def _as_mass(self, often: torch.Tensor) -> torch.Tensor:
        return often / often.sum(-1, keepdim=True).clamp(min=1e-6) * self.shape.group_size


def _above_average(mass: torch.Tensor) -> torch.Tensor:
    blocks = (mass > 0).sum(-1, keepdim=True).clamp(min=1)
    return (mass > mass.sum(-1, keepdim=True) / blocks).to(mass.dtype)
