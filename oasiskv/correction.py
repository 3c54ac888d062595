"""Attention of a step's exact queries: over the working sets, and over blocks that they still miss, read in place."""

from __future__ import annotations

import torch

from . import ops
from .arena import SlotLease
from .ops.reference_step import missing_blocks
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
        self,
        layer: int,
        queries: torch.Tensor,
        slots: torch.Tensor,
        blocks: torch.Tensor,
        logits: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """As `ops.corrected_attention`, and count what it reports: queries `(S, R, query_heads, head_dim)` over the blocks of
        sinks and ring, and block logits of the sparse sequences `(M, R, query_heads, N)`."""
        rooms, sparse = self._rooms, self._sparse
        tables = rooms.sets.selected
        with tables.locks[layer]:
            selected, there = tables.blocks[layer], tables.slots[layer]
            lease = self._bring(layer, logits, selected[sparse.rows]) if rooms.arena.tiered else None
            output, counts = ops.corrected_attention(
                queries,
                rooms.pool.slots,
                slots,
                blocks,
                rooms.arena.layers[layer],
                sparse.in_arena(rooms.arena, layer),
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
                softcap,
            )
            if lease is not None:
                lease.end()
        rooms.counters.record("corrections", counts[None])
        return output

    def _bring(self, layer: int, logits: torch.Tensor, held: torch.Tensor) -> SlotLease:
        """Fetch the blocks that are read in place next, if they are below the arena."""
        sparse, real = self._sparse, self._positions[self._members] >= 0
        most, gain = self._rooms.config.correction_blocks, self._least_gain
        blocks = missing_blocks(
            logits, sparse.num_blocks, held, self._low, self._high, self._weights, real, most, gain, torch.ops.oasiskv
        )
        return self._rooms.arena.lease(layer, sparse.pages_of(blocks))
