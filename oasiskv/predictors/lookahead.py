"""The paper's predictor: the queries of draft tokens, which ride in the same forward, say what the next step will look at.

Rows of rejected drafts are dropped: their queries belong to a text that was not written, and following them costs more than
having no drafts at all. Without drafts this is `previous`.
"""

from __future__ import annotations

import torch

from ..abc import BlockIndex, Predictor


class Lookahead(Predictor):
    """Scores by the mean mass over the accepted rows of the step."""

    def score(self, layer: int, queries: torch.Tensor, index: BlockIndex) -> torch.Tensor:
        return index.summary_mass(queries)

    def aggregate(self, layer: int, mass: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return mean_over_rows(mass, weights)


def mean_over_rows(mass: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The mean mass of a sequence's rows, `(S, R, H, N)` to `(S, H, N)`, by weights `(S, R)`."""
    if mass.shape[1] == 1:
        return mass[:, 0]
    shares = weights / weights.sum(1, keepdim=True)
    return (mass * shares[:, :, None, None]).sum(1)


def likely_rows(weights: torch.Tensor) -> torch.Tensor:
    """The weights of rows that are more likely to stay than not, and 0 for the others: a working set that follows unlikely
    drafts serves the certain row badly."""
    return torch.where(weights >= 0.5, weights, 0.0)
