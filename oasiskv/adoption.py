"""Sequences that another engine begins: it computes their keys and values, and lends memory when OasisKV is to attend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from . import layout
from .change import Change
from .errors import ArenaExhausted, InputError, StateError
from .finite import all_finite, finite_rows
from .lent_pool import LentPool
from .sequence import Phase, Sequence

if TYPE_CHECKING:
    from .manager import KVManager

_LEAST_OBSERVED, _MOST_SKIPPED = 64, 8
"""The summary observes one query in `_MOST_SKIPPED` of a long piece of a prompt, but so many at least if there are: it learns
which directions queries have, which a sample tells as well as all of them at an eighth of the time."""


class Adoption:
    """Sealed blocks on their way into the arena, made by `KVManager.adopt`. `write` every layer once, in any order and from any
    thread, then `commit`, where calls of the manager come from; until then the sequence knows nothing of them.

    Attributes:
        sequence: that the blocks are to belong to.
        pages: of the arena, that it holds for them; none after `commit` and `abort`.
    """

    def __init__(self, manager: KVManager, sequence: Sequence, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InputError(f"num_blocks is {num_blocks}; adopt at least 1 block")
        _require_bare(manager, sequence)
        self._manager = manager
        self.sequence = sequence
        self._before = list(sequence.pages)
        self.pages = _allocate(manager, num_blocks)
        self._num_blocks = num_blocks
        self._index = torch.tensor(self.pages, dtype=torch.int64)
        self._missing = set(range(manager.shape.num_layers))
        self._writing: set[int] = set()
        self._finite = True
        self._quiet = threading.Condition()

    def write(self, layer: int, blocks: torch.Tensor) -> None:
        """Copy the blocks of one layer, `(num_blocks, kv_heads, 2, block_size, head_dim)`: keys after rotary embedding, then
        values. Raises `InputError` for another shape or dtype, and `StateError` for a layer that was written or does not exist,
        and after `commit` or `abort`."""
        shape = self._manager.shape
        wanted = (self._num_blocks, shape.kv_heads, 2, self._manager.config.block_size, shape.head_dim)
        if tuple(blocks.shape) != wanted or blocks.dtype != shape.dtype:
            raise InputError(f"blocks are {blocks.dtype} {tuple(blocks.shape)}; these must be {shape.dtype} {wanted}")
        with self._quiet:
            self._check_open()
            if layer not in self._missing or layer in self._writing:
                raise StateError(f"layer {layer} is written already, or there is no such layer; write each of them once")
            self._writing.add(layer)
        written = False
        try:
            self._manager.rooms.arena.write(layer, self._index, blocks)
            if layer == shape.num_layers - 1:
                self._finite = all_finite(blocks)
            written = True
        finally:
            with self._quiet:
                self._writing.discard(layer)
                if written:
                    self._missing.discard(layer)
                self._quiet.notify_all()

    def commit(self) -> None:
        """The blocks belong to the sequence. Raises `StateError` if a layer is missing, or the sequence has changed
        meanwhile."""
        sequence, rooms = self.sequence, self._manager.rooms
        with self._quiet:
            self._check_open()
            if self._missing:
                raise StateError(f"layers {sorted(self._missing)} are not written")
        if sequence.phase is not Phase.UNSETTLED or sequence.strips or sequence.pages != self._before:
            raise StateError("the sequence has grown, was cropped or was lent strips since it began to adopt blocks; abort")
        with Change(self._manager, "adopt", [sequence]):
            pages = self._let_go()
            sequence.pages.extend(pages)
            rooms.sets.set_pages(sequence.row, len(self._before), pages)
            rooms.arena.sealed(sequence.pages, len(self._before))
            sequence.length = len(sequence.pages) * rooms.config.block_size
            sequence.finite &= self._finite
        rooms.counters.add(stored_blocks=len(pages) * rooms.shape.kv_heads * rooms.shape.num_layers)

    def abort(self) -> None:
        """Forget the blocks; waits for a `write` in another thread. Idempotent, also after `commit`."""
        with Change(self._manager, "abort"):
            self._manager.rooms.arena.release(self._let_go())

    def _let_go(self) -> list[int]:
        with self._quiet:
            pages, self.pages = self.pages, []
            while self._writing:
                self._quiet.wait()
        if pages:
            self._manager.adoptions.remove(self)
        return pages

    def _check_open(self) -> None:
        if not self.pages:
            raise StateError("the blocks were committed or aborted; adopt them anew")


def _allocate(manager: KVManager, count: int) -> list[int]:
    """Pages for blocks. A host may adopt for long and begin no step: then what the last steps have used makes room, too."""
    arena, device = manager.rooms.arena, manager.shape.device
    if not arena.tiered or manager.open_step is not None:
        return arena.allocate(count)
    with suppress(ArenaExhausted), arena.impatient():
        return arena.allocate(count)
    manager.drain()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    arena.rest()
    return arena.allocate(count)


def lend(manager: KVManager, sequence: Sequence, strips: list[int], tail: torch.Tensor | None, tail_tokens: int) -> None:
    """See `KVManager.lend`."""
    rooms, config = manager.rooms, manager.config
    pool = _require_bare(manager, sequence)
    if len(strips) != config.budget_blocks:
        raise InputError(f"{len(strips)} strips are lent; a sequence needs {config.budget_blocks}: budget_tokens / block_size")
    if not 0 <= tail_tokens < config.block_size or (tail is None) != (tail_tokens == 0):
        raise InputError(f"tail_tokens is {tail_tokens}; pass 1 to {config.block_size - 1} with a tail, and 0 without one")
    shape = manager.shape
    wanted = (shape.num_layers, shape.kv_heads, 2, config.block_size, shape.head_dim)
    if tail is not None and (tuple(tail.shape) != wanted or tail.dtype != shape.dtype):
        raise InputError(f"tail is {tail.dtype} {tuple(tail.shape)}; it must be {shape.dtype} {wanted}")
    pool.check_free(strips)
    manager.drain()
    with Change(manager, "lend", [sequence]):
        pool.take(strips)
        sequence.strips = list(strips)
        rooms.sets.set_strips(sequence.row, sequence.strips)
        sequence.length += tail_tokens
        contents = [None] * manager.shape.num_layers if tail is None else list(tail)
        layout.lay_out(rooms, sequence, contents)


def reclaim(manager: KVManager, sequence: Sequence) -> None:
    """See `KVManager.reclaim`."""
    if not sequence.strips:
        return
    try:
        manager.drain()
    finally:  # the host has the memory back, whatever the background work came to
        with Change(manager, "reclaim", [sequence]):
            layout.become_unsettled(manager.rooms, sequence)
            gone, sequence.strips = sequence.strips, []
            manager.rooms.sets.set_strips(sequence.row, [])
            manager.rooms.pool.release(gone)
            sequence.length = len(sequence.pages) * manager.config.block_size


def branch(manager: KVManager, sequence: Sequence, length: int, create: Callable[[], Sequence]) -> Sequence:
    """See `KVManager.branch`; `create` makes an empty sequence."""
    rooms, size = manager.rooms, manager.config.block_size
    if not rooms.pool.lent:
        raise StateError("this manager has a pool of its own; use fork, and crop")
    if length % size or not 0 <= length <= len(sequence.pages) * size:
        raise InputError(
            f"length is {length}; a branch takes whole blocks of {size}, up to {len(sequence.pages) * size} tokens"
        )
    child = create()
    child.pages = sequence.pages[: length // size]
    child.length = length
    child.summarised = min(sequence.summarised, len(child.pages))
    child.acceptance, child.finite = sequence.acceptance, sequence.finite
    rooms.arena.share(child.pages)
    rooms.sets.set_pages(child.row, 0, child.pages)
    for recent in rooms.sets.recent:
        recent[child.row] = recent[sequence.row]
    rooms.predictor.copy_row(sequence.row, child.row)
    return child


def observe(
    manager: KVManager,
    layer: int,
    sequences: Sequences[Sequence],
    queries: torch.Tensor,
    counts: list[int],
    first_positions: list[int],
) -> None:
    """See `KVManager.observe`."""
    rooms, start = manager.rooms, 0
    for sequence, count, first in zip(sequences, counts, first_positions, strict=True):
        own = queries[start : start + count]
        start += count
        if count > 1:  # a prompt; what decodes in between would add little, and its layers wait for it
            every = min(max(1, count // _LEAST_OBSERVED), _MOST_SKIPPED)
            sample = own[::every]
            rooms.summary.observe(layer, finite_rows(sample), torch.arange(first, first + count, every, device=own.device))
        rooms.sets.remember_queries(layer, torch.full((1,), sequence.row, device=own.device), own[None])


def _require_bare(manager: KVManager, sequence: Sequence) -> LentPool:
    """A sequence that somebody else attends to holds no strips, and whole blocks only. Returns the pool that lends them."""
    pool = manager.rooms.pool
    if not isinstance(pool, LentPool):
        raise StateError("this manager has a pool of its own; only one with a LentPool adopts blocks and borrows strips")
    if sequence.strips or sequence.phase is not Phase.UNSETTLED:
        raise StateError("the sequence holds lent strips; reclaim them first")
    return pool
