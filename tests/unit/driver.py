"""A tiny model made of random numbers that drives a manager, and remembers every token that the manager must remember."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from oasiskv import KVManager, ModelShape, OasisConfig, Sequence

from . import naive

SHAPE = ModelShape(num_layers=2, query_heads=4, kv_heads=2, head_dim=8)
STRIP_BYTES = PAGE_BYTES = SHAPE.num_layers * SHAPE.kv_heads * SHAPE.slot_bytes(4)


def tiny(**changes) -> OasisConfig:
    """Ten places of four tokens: one of sinks, six of the window ring, three selected."""
    settings = {
        "budget_tokens": 40,
        "block_size": 4,
        "sink_tokens": 4,
        "window_tokens": 4,
        "budget_per": "head",
        "max_new_blocks": 2,
        "correction_blocks": 0,
        "correction_margin": 0.0,
        "swap_margin": 0.0,
        "summary": "minmax",
        "workers": 0,
        "arena_bytes": 400 * PAGE_BYTES,
        "poison_freed": True,
    }
    return OasisConfig(**{**settings, **changes})


class Rows(NamedTuple):
    """Queries `(layers, n, Hq, D)`, keys and values `(layers, n, H, D)` of some tokens."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def first(self, count):
        return Rows(*(part[:, :count] for part in self))


@dataclass
class Part:
    """What one sequence does in a step."""

    sequence: Sequence
    tokens: int
    drafts: int = 0
    accepted: int | None = None
    rows: Rows | None = None
    prompt: bool = False

    @property
    def kept(self):
        return self.tokens if self.accepted is None else self.accepted


def draw_rows(generator, tokens, shape=SHAPE):
    def draw(heads):
        size = (shape.num_layers, tokens, heads, shape.head_dim)
        return torch.randn(size, generator=generator).to(shape.dtype)

    return Rows(draw(shape.query_heads) * 2, draw(shape.kv_heads), draw(shape.kv_heads))


class Driver:
    def __init__(self, manager: KVManager, seed: int = 0) -> None:
        self.manager = manager
        self.shape = manager.shape
        self.generator = torch.Generator().manual_seed(seed)
        self.texts: dict[Sequence, tuple[torch.Tensor, torch.Tensor]] = {}

    def create(self, tokens=0, chunk=1000):
        """A new sequence with a prompt, read `chunk` tokens at a time."""
        sequence = self.manager.create()
        empty = torch.zeros((self.shape.num_layers, 0, self.shape.kv_heads, self.shape.head_dim), dtype=self.shape.dtype)
        self.texts[sequence] = (empty, empty)
        while tokens > 0:
            self.run(Part(sequence, min(chunk, tokens)))
            tokens -= chunk
        return sequence

    def draw(self, tokens):
        return draw_rows(self.generator, tokens, self.shape)

    def begin(self, *parts):
        for part in parts:
            part.rows = part.rows or self.draw(part.tokens)
        drafts = [part.drafts for part in parts] if any(part.drafts for part in parts) else None
        prompt = [part.prompt for part in parts] if any(part.prompt for part in parts) else None
        return self.manager.begin_step([part.sequence for part in parts], [part.tokens for part in parts], drafts, prompt)

    def attend(self, step, layer, *parts):
        return step.attend(layer, *(torch.cat([part.rows[kind][layer] for part in parts]) for kind in range(3)))

    def run(self, *parts, before=None, after=None):
        """One whole step. Returns per part the outputs `(layers, tokens, Hq, D)`."""
        step = self.begin(*parts)
        outputs = []
        for layer in range(self.shape.num_layers):
            if before:
                before(layer)
            outputs.append(self.attend(step, layer, *parts).split([part.tokens for part in parts]))
            if after:
                after(layer)
        step.commit([part.kept for part in parts])
        self.remember(*parts)
        return [torch.stack(rows) for rows in zip(*outputs, strict=True)]

    def remember(self, *parts):
        for part in parts:
            kept = part.rows.first(part.kept)
            keys, values = self.texts[part.sequence]
            self.texts[part.sequence] = (torch.cat([keys, kept.keys], 1), torch.cat([values, kept.values], 1))

    def decode(self, sequence, tokens=1, drafts=0, accepted=None, **hooks):
        return self.run(Part(sequence, tokens, drafts, accepted), **hooks)[0]

    def crop(self, sequence, length):
        self.manager.crop(sequence, length)
        self.texts[sequence] = tuple(tensor[:, :length] for tensor in self.texts[sequence])

    def fork(self, sequence):
        child = self.manager.fork(sequence)
        self.texts[child] = self.texts[sequence]
        return child

    def free(self, sequence):
        self.manager.free(sequence)
        del self.texts[sequence]

    def check(self):
        """The manager is sound, and holds every token of every sequence bit for bit."""
        self.manager.check_integrity()
        assert set(self.manager.sequences) == set(self.texts)
        for sequence, (keys, values) in self.texts.items():
            assert sequence.length == keys.shape[1]
            for layer in range(self.shape.num_layers):
                found_keys, found_values = self.manager.full_kv(sequence, layer)
                assert torch.equal(found_keys, keys[layer].transpose(0, 1))
                assert torch.equal(found_values, values[layer].transpose(0, 1))

    def selected(self, sequence, layer):
        """The selected blocks of each kv head, as sets."""
        table = self.manager.rooms.sets.selected.blocks[layer][sequence.row].tolist()
        return [{block for block in blocks if block >= 0} for blocks in table]

    def full(self, sequence, rows):
        """Full attention of rows that come after what `sequence` holds, `(layers, n, Hq, D)` in float64."""
        return self.restricted(sequence, rows, None)

    def restricted(self, sequence, rows, blocks):
        """Attention over the own rows and the tokens of `blocks[layer][kv_head]` only; `None` means all blocks."""
        past_keys, past_values = self.texts[sequence]
        past, size = past_keys.shape[1], self.manager.config.block_size
        outputs = torch.zeros(rows.queries.shape, dtype=torch.float64)
        for layer in range(self.shape.num_layers):
            for head in range(self.shape.kv_heads):
                group = slice(head * self.shape.group_size, (head + 1) * self.shape.group_size)
                old = [t for t in range(past) if blocks is None or t // size in blocks[layer][head]]
                keys = torch.cat([past_keys[layer, old, head], rows.keys[layer, :, head]])[:, None]
                values = torch.cat([past_values[layer, old, head], rows.values[layer, :, head]])[:, None]
                scale = self.shape.head_dim**-0.5
                outputs[layer, :, group] = naive.causal_attention(rows.queries[layer, :, group], keys, values, len(old), scale)
        return outputs

    def always(self, sequence):
        """Sinks, window and tail: the blocks that a sparse sequence looks at whatever is selected."""
        config = self.manager.config
        tail = sequence.length // config.block_size
        return {*range(config.sink_blocks), *range(max(0, tail - config.window_blocks), tail + 1)}


def close_to(actual, expected, dtype=torch.float32):
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
