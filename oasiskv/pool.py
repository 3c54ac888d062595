"""The device pool: a tensor of slots per layer, handed out in strips."""

from __future__ import annotations

import torch

from .errors import ConfigError, PoolExhausted
from .types import ModelShape


class Pool:
    """Slots on the device. A *strip* is one slot for every kv head in every layer: strip `i` is the slots
    `i * kv_heads .. (i + 1) * kv_heads - 1` of each layer's tensor. Sequences hold strips; which block of which head lies in
    a strip's slots is the working set's business, per layer and head.
    """

    def __init__(self, shape: ModelShape, block_size: int, limit_bytes: int | None, poison: bool) -> None:
        self.shape = shape
        self.block_size = block_size
        self.strip_bytes = shape.num_layers * shape.kv_heads * shape.slot_bytes(block_size)
        self._poison = poison
        self._limit = limit_bytes
        self._free: list[int] = []
        self.num_strips = 0
        self.layers = [self._empty(0) for _ in range(shape.num_layers)]
        if limit_bytes is not None:
            if limit_bytes < self.strip_bytes:
                raise ConfigError(
                    f"pool_bytes is {limit_bytes}, less than one block over all layers and kv heads: {self.strip_bytes} bytes"
                )
            self._grow(limit_bytes // self.strip_bytes)

    def _empty(self, strips: int) -> torch.Tensor:
        size = (strips * self.shape.kv_heads, 2, self.block_size, self.shape.head_dim)
        fill = float("nan") if self._poison else 0.0
        return torch.full(size, fill, dtype=self.shape.dtype, device=self.shape.device)

    def _grow(self, strips: int) -> None:
        for layer, old in enumerate(self.layers):
            new = self._empty(strips)
            new[: old.shape[0]] = old
            self.layers[layer] = new
        self._free.extend(range(strips - 1, self.num_strips - 1, -1))
        self.num_strips = strips

    @property
    def free_strips(self) -> int:
        """Strips that `allocate` can give without growing."""
        return len(self._free)

    @property
    def free_list(self) -> tuple[int, ...]:
        """The free strips."""
        return tuple(self._free)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the pool's tensors."""
        return sum(layer.numel() * layer.itemsize for layer in self.layers)

    def can_allocate(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed."""
        return self._limit is None or count <= self.free_strips

    def allocate(self, count: int) -> list[int]:
        """Take `count` strips, all or none. Grows the pool when it has no set size. Raises `PoolExhausted`.

        The caller makes sure that no background work runs: growing replaces the tensors.
        """
        missing = count - self.free_strips
        if missing > 0:
            if self._limit is not None:
                needed = (self.num_strips + missing) * self.strip_bytes
                raise PoolExhausted(
                    f"the pool has {self.free_strips} of {self.num_strips} blocks per head free and needs {count}: pool_bytes "
                    f"must be at least {needed} (now {self._limit}); raise it, lower budget_tokens, or serve fewer sequences"
                )
            self._grow(self.num_strips + missing)
        return [self._free.pop() for _ in range(count)]

    def release(self, strips: list[int]) -> None:
        """Give strips back."""
        self._free.extend(strips)
        if self._poison and strips:
            heads = self.shape.kv_heads
            slots = torch.tensor(strips, device=self.shape.device)[:, None] * heads + torch.arange(
                heads, device=self.shape.device
            )
            for layer in self.layers:
                layer[slots.flatten()] = float("nan")
