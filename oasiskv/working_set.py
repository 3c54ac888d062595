"""Which blocks are on the device: the tables behind the pool, with a row per sequence.

A sparse sequence has `budget_blocks` places, the same for all layers and heads:

    [ sinks | ring of the window and the tail | selected ]

Block `b` of the window lies in ring place `b % ring_blocks`, so appending is arithmetic and never a search. Only the selected
part differs between layers and heads; see `selected`. A dense sequence has a place per block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .config import OasisConfig
from .selected import Selected, SharedSelected, taller
from .types import EMPTY, ModelShape


class WorkingSets:
    """Tables over sequences; the last `recent_rows` query rows of each choose its first working set."""

    def __init__(self, shape: ModelShape, config: OasisConfig, recent_rows: int) -> None:
        self.shape = shape
        self.config = config
        self.recent_rows = recent_rows
        self.capacity = 0
        device = shape.device
        self.strips = torch.full((0, config.budget_blocks), EMPTY, dtype=torch.int64, device=device)
        self.pages = torch.full((0, 0), EMPTY, dtype=torch.int64, device=device)
        self.selected = (SharedSelected if config.budget_per == "sequence" else Selected)(shape, config)
        recent = (0, recent_rows, shape.query_heads, shape.head_dim)
        self.recent = [torch.zeros(recent, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
        self.scales = [shape.head_dim**-0.5] * shape.num_layers
        self.softcaps: list[float | None] = [None] * shape.num_layers

    def reserve_rows(self, rows: int) -> None:
        """Make room for `rows` sequences. No background work may run."""
        if rows <= self.capacity:
            return
        self.strips = taller(self.strips, rows, EMPTY)
        self.pages = taller(self.pages, rows, EMPTY)
        self.selected.reserve_rows(rows)
        self.recent = [taller(table, rows, 0) for table in self.recent]
        self.capacity = rows

    def set_pages(self, row: int, start: int, pages: list[int]) -> None:
        """Write the page numbers of blocks `start ...` and forget any beyond them."""
        end = start + len(pages)
        if end > self.pages.shape[1]:
            self.pages = _wider(self.pages, max(end, self.pages.shape[1] * 2))
        self.pages[row, start:end] = torch.tensor(pages, dtype=torch.int64, device=self.pages.device)
        self.pages[row, end:] = EMPTY

    def set_strips(self, row: int, strips: list[int]) -> None:
        """Write the strips of a sequence, by place."""
        if len(strips) > self.strips.shape[1]:
            self.strips = _wider(self.strips, len(strips))
        self.strips[row] = EMPTY
        self.strips[row, : len(strips)] = torch.tensor(strips, dtype=torch.int64, device=self.strips.device)

    def copy_row(self, source: int, target: int, moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Give `target` the tables of `source`, but for its strips. `moved` is as in `Selected.copy_row`."""
        self.pages[target] = self.pages[source]
        self.selected.copy_row(source, target, moved)
        for recent in self.recent:
            recent[target] = recent[source]

    def remember_queries(self, layer: int, rows: torch.Tensor, queries: torch.Tensor) -> None:
        """Push the query rows `(num_sequences, num_rows, query_heads, head_dim)` of a step onto the recent ones."""
        kept = queries[:, -self.recent_rows :].to(self.shape.dtype)
        if kept.shape[1] < self.recent_rows:
            kept = torch.cat([self.recent[layer][rows][:, kept.shape[1] :], kept], dim=1)
        self.recent[layer][rows] = kept

    def device_bytes(self) -> int:
        """Bytes of all tables."""
        tables = [self.strips, self.pages, *self.recent]
        return sum(table.numel() * table.itemsize for table in tables) + self.selected.device_bytes()


def window_start(config: OasisConfig, length: int) -> int:
    """The first block that the window keeps when the next token is number `length`; sinks are no part of the window."""
    return max(config.sink_blocks, length // config.block_size - config.window_blocks)


def place_of(config: OasisConfig, block: int, dense: bool) -> int:
    """The place of a sink or of a block of the window (or of any block of a dense sequence)."""
    return block if dense or block < config.sink_blocks else config.sink_blocks + block % config.ring_blocks


def _wider(table: torch.Tensor, columns: int) -> torch.Tensor:
    longer = table.new_full((table.shape[0], columns), EMPTY)
    longer[:, : table.shape[1]] = table
    return longer
