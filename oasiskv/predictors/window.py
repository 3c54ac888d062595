"""A yardstick: the whole budget is a local window (with sinks: StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

import torch

from .static import Static


class Window(Static):
    """Scores the newest blocks alike, and all others with nothing."""

    def begin(self, layer: int, mass: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        config = self.config
        count = mass[:, 0].sum(2, keepdim=True)
        # The candidates end where the window begins; of those, as many as there are places.
        first = count - config.window_blocks - config.selected_blocks
        number = torch.arange(mass.shape[3], device=mass.device)
        newest = ((number >= first) & (number < count)).float()
        return newest * (self.shape.group_size / newest.sum(2, keepdim=True).clamp(min=1))
