"""The blocks that become full with a step: their pages, and their way into the arena and the summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import layout, ops
from .sequence import Phase, Sequence
from .settling import reserve_summaries
from .working_set import place_of

if TYPE_CHECKING:
    from .manager import KVManager


class Sealing:
    """The blocks that `accepted[i]` rows of each sequence seal. Takes their pages, all or none; raises `ArenaExhausted`.

    Attributes:
        new_pages: those of each sequence.
    """

    def __init__(self, manager: KVManager, sequences: list[Sequence], accepted: list[int]) -> None:
        self._rooms = manager.rooms
        arena, config, device = self._rooms.arena, self._rooms.config, self._rooms.shape.device
        counts = [
            (sequence.length + tokens) // config.block_size - len(sequence.pages)
            for sequence, tokens in zip(sequences, accepted, strict=True)
        ]
        pages = arena.allocate(sum(counts))
        reserve_summaries(manager, pages if self._rooms.summary.fitted else [])
        self.new_pages: list[list[int]] = []
        strips: list[int] = []
        digested: list[int] = []
        start = 0
        for sequence, count in zip(sequences, counts, strict=True):
            dense = sequence.phase is Phase.DENSE
            self.new_pages.append(pages[start : start + count])
            for number in range(count):
                if not dense and self._rooms.summary.fitted:
                    digested.append(start + number)
                strips.append(sequence.strips[place_of(config, len(sequence.pages) + number, dense)])
            start += count
        self._count = len(pages)
        self._source = layout.pool_slots(self._rooms, strips)
        self._pages = torch.tensor(pages, dtype=torch.int64, device=device)
        self._digested = torch.tensor(digested, dtype=torch.int64, device=device)

    def seal(self, layer: int) -> None:
        """Copy the blocks to the arena, and digest those of sparse sequences."""
        if not self._count:
            return
        rooms = self._rooms
        pool, source = rooms.pool.slots, self._source[layer]
        ops.copy_blocks(pool, rooms.arena.layers[layer], source, rooms.arena.new_slots(layer, self._pages))
        rooms.counters.add(stored_blocks=self._count * rooms.shape.kv_heads)
        if len(self._digested):
            rooms.summary.write(layer, self._pages[self._digested], pool[source[self._digested]][:, :, 0])

    def release(self) -> None:
        """Give the pages back; the blocks belong to nobody."""
        gone, self.new_pages = self.new_pages, []
        for pages in gone:
            self._rooms.arena.release(pages)
