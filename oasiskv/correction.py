"""Attention of a step's exact queries: over the working sets, and over blocks that they still miss, read in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from . import ops
from .arena import pages_of
from .ops import reference_step
from .refresh import Rooms, SparseRows


class Correction:
    """For the sequences of one step, some of them sparse; the same for all layers.

    Args:
        sparse, members: the sparse sequences, and which ones of all they are, `(M,)`.
        weights: `(M, R)`, how likely each row is to stay, 0 for padding.
        low, high: `(M,)`, the candidates are the blocks `low <= block < high`.
        positions: `(S, R)` of all rows, below 0 for padding.
    """

    def __init__(
        self,
        rooms: Rooms,
        sparse: SparseRows,
        members: torch.Tensor,
        weights: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        self._rooms = rooms
        self._sparse = sparse
        self._members = members
        self._weights = weights
        self._low, self._high = low, high
        self._positions = positions
        self._least_gain = rooms.config.correction_gain * rooms.shape.group_size

    def attend(
        self, layer: int, queries: torch.Tensor, slots: torch.Tensor, blocks: torch.Tensor, logits: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As `ops.corrected_attention`, and count what it reports: queries `(S, R, query_heads, head_dim)` over the blocks of
        sinks and ring, and block logits of the sparse sequences `(M, R, query_heads, N)`."""
        rooms, sparse = self._rooms, self._sparse
        with rooms.sets.selected.held(layer) as (selected, there):
            output, counts = self._attention(layer)(
                queries,
                rooms.pool.slots,
                slots,
                blocks,
                rooms.arena.layers[layer],
                sparse.pages,
                logits,
                sparse.num_blocks,
                self._members,
                sparse.rows,
                selected,
                there,
                self._low,
                self._high,
                self._weights,
                self._positions,
                rooms.config.correction_blocks,
                self._least_gain,
                scale,
            )
        rooms.counters.record("corrections", counts[None])
        return output

    def _attention(self, layer: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """The op, or what it is made of where blocks may have to be fetched between choosing and reading them."""
        arena = self._rooms.arena
        if not arena.tiered:
            return ops.corrected_attention

        def locate(pages: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
            return arena.locate(layer, pages_of(pages, blocks))

        return partial(reference_step.corrected_attention, pieces=torch.ops.oasiskv, locate=locate)
