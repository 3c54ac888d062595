"""A moving average of where the last queries looked: steadier than the last query alone, and fewer blocks moved."""

from __future__ import annotations

import torch

from .remembering import Remembering

KEEP = 0.7
"""Weight of the past when a step comes in."""


class Ema(Remembering):
    """Scores by the exponential moving average of the steps' masses."""

    def fold(self, before: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        return KEEP * before + (1 - KEEP) * mass
