"""Tensors that grow by pages."""

from __future__ import annotations

import torch

GROWTH = 1.125
"""Space beyond the need that growing takes, so that a long generation copies its summaries a few times only."""


def grown(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor itself if it has `rows` rows, else a longer copy with zeros behind the old rows."""
    if tensor.shape[0] >= rows:
        return tensor
    size = rows if tensor.shape[0] == 0 else max(rows, int(tensor.shape[0] * GROWTH))
    longer = tensor.new_zeros((size, *tensor.shape[1:]))
    longer[: tensor.shape[0]] = tensor
    return longer
