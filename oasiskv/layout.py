"""Where the blocks of a sequence lie, and how they get there: reading from arena and pool, and filling the pool's places."""

from __future__ import annotations

import torch

from .refresh import Rooms, SparseRows
from .sequence import Phase, Sequence
from .working_set import place_of, window_start

STAGED_BLOCKS = 512
"""Blocks of one layer that are staged on the device at a time on their way from the arena."""


def pool_slots(rooms: Rooms, strips: list[int]) -> torch.Tensor:
    """Slots of strips for all heads, `(layers, count, kv_heads)`."""
    return rooms.pool.slots_of(torch.tensor(strips, dtype=torch.int64, device=rooms.shape.device)).transpose(1, 2)


def selected_slots(rooms: Rooms, strips: list[int]) -> torch.Tensor:
    """Slots for the selected blocks of a sparse sequence, `(layers, kv_heads, selected_blocks)`; `strips` are all it holds."""
    config = rooms.config
    first = config.budget_blocks - config.selected_blocks
    return pool_slots(rooms, strips[first : config.budget_blocks]).transpose(1, 2)


def sealed(rooms: Rooms, sequence: Sequence, layer: int, start: int, end: int) -> torch.Tensor:
    """Sealed blocks on the device, `(end - start, kv_heads, 2, block_size, head_dim)`."""
    if rooms.shape.device.type == "cuda":
        torch.cuda.current_stream(rooms.shape.device).synchronize()  # the host reads what kernels may yet be sealing
    return rooms.arena.read(layer, sequence.pages[start:end]).to(rooms.shape.device)


def sealed_keys(rooms: Rooms, sequence: Sequence, layer: int, start: int, end: int) -> torch.Tensor:
    """Keys of sealed blocks, `(end - start, kv_heads, block_size, head_dim)`."""
    return sealed(rooms, sequence, layer, start, end)[:, :, 0]


def read_tail(rooms: Rooms, sequence: Sequence, layer: int, length: int) -> torch.Tensor | None:
    """The block that holds token `length`, if some of its tokens are below `length`: `(kv_heads, 2, block_size, head_dim)`.

    It lies in the pool if it is the unsealed tail, and in the arena if a crop reaches into a sealed block.
    """
    size = rooms.config.block_size
    if length % size == 0:
        return None
    block = length // size
    if block < len(sequence.pages) and sequence.phase is not Phase.DENSE:
        return sealed(rooms, sequence, layer, block, block + 1)[0]
    strip = sequence.strips[place_of(rooms.config, block, sequence.phase is Phase.DENSE)]
    return rooms.pool.slots[pool_slots(rooms, [strip])[layer, 0]]


def read_kv(rooms: Rooms, sequence: Sequence, layer: int, spare: int = 0) -> torch.Tensor:
    """As `full_kv`, in one tensor `(2, kv_heads, length + spare, head_dim)` whose last `spare` tokens are for the caller to
    fill. Besides it, a few hundred blocks at most are on the device at a time."""
    size, length, shape = rooms.config.block_size, sequence.length, rooms.shape
    both = torch.empty((2, shape.kv_heads, length + spare, shape.head_dim), dtype=shape.dtype, device=shape.device)
    for start in range(0, len(sequence.pages), STAGED_BLOCKS):
        end = min(start + STAGED_BLOCKS, len(sequence.pages))
        blocks = sealed(rooms, sequence, layer, start, end).permute(2, 1, 0, 3, 4)
        both[:, :, start * size : end * size] = blocks.reshape(2, shape.kv_heads, -1, shape.head_dim)
    tail = read_tail(rooms, sequence, layer, length)
    if tail is not None:
        both[:, :, length - length % size : length] = tail[:, :, : length % size].transpose(0, 1)
    return both


def sparse_rows(rooms: Rooms, sequences: list[Sequence]) -> SparseRows:
    """Tables of sparse sequences, in the order given."""
    sets, device = rooms.sets, rooms.shape.device
    rows = torch.tensor([sequence.row for sequence in sequences], device=device)
    sealed = [len(sequence.pages) for sequence in sequences]
    pages = sets.pages[rows, : max(sealed)]
    return SparseRows(
        rows=rows,
        pages=pages,
        num_blocks=torch.tensor(sealed, device=device),
        arena_slots=None if rooms.arena.tiered else rooms.arena.table(0, pages),
    )


def become_unsettled(rooms: Rooms, sequence: Sequence) -> None:
    """Change the phase and trim the strips to the budget; the caller lays the sequence out anew."""
    _keep_strips(rooms, sequence, rooms.config.budget_blocks)
    rooms.sets.selected.clear(sequence.row)
    sequence.phase = Phase.UNSETTLED


def trim(rooms: Rooms, sequence: Sequence) -> None:
    """Take back the strips of a dense sequence that hold none of its blocks."""
    if sequence.phase is Phase.DENSE:
        _keep_strips(rooms, sequence, -(-sequence.length // rooms.config.block_size))


def _keep_strips(rooms: Rooms, sequence: Sequence, count: int) -> None:
    if len(sequence.strips) > count:
        gone, sequence.strips = sequence.strips[count:], sequence.strips[:count]
        rooms.sets.set_strips(sequence.row, sequence.strips)
        rooms.pool.release(gone)


def lay_out(rooms: Rooms, sequence: Sequence, tail: list[torch.Tensor | None], first: int = 0) -> None:
    """Fill the pool's places of a sequence from the arena and from the tail block, `(kv_heads, 2, block_size, head_dim)`
    per layer. A dense sequence has its blocks before `first` already. No background work may run."""
    config = rooms.config
    size, dense = config.block_size, sequence.phase is Phase.DENSE
    sealed = len(sequence.pages)
    if dense:
        blocks = list(range(first, sealed))
        places = blocks
    elif sequence.phase is Phase.SPARSE:
        window = range(window_start(config, sequence.length), sealed)
        blocks = [*range(min(config.sink_blocks, sealed)), *window]
        places = [place_of(config, block, dense) for block in blocks]
    else:
        blocks, places = [], []
    pool = rooms.pool.slots
    own = torch.tensor([sequence.pages[block] for block in blocks], dtype=torch.int64, device=rooms.shape.device)
    source = own.expand(1, rooms.shape.kv_heads, -1)
    target = pool_slots(rooms, [sequence.strips[place] for place in places])
    tail_place = place_of(config, sequence.length // size, dense)
    tail_target = pool_slots(rooms, sequence.strips[tail_place : tail_place + 1])  # none is held if the tail is empty
    chosen = sparse_rows(rooms, [sequence])
    for layer, content in enumerate(tail):
        rooms.arena.copy_to(layer, source, pool, target[layer].t()[None])
        if sequence.phase is Phase.SPARSE:
            selected, there = rooms.sets.selected.read(layer, chosen.rows)
            rooms.arena.copy_to(layer, chosen.pages_of(selected), pool, there)
        if content is not None:
            pool[tail_target[layer, 0]] = content
