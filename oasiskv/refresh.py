"""Renews the selected blocks of one layer for the next step: the background work behind every `step`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import ops
from .abc import KeySummary, Predictor
from .arena import Arena, SlotLease
from .config import OasisConfig
from .metrics import Counters
from .ops.reference_step import at_blocks, replaced
from .ops.softcap import soft_capped_blocks
from .pool import Pool
from .selected import KEPT_ABOVE
from .types import EMPTY, ModelShape
from .working_set import WorkingSets


@dataclass(frozen=True)
class Rooms:
    """The parts of a manager that steps and background work share."""

    shape: ModelShape
    config: OasisConfig
    pool: Pool
    arena: Arena
    sets: WorkingSets
    summary: KeySummary
    predictor: Predictor
    counters: Counters


class LayerIndex:
    """Answers a predictor about the sealed blocks of some sequences in one layer, and remembers the last answer."""

    def __init__(self, rooms: Rooms, layer: int, pages: torch.Tensor, num_blocks: torch.Tensor, scale: float) -> None:
        self._rooms = rooms
        self.layer = layer
        self._pages = pages
        self._num_blocks = num_blocks
        self._scale = scale
        self._softcap = rooms.sets.softcaps[layer]
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def summary_mass(self, queries: torch.Tensor) -> torch.Tensor:
        return ops.block_mass(self.summary_logits(queries), self._num_blocks, self._rooms.shape.kv_heads)

    def summary_logits(self, queries: torch.Tensor) -> torch.Tensor:
        """As `KeySummary.score`; of capped logits, where the layer has a soft cap."""
        if self._last is None or self._last[0] is not queries:
            logits = self._rooms.summary.score(self.layer, queries, self._pages, self._scale)
            self._last = (queries, soft_capped_blocks(logits, self._softcap, self._rooms.config.block_size))
        return self._last[1]

    def exact_mass(self, queries: torch.Tensor) -> torch.Tensor:
        kv_heads = self._rooms.shape.kv_heads
        blocks, pages = self._rooms.arena.whole(self.layer, self._pages)
        logits = ops.exact_logits(queries, blocks, pages, kv_heads, self._scale, self._softcap)
        return ops.block_mass(logits, self._num_blocks, kv_heads)


def load_limits(config: OasisConfig, predictor: Predictor, kv_heads: int) -> tuple[int, int]:
    """Most blocks that one head may load, and all heads of a sequence together. A foreground predictor is a yardstick, not a
    mode: it has no cap but its places."""
    if predictor.foreground:
        return config.selected_places, config.selected_places * kv_heads
    return config.burst_blocks, config.max_new_blocks * kv_heads


@dataclass(frozen=True)
class SparseRows:
    """The sparse sequences of a step, as tables; fixed for all layers.

    Attributes:
        rows: `(S,)` rows of the manager's tables.
        pages: `(S, N)` arena pages by block.
        num_blocks: `(S,)` sealed blocks.
        arena_slots: `(S, kv_heads, N)`, where they lie in every layer; `None` where that may change.
    """

    rows: torch.Tensor
    pages: torch.Tensor
    num_blocks: torch.Tensor
    arena_slots: torch.Tensor | None

    def pages_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """The pages of blocks `(S, kv_heads, K)`; `EMPTY` stays `EMPTY`."""
        return at_blocks(self.pages[:, None].expand(-1, blocks.shape[1], -1), blocks)

    def in_arena(self, arena: Arena, layer: int) -> torch.Tensor:
        """Where the sealed blocks lie in the arena now, as `Arena.table`."""
        return self.arena_slots if self.arena_slots is not None else arena.table(layer, self.pages)


class Refresh:
    """A `LayerWork`: scores queries, swaps blocks in the persistent set, and loads the new ones.

    Args:
        queries: gives the query rows `(S, R, query_heads, head_dim)`, called on the background lane: those of a step that has
            attended, or a guess of those to come.
        weights: `(S, R)`, see `Predictor.aggregate`.
        low, high: `(S,)`, the candidates are the blocks `low <= block < high`.
        max_new: most blocks loaded per kv head; `pooled` is the most of all heads of a sequence together.
    """

    def __init__(
        self,
        rooms: Rooms,
        layer: int,
        sparse: SparseRows,
        index: LayerIndex,
        queries: Callable[[], torch.Tensor],
        weights: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        step: int,
        max_new: int,
        pooled: int,
    ) -> None:
        self.layer = layer
        self._rooms = rooms
        self._sparse = sparse
        self._index = index
        self._queries = queries
        self._weights = weights
        self._low, self._high = low, high
        self._step = step
        self._max_new, self._pooled = max_new, pooled
        self.places = torch.empty(0)
        self._lease: SlotLease | None = None

    def predict(self) -> None:
        predictor = self._rooms.predictor
        row_mass = predictor.score(self.layer, self._queries(), self._index)
        self._mass = predictor.aggregate(self.layer, row_mass, self._weights, self._sparse.rows)
        if self._rooms.pool.lent:
            # What fits the budget is all to be there, also what an estimate gives no mass: no dense phase has it instead.
            self._mass = self._mass.clamp(min=torch.finfo(torch.float32).tiny)
            self._high = torch.minimum(self._high, self._sparse.num_blocks)  # those that drafts have sealed come next time

    def select(self) -> None:
        rooms, layer, rows = self._rooms, self.layer, self._sparse.rows
        selected = rooms.sets.selected
        self.places, self._blocks, self._kept, self._stamps, counts = ops.select(
            self._mass,
            selected.blocks[layer][rows],
            selected.stamps[layer][rows],
            self._low,
            self._high,
            selected.floor(rows),
            self._step,
            self._max_new,
            self._pooled,
            rooms.config.swap_gain * rooms.shape.group_size,
            KEPT_ABOVE,
        )
        rooms.counters.record("selection", counts)
        if rooms.arena.tiered:
            self._fetch(selected.blocks[layer][rows])

    def _fetch(self, resident: torch.Tensor) -> None:
        """Bring the chosen blocks to the arena. What cannot be had is not loaded, and the block whose place it was to take
        stays."""
        self._lease = self._rooms.arena.lease(self.layer, self._sparse.pages_of(self._blocks))
        failed = self._lease.slots < 0
        stays = torch.where(failed, self.places, EMPTY)
        self._kept = replaced(self._kept, stays, resident.gather(2, self.places.clamp(min=0)))
        self.places = torch.where(failed, EMPTY, self.places)
        self._blocks = torch.where(failed, EMPTY, self._blocks)

    def mark(self) -> None:
        selected, rows = self._rooms.sets.selected, self._sparse.rows
        self.places, self._slots = selected.give_up(self.layer, rows, self._kept, self.places)

    def transfer(self) -> None:
        rooms, sparse = self._rooms, self._sparse
        table = sparse.in_arena(rooms.arena, self.layer)
        counts = ops.load_blocks(rooms.arena.layers[self.layer], rooms.pool.slots, table, self._blocks, self._slots)
        rooms.sets.selected.publish(self.layer, sparse.rows, self._kept, self.places, self._blocks, self._stamps)
        rooms.counters.record("loads", counts)

    def end(self) -> None:
        if self._lease is not None:
            self._lease.end()

    def pending_blocks(self) -> int:
        return int((self.places >= 0).sum())
