"""The paper's summary: the smallest and largest value of every key channel in a block."""

from __future__ import annotations

import math

import torch

from .. import ops
from ..abc import KeySummary
from ..config import OasisConfig
from ..types import ModelShape
from .growing import grown


class MinMax(KeySummary):
    """Bounds in the KV's dtype, `2 * head_dim` numbers per block; scores are upper bounds, if all tokens met the bound."""

    def __init__(self, shape: ModelShape, config: OasisConfig) -> None:
        super().__init__(shape, config)
        size = (0, shape.kv_heads, 2, shape.head_dim)
        self._bounds = [torch.zeros(size, dtype=shape.dtype, device=shape.device) for _ in range(shape.num_layers)]

    @property
    def bytes_per_token(self) -> float:
        return 2 * self.shape.head_dim * self.shape.dtype.itemsize / self.config.block_size

    def reserve(self, num_pages: int) -> None:
        self._bounds = [grown(bounds, num_pages) for bounds in self._bounds]

    def write(self, layer: int, pages: torch.Tensor, keys: torch.Tensor) -> None:
        ops.minmax_write(self._bounds[layer], pages, keys)

    def score(self, layer: int, queries: torch.Tensor, pages: torch.Tensor, scale: float) -> torch.Tensor:
        # The bound holds for every token of the block.
        return ops.minmax_score(self._bounds[layer], pages, queries, scale) + math.log(self.config.block_size)

    def device_bytes(self) -> int:
        return sum(bounds.numel() * bounds.itemsize for bounds in self._bounds)
