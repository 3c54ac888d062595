"""Checks what must hold between any two calls. Costs a pass over all residents: for tests and for hunting a fault."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from .errors import IntegrityError
from .layout import pool_slots, selected_slots, sparse_rows
from .pool import OwnPool, poisoned
from .sequence import Phase, Sequence
from .types import EMPTY
from .working_set import place_of, window_start

if TYPE_CHECKING:
    from .manager import KVManager

_LOSSY_ERROR = 0.5
"""The most that a block of a compressing store may differ by, of its squared norm: int4 differs by 0.01, zeros by 1, another
block by 2."""


def check_integrity(manager: KVManager) -> None:
    """Raise `IntegrityError` unless slots are conserved, tables agree, and every resident block equals its arena copy: bit for
    bit, or as closely as a store that compresses gives it back. With `poison_freed`, every row that counts was written, too.

    Of torn sequences only what they hold is checked. Waits for background work. Not for the middle of a step.
    """
    manager.drain()
    _check_strips(manager)
    _check_pages(manager)
    for sequence in manager.sequences:
        if sequence.torn is None:
            _check_tables(manager, sequence)
            _check_slots(manager, sequence)
            _check_residents(manager, sequence)
            _check_tail(manager, sequence)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise IntegrityError(message)


def _check_strips(manager: KVManager) -> None:
    pool = manager.rooms.pool
    owners = Counter(strip for sequence in manager.sequences for strip in sequence.strips)
    if not isinstance(pool, OwnPool):
        _require(all(count == 1 for count in owners.values()), "a strip was lent to two sequences")
        return
    owners.update(pool.free_list)
    _require(
        owners == Counter(range(pool.num_strips)),
        f"of {pool.num_strips} strips, these have not exactly one owner: "
        f"{[strip for strip in range(pool.num_strips) if owners[strip] != 1]}",
    )
    limit = manager.config.pool_bytes
    _require(limit is None or pool.allocated_bytes <= limit, f"the pool takes {pool.allocated_bytes} of {limit} bytes")


def _check_pages(manager: KVManager) -> None:
    arena = manager.rooms.arena
    faults = arena.faults()
    _require(not faults, f"the arena: {'; '.join(faults)}")
    holders = Counter(page for sequence in manager.sequences for page in sequence.pages)
    holders.update(page for adoption in manager.adoptions for page in adoption.pages)
    for page, count in holders.items():
        _require(arena.references(page) == count, f"page {page} has {count} holders and counts {arena.references(page)}")
    _require(arena.used_pages == len(holders), f"{arena.used_pages} pages are taken and {len(holders)} held")


def _check_tables(manager: KVManager, sequence: Sequence) -> None:
    sets, config = manager.rooms.sets, manager.config
    size = config.block_size
    name = f"sequence in row {sequence.row}, {sequence.phase.value}, {sequence.length} tokens"
    sealed = sequence.length // size
    _require(len(sequence.pages) == sealed, f"{name}: {len(sequence.pages)} pages for {sealed} sealed blocks")
    _require(sets.pages[sequence.row, :sealed].tolist() == sequence.pages, f"{name}: the page table differs")
    strips = sets.strips[sequence.row]
    _require(strips[strips >= 0].tolist() == sequence.strips, f"{name}: the strip table differs")
    if sequence.phase is Phase.DENSE:
        _require(len(sequence.strips) * size >= sequence.length, f"{name}: {len(sequence.strips)} strips are too few")
    elif sequence.strips or not manager.rooms.pool.lent:
        _require(len(sequence.strips) == config.budget_blocks, f"{name}: {len(sequence.strips)} strips, not the budget")
    if sequence.phase is Phase.SPARSE and manager.rooms.summary.fitted:
        _require(sequence.summarised == sealed, f"{name}: {sequence.summarised} of {sealed} sealed blocks are summarised")
    low, high = config.sink_blocks, window_start(config, sequence.length)
    for layer, table in enumerate(sets.selected.blocks):
        for head, blocks in enumerate(table[sequence.row].tolist()):
            chosen = [block for block in blocks if block >= 0]
            _require(len(set(chosen)) == len(chosen), f"{name}: layer {layer}, head {head} lists a block twice: {chosen}")
            _require(
                all(low <= block < high for block in chosen),
                f"{name}: layer {layer}, head {head} lists {chosen}, outside {low} to {high - 1}",
            )


def _check_slots(manager: KVManager, sequence: Sequence) -> None:
    """Every slot for selected blocks is in one place, or free."""
    if sequence.phase is not Phase.SPARSE:
        return
    selected = manager.rooms.sets.selected
    held = Counter(slot for table in selected.slots for slot in table[sequence.row].flatten().tolist() if slot >= 0)
    held.update(selected.free_slots(sequence.row))
    owned = Counter(selected_slots(manager.rooms, sequence.strips).flatten().tolist())
    _require(held == owned, f"sequence in row {sequence.row}: slots of selected blocks were lost or listed twice")
    for layer, (blocks, slots) in enumerate(zip(selected.blocks, selected.slots, strict=True)):
        homeless = (blocks[sequence.row] >= 0) & (slots[sequence.row] < 0)
        _require(not bool(homeless.any()), f"sequence in row {sequence.row}: layer {layer} lists a block without a slot")


def _check_residents(manager: KVManager, sequence: Sequence) -> None:
    config, rooms = manager.config, manager.rooms
    sealed = len(sequence.pages)
    if sequence.phase is Phase.UNSETTLED:
        return
    if sequence.phase is Phase.DENSE:
        blocks = list(range(sealed))
    else:
        blocks = [*range(min(config.sink_blocks, sealed)), *range(window_start(config, sequence.length), sealed)]
    dense = sequence.phase is Phase.DENSE
    places = [place_of(config, block, dense) for block in blocks]
    pool_table = pool_slots(rooms, [sequence.strips[place] for place in places])
    pages = torch.tensor([sequence.pages[block] for block in blocks], dtype=torch.int64, device=rooms.shape.device)
    for layer in range(rooms.shape.num_layers):
        slots, source = pool_table[layer].t(), pages.expand(rooms.shape.kv_heads, -1)
        if sequence.phase is Phase.SPARSE:
            sparse = sparse_rows(rooms, [sequence])
            selected, there = rooms.sets.selected.read(layer, sparse.rows)
            slots, source = torch.cat([slots, there[0]], 1), torch.cat([source, sparse.pages_of(selected)[0]], 1)
        wanted = torch.empty((slots.numel(), *rooms.pool.slots.shape[1:]), dtype=rooms.shape.dtype, device=rooms.shape.device)
        numbers = torch.arange(slots.numel(), device=slots.device).view(slots.shape)
        rooms.arena.copy_to(layer, source[None], wanted, torch.where(slots >= 0, numbers, EMPTY)[None])
        listed = (slots >= 0).flatten()
        held, wanted = rooms.pool.slots[slots.flatten()[listed]], wanted[listed]
        name = f"sequence in row {sequence.row}: a resident block of layer {layer}"
        _require(not bool(poisoned(held).any()), f"{name} was never written")
        if rooms.arena.exact:
            _require(torch.equal(held.view(torch.uint8), wanted.view(torch.uint8)), f"{name} differs from the arena")
        else:  # the pool may have what the arena had before it was compressed
            error, size = ((part.square().sum((1, 2, 3))) for part in (held.double() - wanted.double(), wanted.double()))
            alike = (error <= _LOSSY_ERROR * size) | ~error.isfinite()
            _require(bool(alike.all()), f"{name} has little to do with that in the arena")


def _check_tail(manager: KVManager, sequence: Sequence) -> None:
    """The block that is not sealed is nowhere else, so all that can be said is whether it was written."""
    rooms, size = manager.rooms, manager.config.block_size
    if sequence.strips and sequence.length % size:
        place = place_of(manager.config, sequence.length // size, sequence.phase is Phase.DENSE)
        slots = pool_slots(rooms, [sequence.strips[place]]).flatten()
        unwritten = poisoned(rooms.pool.slots[slots][:, :, : sequence.length % size])
        _require(not bool(unwritten.any()), f"sequence in row {sequence.row}: its tail block was never written")
