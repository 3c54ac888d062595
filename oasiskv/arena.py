"""The host arena: every sealed block of every sequence, in the pool's slot layout.

The whole capacity is reserved as address space, one contiguous range per layer; memory is taken page by page as blocks are
written, so the arena costs what it holds. With a CUDA device what is written is registered (page-locked) a chunk at a time,
which avoids the power-of-two rounding of pinned allocators, and bound to the GPU's NUMA node.
"""

from __future__ import annotations

import heapq
import mmap
import os

import torch

from . import numa
from .errors import ArenaExhausted, ConfigError
from .types import ModelShape

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_REGISTER_BYTES = 64 << 20
"""Host memory that is page-locked at a time, over all layers."""


class Arena:
    """Pages of slots in host memory. Page `p` is one block: slots `p * kv_heads .. (p + 1) * kv_heads - 1` of every layer.

    Pages are counted by reference, so that forks share sealed blocks.
    """

    def __init__(self, shape: ModelShape, block_size: int, limit_bytes: int | None) -> None:
        self.page_bytes = shape.num_layers * shape.kv_heads * shape.slot_bytes(block_size)
        limit = limit_bytes if limit_bytes is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.num_pages = limit // self.page_bytes
        if self.num_pages < 1:
            raise ConfigError(
                f"arena_bytes is {limit}, less than one block over all layers and kv heads: {self.page_bytes} bytes"
            )
        slots = self.num_pages * shape.kv_heads
        layer_bytes = slots * shape.slot_bytes(block_size)
        self._page_layer_bytes = shape.kv_heads * shape.slot_bytes(block_size)
        self._node = numa.node_of(shape.device) if shape.device.type == "cuda" else None
        self._pinned = shape.device.type == "cuda"
        self._registered = [0] * shape.num_layers
        self._register_bytes = max(1 << 20, _REGISTER_BYTES // shape.num_layers // (1 << 20) * (1 << 20))
        self.layers: list[torch.Tensor] = []
        for _ in range(shape.num_layers):
            try:
                region = mmap.mmap(-1, layer_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
            except (OSError, ValueError, OverflowError) as error:
                raise ConfigError(
                    f"arena_bytes is {limit}, and reserving {layer_bytes} bytes of address space per layer failed ({error}); "
                    "set arena_bytes to what the sequences need"
                ) from error
            if self._node is not None:
                numa.bind(region, self._node)
            flat = torch.frombuffer(region, dtype=shape.dtype)
            self.layers.append(flat.view(slots, 2, block_size, shape.head_dim))
        self._free: list[int] = []
        self._high_water = 0
        self._references: dict[int, int] = {}

    @property
    def used_pages(self) -> int:
        """Pages that some sequence holds."""
        return len(self._references)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that some sequence holds, over all layers."""
        return self.used_pages * self.page_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes of the pages that were ever written: what the process has taken from the system."""
        return self._high_water * self.page_bytes

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, all or none, lowest first. Raises `ArenaExhausted`."""
        if count > self.num_pages - self.used_pages:
            needed = (self.used_pages + count) * self.page_bytes
            raise ArenaExhausted(
                f"the arena holds {self.used_pages} blocks and needs {count} more: arena_bytes must be at least {needed} "
                f"(now {self.num_pages * self.page_bytes}); raise it, or free sequences"
            )
        pages = [self._take() for _ in range(count)]
        try:
            self._pin()
        except ArenaExhausted:
            self.release(pages)
            raise
        return pages

    def _take(self) -> int:
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page = self._high_water
            self._high_water += 1
        self._references[page] = 1
        return page

    def share(self, pages: list[int]) -> None:
        """Count one more holder of each page."""
        for page in pages:
            self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        """Count one holder less; a page without holders is free."""
        for page in pages:
            left = self._references[page] - 1
            if left:
                self._references[page] = left
            else:
                del self._references[page]
                heapq.heappush(self._free, page)

    def references(self, page: int) -> int:
        """Holders of a page."""
        return self._references.get(page, 0)

    def _pin(self) -> None:
        """Register what the high-water mark has reached, chunk by chunk, per layer."""
        if not self._pinned:
            return
        cudart = torch.cuda.cudart()
        wanted = self._high_water * self._page_layer_bytes
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
        self._references.clear()
        self._free.clear()
        self._high_water = 0
