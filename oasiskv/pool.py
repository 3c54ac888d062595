"""Pools of the device: slots in one tensor, handed out in strips."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from . import huge_pages
from .errors import ConfigError, PoolExhausted
from .types import EMPTY, ModelShape
from .uncopied import Uncopied


class Pool(Uncopied, ABC):
    """Slots on the device. A *strip* is one slot for every kv head in every layer. Sequences hold strips; which block of which
    layer and head lies in a strip's slots is the working set's business.

    Attributes:
        slots: `(num_slots, 2, block_size, head_dim)`.
        num_strips: that there are, free or not.
    """

    num_strips: int

    lent = False
    """Whether the memory is somebody else's, who lends strips to sequences."""

    def __init__(self, shape: ModelShape, block_size: int, slots: torch.Tensor) -> None:
        self.shape = shape
        self.block_size = block_size
        self.slots = slots

    @property
    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes of memory that the pool itself has taken."""

    @property
    def free_strips(self) -> int:
        """Strips that `allocate` can give without growing."""
        return 0

    @abstractmethod
    def can_allocate(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed."""

    @abstractmethod
    def allocate(self, count: int) -> list[int]:
        """Take `count` strips, all or none."""

    @abstractmethod
    def release(self, strips: list[int]) -> None:
        """Give strips back."""

    @abstractmethod
    def slots_of(self, strips: torch.Tensor) -> torch.Tensor:
        """The slots of strips in each layer and kv head, `(layers, kv_heads)` in front of their dimensions; those of `EMPTY`
        mean nothing."""

    def close(self) -> None:
        """Give the memory back."""
        self.slots = self.slots[:0]


class OwnPool(Pool):
    """A pool with memory of its own. Strip `i` is the slots `i * layers * kv_heads ...`, layer by layer."""

    def __init__(self, shape: ModelShape, block_size: int, limit_bytes: int | None, poison: bool) -> None:
        self.strip_slots = shape.num_layers * shape.kv_heads
        self.strip_bytes = self.strip_slots * shape.slot_bytes(block_size)
        self._poison = poison
        self._limit = limit_bytes
        self._free: list[int] = []
        self.num_strips = 0
        super().__init__(shape, block_size, torch.empty(0))
        self.slots = self._empty(0)
        if limit_bytes is not None:
            if limit_bytes < self.strip_bytes:
                raise ConfigError(
                    f"pool_bytes is {limit_bytes}, less than one block over all layers and kv heads: {self.strip_bytes} bytes"
                )
            self._grow(limit_bytes // self.strip_bytes)

    def _empty(self, strips: int) -> torch.Tensor:
        size = (strips * self.strip_slots, 2, self.block_size, self.shape.head_dim)
        fill = float("nan") if self._poison else 0.0
        return huge_pages.full(size, fill, self.shape.dtype, self.shape.device)

    def _grow(self, strips: int) -> None:
        new = self._empty(strips)
        new[: self.slots.shape[0]] = self.slots
        self.slots = new
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
        """Bytes of the pool's tensor."""
        return self.slots.numel() * self.slots.itemsize

    def can_allocate(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed."""
        return self._limit is None or count <= self.free_strips

    def allocate(self, count: int) -> list[int]:
        """Take `count` strips, all or none. Grows the pool when it has no set size. Raises `PoolExhausted`.

        The caller makes sure that no background work runs: growing replaces the tensor, and while it copies there are two.
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
        if self._poison:
            for strip in strips:
                self.slots[strip * self.strip_slots : (strip + 1) * self.strip_slots] = float("nan")

    def slots_of(self, strips: torch.Tensor) -> torch.Tensor:
        """The slots of strips in each layer and kv head, `(layers, kv_heads)` in front of their dimensions; those of `EMPTY`
        mean nothing."""
        offset = torch.arange(self.strip_slots, device=strips.device)
        offset = offset.view(self.shape.num_layers, self.shape.kv_heads, *[1] * strips.ndim)
        return strips * self.strip_slots + offset

    def moved(self, slots: torch.Tensor, source: list[int], target: list[int]) -> torch.Tensor:
        """The slots that lie in the strips `target` where `slots` lie in the strips `source`; `EMPTY` stays `EMPTY`."""
        lookup = torch.full((self.num_strips + 1,), EMPTY, dtype=torch.int64, device=slots.device)
        lookup[source] = torch.tensor(target, dtype=torch.int64, device=slots.device)
        moved = lookup[slots // self.strip_slots] * self.strip_slots + slots % self.strip_slots
        return torch.where(slots >= 0, moved, EMPTY)

    def close(self) -> None:
        """Give the memory back."""
        self.slots = self._empty(0)
