"""The lower yardstick: a fixed choice that knows nothing."""

from __future__ import annotations

import torch

from .static import Static


class Random(Static):
    """Scores by a hash of layer, head and block number."""

    def begin(self, layer: int, mass: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        exists = mass[:, 0]
        heads, blocks = exists.shape[1:]
        head = torch.arange(heads, device=mass.device)[:, None]
        number = torch.arange(blocks, device=mass.device)
        noise = (12.9898 * number + 78.233 * head + 37.719 * layer).sin().mul(43758.5453).frac().abs()
        score = exists * noise
        return score / score.sum(2, keepdim=True).clamp(min=1e-6) * self.shape.group_size
