"""The bounds of `minmax` in 4 bits each: a quarter of their bytes, and still bounds.

The smallest values of a block's channels share a zero and a step in fp16, and so do the largest. Smallest values are rounded
down and largest values up, so that every key lies within what is kept, and a score is an upper bound as with `minmax`.
"""

from __future__ import annotations

import math

import torch

from .. import ops
from ..abc import KeySummary
from ..config import OasisConfig
from ..errors import ConfigError
from ..types import ModelShape
from .growing import grown


class MinMaxInt4(KeySummary):
    """`head_dim` bytes per block for the bounds, and 8 for their zeros and steps."""

    def __init__(self, shape: ModelShape, config: OasisConfig) -> None:
        super().__init__(shape, config)
        if shape.head_dim % 2:
            raise ConfigError(f"head_dim is {shape.head_dim}; minmax-int4 puts two channels into a byte, so it must be even")
        self._codes, self._ranges = empty_bounds(shape)

    @property
    def bytes_per_token(self) -> float:
        return int4_bounds_bytes(self.shape) / self.config.block_size

    def reserve(self, num_pages: int) -> None:
        self._codes = [grown(codes, num_pages) for codes in self._codes]
        self._ranges = [grown(ranges, num_pages) for ranges in self._ranges]

    def write(self, layer: int, pages: torch.Tensor, keys: torch.Tensor) -> None:
        ops.minmax4_write(self._codes[layer], self._ranges[layer], pages, keys, True)

    def score(self, layer: int, queries: torch.Tensor, pages: torch.Tensor, scale: float) -> torch.Tensor:
        bounds = ops.minmax4_read(self._codes[layer], self._ranges[layer], pages.flatten())
        places = torch.arange(pages.numel(), device=pages.device).view(pages.shape)
        return ops.minmax_score(bounds, places, queries, scale) + math.log(self.config.block_size)

    def device_bytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in (*self._codes, *self._ranges))


def empty_bounds(shape: ModelShape) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Codes and ranges of no page, per layer, in the layouts of `ops.minmax4_write`."""
    codes = torch.zeros((0, shape.kv_heads, 2, shape.head_dim // 2), dtype=torch.uint8, device=shape.device)
    ranges = torch.zeros((0, shape.kv_heads, 2, 2), dtype=torch.float16, device=shape.device)
    return [codes] * shape.num_layers, [ranges] * shape.num_layers


def int4_bounds_bytes(shape: ModelShape) -> int:
    """Bytes of the bounds of one block of one kv head: codes, zeros and steps."""
    return shape.head_dim + 2 * 2 * torch.float16.itemsize
