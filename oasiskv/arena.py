"""The host arena: every sealed block of every sequence, in the pool's slot layout.

The whole capacity is reserved as address space; memory is taken page by page as blocks are written, so the arena costs what it
holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from . import ops
from .errors import ArenaExhausted, ConfigError
from .host_memory import HostMemory, physical_bytes, returned_memory
from .types import EMPTY, ModelShape
from .uncopied import Uncopied

if TYPE_CHECKING:
    from .tiers.metered import MeteredStore


class SlotLease:
    """Slots of the arena that keep what they hold until `end`, or until nobody has the lease any more.

    Attributes:
        slots: where the blocks are, `EMPTY` for those that cannot be had.
    """

    def __init__(self, slots: torch.Tensor, give_back: Callable[[], None] = lambda: None) -> None:
        self.slots = slots
        self._give_back: Callable[[], None] | None = give_back

    def end(self) -> None:
        """The slots may be used for other blocks. Idempotent."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def __del__(self) -> None:
        self.end()  # the work that had it failed, or was cancelled


class Arena(Uncopied):
    """Pages of slots in host memory. Page `p` is one block: slots `p * kv_heads .. (p + 1) * kv_heads - 1` of every layer.

    Pages are counted by reference, so that forks share sealed blocks.
    """

    tiered = False
    """Whether blocks may be elsewhere, so that `locate` may have to bring them in."""

    exact = True
    """Whether they come back bit for bit."""

    meters: Sequence[MeteredStore] = ()
    """Counts of the tier stores below."""

    def __init__(self, shape: ModelShape, block_size: int, limit_bytes: int | None) -> None:
        self.shape = shape
        self.block_size = block_size
        self.page_bytes = shape.num_layers * shape.kv_heads * shape.slot_bytes(block_size)
        limit = limit_bytes if limit_bytes is not None else physical_bytes()
        self.num_pages = limit // self.page_bytes
        if self.num_pages < 1:
            raise ConfigError(
                f"arena_bytes is {limit}, less than one block over all layers and kv heads: {self.page_bytes} bytes"
            )
        self._memory = HostMemory(shape, block_size, self.num_pages * shape.kv_heads)
        self._heads = torch.arange(shape.kv_heads)
        self._free: list[int] = []
        self._high_water = 0
        self._references: dict[int, int] = {}

    @property
    def layers(self) -> list[torch.Tensor]:
        """The memory of each layer, `(num_slots, 2, block_size, head_dim)`."""
        return self._memory.layers

    # Pages

    @property
    def capacity_pages(self) -> int | None:
        """Most pages that sequences can hold at once; `None` if there is no limit."""
        return self.num_pages

    @property
    def used_pages(self) -> int:
        """Pages that some sequence holds."""
        return len(self._references)

    @property
    def used_bytes(self) -> int:
        """Bytes of host memory that hold blocks of some sequence, over all layers."""
        return self.used_pages * self.page_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes of host memory that were ever written: what the process has taken from the system."""
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
            self._memory.pin(self._high_water * self.shape.kv_heads)
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

    def release(self, pages: list[int]) -> list[int]:
        """Count one holder less; a page without holders is free. Returns those that are."""
        freed = []
        for page in pages:
            left = self._references[page] - 1
            if left:
                self._references[page] = left
            else:
                del self._references[page]
                heapq.heappush(self._free, page)
                freed.append(page)
        return freed

    def references(self, page: int) -> int:
        """Holders of a page."""
        return self._references.get(page, 0)

    # Blocks

    def new_slots(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Where the blocks of pages `(n,)` that were allocated and not sealed yet are to be written, `(n, kv_heads)`."""
        return pages[:, None] * self.shape.kv_heads + self._heads.to(pages.device)

    def write(self, layer: int, pages: torch.Tensor, blocks: torch.Tensor) -> None:
        """Fill such pages: `blocks` is `(n, kv_heads, 2, block_size, head_dim)`, on any device."""
        slots = self.new_slots(layer, pages).flatten()
        self.layers[layer][slots] = blocks.flatten(0, 1).to(self.layers[layer].device)

    def sealed(self, pages: list[int], first: int) -> None:
        """The blocks of a sequence, from `first` on, are written in all layers, and belong to it now."""

    def locate(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Where blocks lie: `(S, kv_heads, K)` pages to slots of `layers[layer]`; `EMPTY` stays `EMPTY`, and is the answer for
        a block that cannot be had."""
        slots = pages * self.shape.kv_heads + self._heads.to(pages.device)[:, None]
        return torch.where(pages >= 0, slots, EMPTY)

    def read(self, layer: int, pages: list[int]) -> torch.Tensor:
        """Blocks of all heads, `(n, kv_heads, 2, block_size, head_dim)` on the host. Raises `TierError` where one is lost."""
        by_page = self.layers[layer].view(-1, self.shape.kv_heads, *self.layers[layer].shape[1:])
        blocks = returned_memory((len(pages), *by_page.shape[1:]), self.shape.dtype)
        return torch.index_select(by_page, 0, torch.tensor(pages, dtype=torch.int64), out=blocks)

    def lease(self, layer: int, pages: torch.Tensor) -> SlotLease:
        """As `locate`, of blocks that must stay where they are for a while."""
        return SlotLease(self.locate(layer, pages))

    def table(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Where all blocks of sequences lie now: `(S, N)` pages to slots of `layers[layer]`, `(S, kv_heads, N)`; `EMPTY` for
        those that are elsewhere."""
        return self.locate(layer, pages[:, None].expand(-1, self.shape.kv_heads, -1))

    def copy_to(self, layer: int, pages: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy blocks, `(S, kv_heads, K)` pages, to slots of the pool; pairs with an `EMPTY` are left out. Raises as `read`."""
        ops.copy_blocks(self.layers[layer], pool, self.locate(layer, pages), slots)

    def whole(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory that holds all blocks of `pages`, of any shape, and where in it: page `p` there is slots `p * kv_heads` and
        the following. Raises as `read`."""
        return self.layers[layer], pages

    def begin_step(self) -> None:
        """A step begins."""

    def rest(self) -> None:
        """Nobody reads slots now but under a lease: no step is open, and neither background nor device is at work."""

    def tier_stats(self) -> dict[str, int]:
        """The fields of `Stats` about the tier store."""
        return {}

    def faults(self) -> list[str]:
        """What of the tables does not agree."""
        return []

    def impatient(self) -> AbstractContextManager[None]:
        """Within it, calls of this thread do not wait for a store that is down."""
        return nullcontext()

    def give_up(self) -> None:
        """The manager is about to close: whoever waits for a store that is down waits no longer."""

    def drain(self) -> None:
        """Wait until what is under way to other tiers has arrived, or has failed."""

    def close(self) -> None:
        """Give everything back to the system."""
        self._memory.close()
        self._references.clear()
        self._free.clear()
        self._high_water = 0
