"""What the exact queries of a step still miss: blocks read in place, and the share of attention that was seen."""

from __future__ import annotations

import torch

from . import ops
from .predictors.lookahead import need_over_rows
from .refresh import LayerIndex, Rooms, SparseRows
from .types import EMPTY


class Correction:
    """For the sparse sequences of one step; the same for all layers.

    Args:
        weights: `(S, R)`, how likely each row is to stay, 0 for padding.
        real: `(S, R)`, which rows are no padding.
        low, high: `(S,)`, the candidates are the blocks `low <= block < high`.
    """

    def __init__(
        self,
        rooms: Rooms,
        sparse: SparseRows,
        weights: torch.Tensor,
        real: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
    ) -> None:
        self._rooms = rooms
        self._sparse = sparse
        self._weights = weights
        self._real = real.float()
        self._low, self._high = low, high
        self._most = rooms.config.correction_blocks * real.sum(1)[:, None, None]

    def read(self, index: LayerIndex, queries: torch.Tensor, selected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks that the queries `(S, R, query_heads, head_dim)` need most among those that are not selected `(S, H, C)`, and
        where they lie in the arena: `(S, H, m)` each."""
        config = self._rooms.config
        need = need_over_rows(index.summary_mass(queries), self._weights)
        count = config.correction_blocks * queries.shape[1]
        blocks, gain = ops.top_missing(need, selected, self._low, self._high, count)
        wanted = gain > config.correction_gain * self._rooms.shape.group_size
        wanted &= torch.arange(gain.shape[2], device=gain.device) < self._most
        places = self._rooms.arena.locate(index.layer, self._sparse.pages_of(torch.where(wanted, blocks, EMPTY)))
        blocks = torch.where(places >= 0, blocks, EMPTY)
        read = (blocks >= 0).sum(2)
        self._rooms.counters.add(corrected_blocks=read.sum())
        self._rooms.counters.keep_largest(most_corrected_blocks=read.max())
        return blocks, places

    def count_coverage(self, index: LayerIndex, queries: torch.Tensor, held: torch.Tensor, lse: torch.Tensor) -> None:
        """Count the share of attention that fell on what the rows saw: their exact logsumexp `(S, R, query_heads)` against the
        summary's estimate for the candidates that are not among the blocks held, `(S, H, K)`."""
        logits = index.summary_logits(queries)
        number = torch.arange(logits.shape[3], device=logits.device)
        missing = (number >= self._low[:, None]) & (number < self._high[:, None])
        missing = missing[:, None].repeat(1, held.shape[1], 1)
        padded = torch.nn.functional.pad(missing, (0, 1))
        padded.scatter_(2, torch.where(held >= 0, held, logits.shape[3]), False)
        unseen = padded[..., :-1].repeat_interleave(self._rooms.shape.group_size, 1)[:, None]
        estimate = torch.logsumexp(logits.masked_fill(~unseen, float("-inf")), dim=3)
        share = torch.sigmoid(lse - estimate).mean(2)
        self._rooms.counters.add(coverage_sum=(share * self._real).sum() / self._real.sum(), coverage_count=1)
