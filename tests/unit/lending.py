"""A serving engine made of little: it owns memory, lends blocks of it, and overwrites those that it has back."""

from __future__ import annotations

import torch

from oasiskv import KVManager
from oasiskv.lent_pool import LentPool

from .driver import SHAPE, Driver, Part, Rows, tiny


def host_pool(blocks=30, parts=1, gap=1, size=4, shape=SHAPE):
    """A pool over memory full of NaN, with `gap` slots between the layers."""
    per_block = shape.kv_heads * parts
    stride = blocks * per_block + gap
    slots = torch.full((shape.num_layers * stride, 2, size, shape.head_dim), float("nan"), dtype=shape.dtype)
    first = [layer * stride for layer in range(shape.num_layers)]
    return LentPool(shape, size, slots, first, blocks, per_block, parts * size)


class Host(Driver):
    """A driver of a manager in a lent pool. Prompts are computed here, and adopted."""

    def __init__(self, config=None, blocks=30, parts=1, seed=0, **changes):
        self.config = config or tiny(**changes)
        self.pool = host_pool(blocks, parts)
        self.parts = parts
        self.free_blocks = list(range(blocks - 1, -1, -1))
        self.lent = {}
        super().__init__(KVManager(SHAPE, self.config, pool=self.pool), seed)

    def blocks_of(self, rows, start, end):
        """Blocks `start` to `end` of rows, `(layers, n, kv_heads, 2, size, head_dim)`, filled up with NaN."""
        size = self.config.block_size
        both = torch.stack([rows.keys, rows.values], 3)[:, start * size : end * size]
        layers, tokens, heads, _, dim = both.shape
        full = both.new_full((layers, (end - start) * size, heads, 2, dim), float("nan"))
        full[:, :tokens] = both
        return full.view(layers, end - start, size, heads, 2, dim).permute(0, 1, 3, 4, 2, 5)

    def begun(self, tokens):
        """A sequence whose prompt the host has computed. Without strips: its tail is with the host, as `tails`."""
        sequence = self.create()
        rows = self.draw(tokens)
        self.observe(sequence, rows, 0)
        tail = self.adopt(sequence, rows)
        return sequence, tail

    def observe(self, sequence, rows, first, pieces=1):
        for layer in range(self.shape.num_layers):
            start = first
            for piece in rows.queries[layer].chunk(pieces):
                self.manager.observe(layer, [sequence], piece, [len(piece)], [start])
                start += len(piece)

    def adopt(self, sequence, rows):
        """Hand the whole blocks over; returns the rows that are left."""
        size = self.config.block_size
        full = rows.keys.shape[1] // size
        if full:
            adoption = self.manager.adopt(sequence, full)
            blocks = self.blocks_of(rows, 0, full)
            for layer in reversed(range(self.shape.num_layers)):
                adoption.write(layer, blocks[layer])
            adoption.commit()
            self.remember(Part(sequence, full * size, rows=rows))
        return Rows(*(part[:, full * size :] for part in rows))

    @property
    def lendable(self):
        return len(self.free_blocks) * self.parts >= self.config.budget_blocks

    def lend(self, sequence, tail=None):
        count = -(-self.config.budget_blocks // self.parts)
        blocks = [self.free_blocks.pop() for _ in range(count)]
        self.lent[sequence] = blocks
        strips = self.pool.strips_of(blocks)[: self.config.budget_blocks]
        tokens = 0 if tail is None else tail.keys.shape[1]
        content = self.blocks_of(tail, 0, 1)[:, 0] if tokens else None
        self.manager.lend(sequence, strips, content, tokens)
        if tokens:
            self.remember(Part(sequence, tokens, rows=tail))

    def started(self, tokens):
        sequence, tail = self.begun(tokens)
        self.lend(sequence, tail)
        return sequence

    def overwrite(self, blocks):
        strips = torch.tensor(self.pool.strips_of(blocks), dtype=torch.int64)
        self.pool.slots[self.pool.slots_of(strips).flatten()] = float("nan")

    def take_back(self, sequence):
        blocks = self.lent.pop(sequence, [])
        self.overwrite(blocks)  # the engine does not wait
        self.free_blocks.extend(blocks)

    def reclaim(self, sequence):
        self.manager.drain()
        self.take_back(sequence)
        self.manager.reclaim(sequence)
        self.texts[sequence] = tuple(tensor[:, : sequence.length] for tensor in self.texts[sequence])

    def branch(self, sequence, length):
        child = self.manager.branch(sequence, length)
        self.texts[child] = tuple(tensor[:, :length] for tensor in self.texts[sequence])
        return child

    def free(self, sequence):
        self.manager.drain()
        self.take_back(sequence)
        super().free(sequence)

    def check(self):
        """As the base; and what is not lent is not touched."""
        super().check()
        if self.free_blocks:
            strips = torch.tensor(self.pool.strips_of(self.free_blocks), dtype=torch.int64)
            assert self.pool.slots[self.pool.slots_of(strips).flatten()].isnan().all()
