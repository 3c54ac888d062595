"""A pool over memory that somebody else owns, and lends block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import ConfigError, InputError, StateError
from .pool import Pool
from .types import ModelShape


class LentPool(Pool):
    """Slots in the KV cache of a serving engine.

    The engine lends its own blocks, sequence by sequence (`KVManager.lend`). One of them spans all layers and heads, and holds
    one or more strips. In a layer, host block `b` is `kv_heads * r` slots that lie one after another, head by head, with `r =
    host_block_size / block_size`; it begins at slot `layer_slots[layer] + b * host_block_slots`.

    Args:
        slots: `(num_slots, 2, block_size, head_dim)`, all of the engine's memory.
        layer_slots: of every layer, the slot where host block 0 begins.
        num_host_blocks: that the engine has; in every layer they lie within `slots`.
        host_block_slots: slots from one host block of a layer to the next.
        host_block_size: tokens in a host block, a multiple of `block_size`.

    Attributes:
        num_strips: in all host blocks, lent or not.
    """

    lent = True

    def __init__(
        self,
        shape: ModelShape,
        block_size: int,
        slots: torch.Tensor,
        layer_slots: Sequence[int],
        num_host_blocks: int,
        host_block_slots: int,
        host_block_size: int,
    ) -> None:
        wanted = (2, block_size, shape.head_dim)
        if slots.ndim != 4 or tuple(slots.shape[1:]) != wanted or slots.dtype != shape.dtype or not slots.is_contiguous():
            raise ConfigError(
                f"slots is {slots.dtype} {tuple(slots.shape)}; it must be contiguous {shape.dtype} slots of {wanted}: "
                "2, block_size, head_dim"
            )
        if len(layer_slots) != shape.num_layers:
            raise ConfigError(f"layer_slots has {len(layer_slots)} entries for {shape.num_layers} layers; pass one per layer")
        if host_block_size < block_size or host_block_size % block_size:
            raise ConfigError(f"host_block_size is {host_block_size}; it must be a multiple of block_size {block_size}")
        super().__init__(shape, block_size, slots)
        self._parts = host_block_size // block_size
        if host_block_slots < shape.kv_heads * self._parts:
            raise ConfigError(
                f"host_block_slots is {host_block_slots}; a block of {shape.kv_heads} heads takes "
                f"{shape.kv_heads * self._parts} slots"
            )
        self._host_block_slots = host_block_slots
        if num_host_blocks < 1:
            raise ConfigError(f"num_host_blocks is {num_host_blocks}; an engine that lends has at least 1")
        layer = (num_host_blocks - 1) * host_block_slots + shape.kv_heads * self._parts
        if min(layer_slots) < 0 or max(layer_slots) + layer > len(slots):
            raise ConfigError(
                f"layer_slots is {list(layer_slots)}; {num_host_blocks} blocks, which take {layer} slots from there on, must "
                f"lie within {len(slots)} slots"
            )
        self.num_strips = num_host_blocks * self._parts
        self._taken: set[int] = set()
        device = slots.device
        heads = torch.arange(shape.kv_heads, device=device) * self._parts
        self._first = torch.tensor(layer_slots, dtype=torch.int64, device=device)[:, None] + heads

    @property
    def allocated_bytes(self) -> int:
        """None: the memory is the engine's."""
        return 0

    def strips_of(self, host_blocks: Sequence[int]) -> list[int]:
        """The strips in some host blocks."""
        return [block * self._parts + part for block in host_blocks for part in range(self._parts)]

    def can_allocate(self, count: int) -> bool:
        """Whether nothing is wanted: there is nothing to take but what is lent."""
        return count <= 0

    def allocate(self, count: int) -> list[int]:
        """Raises `StateError` if anything is wanted."""
        if count > 0:
            raise StateError("this pool belongs to a serving engine; its blocks come by KVManager.lend")
        return []

    def check_free(self, strips: Sequence[int]) -> None:
        """Raise `InputError` if one of these does not exist, comes twice or is lent."""
        wanted = set(strips)
        if len(wanted) < len(strips) or not all(0 <= strip < self.num_strips for strip in strips):
            raise InputError(f"strips are {list(strips)}; each must be another one of 0 to {self.num_strips - 1}")
        if twice := sorted(wanted & self._taken):
            raise InputError(f"strips {twice} are lent to a sequence already; reclaim them there first")

    def take(self, strips: Sequence[int]) -> None:
        """These are lent now. Raises as `check_free`, and takes none then."""
        self.check_free(strips)
        self._taken.update(strips)

    def release(self, strips: list[int]) -> None:
        """These are not lent any more. Their memory is not touched: it may be others' by now."""
        self._taken.difference_update(strips)

    def recover(self, held: set[int]) -> None:
        """As the base."""
        self._taken = set(held)

    def slots_of(self, strips: torch.Tensor) -> torch.Tensor:
        """As the base."""
        first = self._first.view(*self._first.shape, *[1] * strips.ndim)
        return first + strips // self._parts * self._host_block_slots + strips % self._parts
