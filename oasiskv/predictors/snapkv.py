"""A yardstick after SnapKV (arXiv 2404.14469): the last rows of the prompt vote once, and the choice stands.

The paper's pooling over neighbouring tokens is what choosing whole blocks does already.
"""

from __future__ import annotations

import torch

from .remembering import Remembering


class SnapKV(Remembering):
    """Scores by the mean mass over the observation window at the prompt's end."""

    prompt_rows = 32

    def begin(self, layer: int, mass: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        votes = mass.mean(1)
        self.memory.write(layer, rows, votes)
        return votes

    def fold(self, before: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        return before
