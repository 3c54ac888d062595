"""Which rows of a batch belong to some of its requests."""

from __future__ import annotations

from itertools import pairwise

import torch

Rows = slice | torch.Tensor
"""An index of a batch's rows: a slice where they lie together, which costs nothing to read and to write."""


def rows_of(pieces: list[tuple[int, int]], device: torch.device) -> Rows:
    """The rows of pieces `(start, count)`, one piece after another."""
    together = all(start + count == after for (start, count), (after, _) in pairwise(pieces))
    if pieces and together:
        return slice(pieces[0][0], sum(pieces[-1]))
    return torch.tensor(
        [row for start, count in pieces for row in range(start, start + count)], dtype=torch.int64, device=device
    )
