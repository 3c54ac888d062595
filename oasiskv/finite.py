"""Keeps what is not finite in one text out of what all texts share: the statistics that a summary is fitted on."""

from __future__ import annotations

import torch

_LARGEST_SQUARE = 1e20
"""Of a row's norm. Float32 sums of products of smaller rows, weighted by position, over all rows of a long text, are finite."""


def finite_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows `(n, heads, head_dim)`, with zeros in place of those that are not finite, or nearly not. Waits for no device."""
    squares = rows.float().square().sum((1, 2), keepdim=True)
    return torch.where(squares < _LARGEST_SQUARE, rows, 0.0)


def all_finite(rows: torch.Tensor) -> bool:
    """Whether each vector `(..., head_dim)` is finite, and not nearly not. Waits for the device."""
    return bool((rows.float().square().sum(-1) < _LARGEST_SQUARE).all())
