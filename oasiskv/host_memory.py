"""Slots in host memory: one contiguous range of address space per layer, taken from the system as it is written.

With a CUDA device what is used is registered (page-locked) a chunk at a time, which avoids the power-of-two rounding of pinned
allocators, and bound to the GPU's NUMA node.
"""

from __future__ import annotations

import math
import mmap
import os

import torch

from . import huge_pages, numa
from .errors import ArenaExhausted, ConfigError
from .types import ModelShape

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_RETURNED_BYTES = 1 << 20
"""From here on `returned_memory` goes past `malloc`."""

_REGISTER_BYTES = 64 << 20
"""Host memory that is page-locked at a time, over all layers."""


def physical_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host; no copy."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def returned_memory(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor whose memory goes back to the system with it. What `malloc` is given back, of some megabytes and
    in varying sizes, it keeps for the most part."""
    count = math.prod(size) * dtype.itemsize
    if count < _RETURNED_BYTES:
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype).view(size)


class HostMemory:
    """`layers[l]` is `(num_slots, 2, block_size, head_dim)`."""

    def __init__(self, shape: ModelShape, block_size: int, num_slots: int) -> None:
        self._slot_bytes = shape.slot_bytes(block_size)
        layer_bytes = num_slots * self._slot_bytes
        node = numa.node_of(shape.device) if shape.device.type == "cuda" else None
        self._pinned = shape.device.type == "cuda"
        self._registered = [0] * shape.num_layers
        self._register_bytes = max(1 << 20, _REGISTER_BYTES // shape.num_layers // (1 << 20) * (1 << 20))
        self.layers: list[torch.Tensor] = []
        for _ in range(shape.num_layers):
            try:
                region = huge_pages.reserve(layer_bytes, _MAP_NORESERVE)
            except (OSError, ValueError, OverflowError) as error:
                raise ConfigError(
                    f"arena_bytes is {layer_bytes * shape.num_layers}, and reserving {layer_bytes} bytes of address space per "
                    f"layer failed ({error}); set arena_bytes to what the sequences need"
                ) from error
            if node is not None:
                numa.bind(region, node)
            flat = huge_pages.tensor_of(region, layer_bytes, shape.dtype)
            self.layers.append(flat.view(num_slots, 2, block_size, shape.head_dim))

    def pin(self, num_slots: int) -> None:
        """Register the first `num_slots` of every layer, with a CUDA device. Raises `ArenaExhausted`."""
        if not self._pinned:
            return
        cudart = torch.cuda.cudart()
        wanted = num_slots * self._slot_bytes
        for layer, tensor in enumerate(self.layers):
            while self._registered[layer] < wanted:
                start = self._registered[layer]
                size = min(self._register_bytes, tensor.numel() * tensor.itemsize - start)
                error = int(cudart.cudaHostRegister(tensor.data_ptr() + start, size, 0))
                if error:
                    raise ArenaExhausted(
                        f"page-locking {size} bytes of the arena failed with CUDA error {error}; lower arena_bytes"
                    )
                self._registered[layer] = start + size

    def close(self) -> None:
        """Give everything back to the system."""
        if self._pinned:
            cudart = torch.cuda.cudart()
            for layer, tensor in enumerate(self.layers):
                for start in range(0, self._registered[layer], self._register_bytes):
                    cudart.cudaHostUnregister(tensor.data_ptr() + start)
                self._registered[layer] = 0
        self.layers = []
