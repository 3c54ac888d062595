"""What some predictors keep: a number per sequence, layer, kv head and block."""

from __future__ import annotations

import torch

from ..types import ModelShape


class BlockMemory:
    """Tables `(rows, kv_heads, num_blocks)`, one per layer, that grow with the sequences; zero where nothing was written."""

    def __init__(self, shape: ModelShape) -> None:
        self._tables = [torch.zeros((0, shape.kv_heads, 0), device=shape.device) for _ in range(shape.num_layers)]

    def read(self, layer: int, rows: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """The first `num_blocks` numbers of some sequences, `(S, kv_heads, num_blocks)`."""
        kept = self._tables[layer][rows, :, :num_blocks]
        return torch.nn.functional.pad(kept, (0, num_blocks - kept.shape[2]))

    def write(self, layer: int, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the numbers of some sequences by `(S, kv_heads, num_blocks)`, and forget any beyond them."""
        table = self._tables[layer]
        missing = values.shape[2] - table.shape[2]
        if missing > 0:
            table = self._tables[layer] = torch.nn.functional.pad(table, (0, max(missing, table.shape[2] // 8)))
        table[rows] = torch.nn.functional.pad(values, (0, table.shape[2] - values.shape[2]))

    def reserve_rows(self, count: int) -> None:
        """Make room for `count` sequences."""
        self._tables = [
            torch.nn.functional.pad(table, (0, 0, 0, 0, 0, max(0, count - table.shape[0]))) for table in self._tables
        ]

    def clear_row(self, row: int) -> None:
        """Forget a sequence."""
        for table in self._tables:
            table[row] = 0

    def copy_row(self, source: int, target: int) -> None:
        """Give `target` what `source` has."""
        for table in self._tables:
            table[target] = table[source]

    def device_bytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.numel() * table.itemsize for table in self._tables)
