"""vLLM's KV cache tensors seen from outside: as slots of ours, and as keys and values in whatever order its kernels keep
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from oasiskv.errors import ConfigError

_DIGIT = 64
"""Base of the numbers that mark places: exact in every dtype of a KV cache."""

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""`write(keys, values, cache, slot_mapping)` stores tokens the way the attention backend does."""


def storage_of(cache: torch.Tensor) -> torch.Tensor:
    """All of the memory behind a KV cache tensor, in its dtype, flat."""
    everything = torch.empty(0, dtype=cache.dtype, device=cache.device)
    return everything.set_(cache.untyped_storage())


def check_layout(name: str, cache: torch.Tensor, block_size: int) -> None:
    """Raises `ConfigError` unless a cache is `(blocks, kv_heads, block_size, 2 * head_dim)` with every block of a layer in one
    piece, and nothing between them that is not a number of heads."""
    if cache.ndim == 4:
        _, _, tokens, content = cache.shape
        head = tokens * content
        if tokens != block_size:
            raise ConfigError(
                f"the kernels of layer {name} want blocks of {tokens} tokens, and the scheduler's have {block_size}: "
                f"--block-size {tokens}"
            )
        if cache.stride()[1:] == (head, content, 1) and cache.stride(0) % head == cache.storage_offset() % head == 0:
            return
    raise ConfigError(
        f"the KV cache of layer {name} has shape {tuple(cache.shape)} and strides {cache.stride()}; OasisKV needs blocks of "
        "(kv_heads, tokens, 2 * head_dim) in one piece. Set VLLM_KV_CACHE_LAYOUT=LBHNC"
    )


class BlockReader:
    """Reads blocks of a layer as keys and values.

    Kernels keep the tokens of a block as they like: transposed, packed in pairs. Which element lies where is learned once, by
        storing numbered tokens into a scratch block.

    Args:
        cache: `(blocks, kv_heads, tokens, 2 * head_dim)`, of any layer; only its shape and dtype matter.
        write: stores tokens as the backend does, without scaling.
        block_size: tokens of a block of ours, a divisor of the device block's.
    """

    def __init__(self, cache: torch.Tensor, write: Write, block_size: int) -> None:
        _, self._heads, self._tokens, content = cache.shape
        self._head_dim = content // 2
        self._block_size = block_size
        self._order = self._learn(cache, write)
        halves = [_Places.of(half.view(self._tokens, self._head_dim)) for half in self._order.chunk(2)]
        self._places = [half for half in halves if half is not None]

    def _learn(self, cache: torch.Tensor, write: Write) -> torch.Tensor:
        """Where in a block of one head the elements of `(key or value, token, channel)` lie."""
        shape = (2, self._tokens, self._head_dim)
        count = 2 * self._tokens * self._head_dim
        numbers = torch.arange(count, device=cache.device)
        scratch = torch.zeros((2, *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
        mapping = torch.arange(self._tokens, 2 * self._tokens, device=cache.device)
        found = torch.zeros((self._heads, count), dtype=torch.int64, device=cache.device)
        unit = 1
        while unit < count:
            digits = (numbers // unit % _DIGIT).view(shape).to(cache.dtype)
            both = digits[:, :, None].expand(2, self._tokens, self._heads, self._head_dim).contiguous()
            write(both[0], both[1], scratch, mapping)
            found += scratch[1].reshape(self._heads, -1).round().long() * unit
            unit *= _DIGIT
        if not (found.sort(dim=1).values == numbers).all() or not (found == found[0]).all():
            raise ConfigError(
                f"the attention backend keeps blocks of {self._tokens} tokens, {self._heads} kv heads and {cache.dtype} in a "
                "way that OasisKV cannot read; use another --block-size or --kv-cache-dtype auto"
            )
        return found[0].argsort()

    def read(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Device blocks as blocks of ours, `(len(blocks) * r, kv_heads, 2, block_size, head_dim)` with `r` of them in each."""
        count, parts, size = len(blocks), self._tokens // self._block_size, self._block_size
        raw = cache[blocks.to(cache.device)]
        if len(self._places) == 2:
            both = raw.new_empty((count, parts, self._heads, 2, size, self._head_dim))
            for half, places in enumerate(self._places):
                both[:, :, :, half] = places.view(raw, parts)
        else:
            ordered = raw.flatten(2).index_select(2, self._order)
            both = ordered.view(count, self._heads, 2, parts, size, self._head_dim).permute(0, 3, 1, 2, 4, 5)
        return both.reshape(count * parts, self._heads, 2, size, self._head_dim)


@dataclass(frozen=True)
class _Places:
    """Where the keys, or the values, of a block of one head lie, if that is regular: a copy along strides is many times faster
    than one that looks up every element.

    Attributes:
        first: place of the first channel of the first token.
        token: from a token to the next one.
        run: channels that make up a run; `channel` is from one to the next within a run, `next_run` from run to run.
    """

    first: int
    token: int
    run: int
    channel: int
    next_run: int

    @staticmethod
    def of(places: torch.Tensor) -> _Places | None:
        """The rule behind places `(tokens, head_dim)`; `None` if there is none of this kind."""
        tokens, head_dim = places.shape
        for run in (head_dim, 1, 2, 4):  # whole tokens, single channels, or the few that matrix instructions take together
            if head_dim % run:
                continue
            split = places.view(tokens, head_dim // run, run)
            first, token, next_run, channel = (
                int(split[0, 0, 0]),
                _step(split[:, 0, 0]),
                _step(split[0, :, 0]),
                _step(split[0, 0]),
            )
            counts = [torch.arange(size, device=places.device) for size in split.shape]
            rule = first + counts[0][:, None, None] * token + counts[1][:, None] * next_run + counts[2] * channel
            if torch.equal(rule, split):
                return _Places(first, token, run, channel, next_run)
        return None

    def view(self, raw: torch.Tensor, parts: int) -> torch.Tensor:
        """The keys, or values, in contiguous device blocks `(n, kv_heads, tokens, 2 * head_dim)`, each in `parts`: `(n, parts,
        kv_heads, tokens / parts, head_dim)`."""
        count, heads, tokens, content = raw.shape
        size, head_dim = tokens // parts, content // 2
        runs = (head_dim // self.run, self.run)
        head = tokens * content
        strides = (heads * head, size * self.token, head, self.token, self.next_run, self.channel)
        found = raw.as_strided((count, parts, heads, size, *runs), strides, raw.storage_offset() + self.first)
        return found.flatten(-2)


def _step(places: torch.Tensor) -> int:
    return int(places[1] - places[0]) if len(places) > 1 else 0
