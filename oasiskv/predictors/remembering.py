"""The common part of predictors that keep one number per block."""

from __future__ import annotations

from abc import abstractmethod

import torch

from ..config import OasisConfig
from ..types import ModelShape
from .block_memory import BlockMemory
from .lookahead import Lookahead, mean_over_rows


class Remembering(Lookahead):
    """Folds the mean mass of every step into its memory; the memory is the score."""

    def __init__(self, shape: ModelShape, config: OasisConfig) -> None:
        super().__init__(shape, config)
        self.memory = BlockMemory(shape)

    @abstractmethod
    def fold(self, before: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        """The memory after a row of masses; all `(S, kv_heads, num_blocks)`."""

    def begin(self, layer: int, mass: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        memory = mass[:, 0]
        for row in range(1, mass.shape[1]):
            memory = self.fold(memory, mass[:, row])
        self.memory.write(layer, rows, memory)
        return memory

    def aggregate(self, layer: int, mass: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        memory = self.fold(self.memory.read(layer, rows, mass.shape[3]), mean_over_rows(mass, weights))
        self.memory.write(layer, rows, memory)
        return memory

    def reserve_rows(self, count: int) -> None:
        self.memory.reserve_rows(count)

    def clear_row(self, row: int) -> None:
        self.memory.clear_row(row)

    def copy_row(self, source: int, target: int) -> None:
        self.memory.copy_row(source, target)

    def device_bytes(self) -> int:
        return self.memory.device_bytes()
