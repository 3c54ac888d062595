"""Two bits per key channel: the keys themselves, coarsely, instead of a digest of the block.

Within a block a channel moves little, so four levels, evenly spaced from its smallest to its largest value in the block, say
nearly all that ranking needs: level `i` is `low + i (high - low) / 3`, and a key takes the nearest one (KIVI, arXiv
2402.02750, quantises the keys of a cache per channel in the same way). A score is the log of the sum over the block's tokens of
the exponentials of approximate logits, so it estimates what the contract asks for and needs no fitting.

The bounds are kept in fp16, or in 4 bits as by `minmax-int4`, here rounded to the nearest code: what counts is a level's error,
not that it bounds anything. At head_dim 64 and block size 16 that is 32 or 20.5 bytes per token.
"""

from __future__ import annotations

import torch

from .. import ops
from ..abc import KeySummary
from ..config import OasisConfig
from ..errors import ConfigError
from ..types import EMPTY, ModelShape
from .growing import grown
from .minmax_int4 import empty_bounds, int4_bounds_bytes

_LARGEST = torch.finfo(torch.float16).max


class Bit2(KeySummary):
    """`head_dim / 4` bytes per token for codes, and two bounds per block and channel.

    Args:
        int4_scales: keep the bounds in 4 bits instead of fp16.
        pinned: page-lock the tensors. For a summary whose `shape.device` is the CPU while queries come from a GPU.
    """

    def __init__(self, shape: ModelShape, config: OasisConfig, *, int4_scales: bool = False, pinned: bool = False) -> None:
        super().__init__(shape, config)
        if shape.head_dim % 4:
            raise ConfigError(
                f"head_dim is {shape.head_dim}; bit2 puts four channels into a byte, so it must be a multiple of 4"
            )
        self._int4 = int4_scales
        self._pinned = pinned
        layers, heads, dim = shape.num_layers, shape.kv_heads, shape.head_dim
        size = (0, heads, config.block_size, dim // 4)
        self._codes = [torch.zeros(size, dtype=torch.uint8, device=shape.device) for _ in range(layers)]
        plain = torch.zeros((0, heads, 2, dim), dtype=torch.float16, device=shape.device)
        self._bounds, self._ranges = empty_bounds(shape) if int4_scales else ([plain] * layers, [])

    @property
    def bytes_per_token(self) -> float:
        dim = self.shape.head_dim
        bounds = int4_bounds_bytes(self.shape) if self._int4 else 2 * dim * torch.float16.itemsize
        return dim / 4 + bounds / self.config.block_size

    def reserve(self, num_pages: int) -> None:
        self._codes = [self._grown(codes, num_pages) for codes in self._codes]
        self._bounds = [self._grown(bounds, num_pages) for bounds in self._bounds]
        self._ranges = [self._grown(ranges, num_pages) for ranges in self._ranges]

    def _grown(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        longer = grown(tensor, rows)
        return longer.pin_memory() if self._pinned and longer is not tensor else longer

    def write(self, layer: int, pages: torch.Tensor, keys: torch.Tensor) -> None:
        if self._int4:
            ops.minmax4_write(self._bounds[layer], self._ranges[layer], pages, keys, False)
            bounds = ops.minmax4_read(self._bounds[layer], self._ranges[layer], pages)
        else:
            ops.minmax_write(self._bounds[layer], pages, keys.clamp(-_LARGEST, _LARGEST))
            bounds = self._bounds[layer][pages].float()
        ops.bit2_write(self._codes[layer], pages, keys, bounds)

    def score(self, layer: int, queries: torch.Tensor, pages: torch.Tensor, scale: float) -> torch.Tensor:
        return self.score_per_head(layer, queries, pages[:, None].expand(-1, self.shape.kv_heads, -1), scale)

    def score_per_head(self, layer: int, queries: torch.Tensor, pages: torch.Tensor, scale: float) -> torch.Tensor:
        """`score` for pages `(num_sequences, kv_heads, num_blocks)` that differ between heads."""
        heads = self.shape.kv_heads
        slots = torch.where(pages >= 0, pages * heads + torch.arange(heads, device=pages.device)[:, None], EMPTY)
        bounds = self._bounds[layer].flatten(0, 1)
        if self._int4:
            bounds = ops.minmax4_read(bounds, self._ranges[layer].flatten(0, 1), slots)
        else:
            bounds = bounds[slots.clamp(min=0)].float()
        return ops.bit2_score(self._codes[layer].flatten(0, 1), slots, bounds, queries, scale)

    def device_bytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in (*self._codes, *self._bounds, *self._ranges))
