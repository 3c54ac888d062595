"""A yardstick after H2O (arXiv 2306.14048): heavy hitters, the blocks that have gathered most attention since the prompt's end.

H2O evicts the others for good. Here nothing is lost, so a block can come back when it gathers attention again; and the sum
starts with the last rows of the prompt, not with its first.
"""

from __future__ import annotations

import torch

from .remembering import Remembering


class H2O(Remembering):
    """Scores by the mean of all masses so far, the sum over the number of rows in the paper's terms."""

    prompt_rows = 32

    def begin(self, layer: int, mass: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        total = mass.sum(1)
        self.memory.write(layer, rows, total)
        return mass.mean(1)

    def fold(self, before: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        return before + mass

    def aggregate(self, layer: int, mass: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        total = super().aggregate(layer, mass, weights, rows)
        # Every row adds the group size to the sum over blocks, so the sum tells how many rows there were.
        return total / total.sum(2, keepdim=True).clamp(min=1e-6) * self.shape.group_size
