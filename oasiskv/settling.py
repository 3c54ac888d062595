"""How a sequence turns sparse: fit the summary, digest the blocks, choose the first working set."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from . import layout, ops
from .abc import KeySample
from .change import Change
from .config import OasisConfig
from .errors import OasisError
from .log import event
from .refresh import LayerIndex
from .sequence import Phase, Sequence
from .types import EMPTY
from .working_set import window_start

if TYPE_CHECKING:
    from .manager import KVManager

Tail = list[torch.Tensor | None]
"""The block of each layer that is not sealed, `(kv_heads, 2, block_size, head_dim)`; `None` where it is empty."""


def settle(manager: KVManager, sequences: list[Sequence]) -> None:
    """Choose and load the first working set of sequences that turn sparse; fit the summary if it has not been.

    Dense sequences are taken over as they are: their sealed blocks are in the arena already. Each holds strips for the budget.

    Raises `TierError` where blocks that must be read are lost. Those that have not settled then stay unsettled.
    """
    manager.drain()
    waiting = [(sequence, _tail(manager, sequence)) for sequence in sequences]
    with Change(manager, "turning sparse", sequences) as change:
        for sequence in sequences:
            layout.become_unsettled(manager.rooms, sequence)
        try:
            _fit(manager, sequences)
            while waiting:
                sequence, tail = waiting[0]
                _summarise(manager, sequence)
                sequence.phase = Phase.SPARSE
                _choose(manager, sequence)
                layout.lay_out(manager.rooms, sequence, tail)
                event(logging.INFO, "settle", tokens=sequence.length, blocks=len(sequence.pages), step=manager.step_number)
                del waiting[0]
        except BaseException:
            for sequence, tail in waiting:
                _lay_out_unsettled(manager, sequence, tail)
            change.restored()
            raise


def unsettle(manager: KVManager, sequence: Sequence) -> None:
    """Forget the working set of a sequence, which holds strips for the budget. No background work may run."""
    tail = _tail(manager, sequence)
    with Change(manager, "forgetting a working set", [sequence]):
        _lay_out_unsettled(manager, sequence, tail)


def become_dense(manager: KVManager, sequence: Sequence) -> None:
    """Lay a sequence that fits the budget out whole, in the strips it has. An exception leaves it unsettled."""
    manager.drain()
    tail = _tail(manager, sequence)
    with Change(manager, "turning dense", [sequence]) as change:
        _lay_out_dense(manager, sequence, tail, change)


def _lay_out_dense(manager: KVManager, sequence: Sequence, tail: Tail, change: Change) -> None:
    manager.rooms.sets.selected.clear(sequence.row)
    sequence.phase = Phase.DENSE
    lay_out_again(manager, sequence, tail, change)


def cut(manager: KVManager, sequence: Sequence, length: int) -> None:
    """See `KVManager.crop`; `length` is below that of the sequence. No background work may run."""
    rooms, config = manager.rooms, manager.config
    sealed = length // config.block_size
    tail = [layout.read_tail(rooms, sequence, layer, length) for layer in range(manager.shape.num_layers)]
    with Change(manager, "crop", [sequence]) as change:
        gone = sequence.pages[sealed:]
        sequence.pages = sequence.pages[:sealed]
        rooms.sets.set_pages(sequence.row, sealed, [])
        rooms.arena.release(gone)
        sequence.summarised = min(sequence.summarised, sealed)
        sequence.length = length
        if sequence.phase is not Phase.DENSE and length <= config.budget_tokens and not rooms.pool.lent:
            _lay_out_dense(manager, sequence, tail, change)
        else:
            if rooms.pool.lent and length <= config.budget_tokens:
                layout.become_unsettled(rooms, sequence)  # so that it chooses anew, and finds everything
            rooms.sets.selected.trim(sequence.row, window_start(config, length))
            lay_out_again(manager, sequence, tail, change, first=sealed)  # a dense one has its blocks in place
        layout.trim(rooms, sequence)


def lay_out_again(manager: KVManager, sequence: Sequence, tail: Tail, change: Change, first: int = 0) -> None:
    """As `layout.lay_out`, within a change of the sequence, which is unsettled when this raises. A short one has no strips for
    that, and is torn; but nothing of it has to be read, so only an interrupt or a lack of memory can come there."""
    try:
        layout.lay_out(manager.rooms, sequence, tail, first)
    except BaseException:
        if len(sequence.strips) >= manager.config.budget_blocks:
            _lay_out_unsettled(manager, sequence, tail)
            change.restored()
        raise


def _lay_out_unsettled(manager: KVManager, sequence: Sequence, tail: Tail) -> None:
    """Only the tail block is on the device then, so that nothing has to be read."""
    layout.become_unsettled(manager.rooms, sequence)
    layout.lay_out(manager.rooms, sequence, tail)


def _tail(manager: KVManager, sequence: Sequence) -> Tail:
    layers = range(manager.shape.num_layers)
    return [layout.read_tail(manager.rooms, sequence, layer, sequence.length) for layer in layers]


def _fit(manager: KVManager, sequences: list[Sequence]) -> None:
    """Fit the summary if it never was, or if these sequences are much longer than those it was fitted on: keys at
    positions that a fit has not seen are coded badly. A new fit writes all summaries anew.

    Sequences with values that are not finite are no sample. Where there are no others, the summary is fitted on noise until
    there are."""
    summary, sound = manager.rooms.summary, [sequence for sequence in sequences if sequence.finite]
    if summary.fitted and not _outgrown(manager, sound):
        return
    if not any(has_candidates(manager.config, sequence) for sequence in sequences):
        return  # sequences of a lent pool may be this short; they settle again when there is something to choose
    longest = max((sequence.length for sequence in sound), default=0)
    fresh, before = not summary.fitted, manager.fitted_length
    written = [(sequence, sequence.summarised) for sequence in manager.sequences]
    for sequence, _ in written:
        sequence.summarised = 0  # first, so that an interrupt leaves no summaries of one fit to be read by another
    try:
        summary.fit(_samples(manager, sound) if sound else _noise(manager))
    except Exception as error:
        for sequence, blocks in written:
            sequence.summarised = blocks
        if fresh or isinstance(error, OasisError):
            raise
        manager.fitted_length = longest  # the old fit serves until sequences are longer again
        event(logging.WARNING, "refit-failed", tokens=longest, step=manager.step_number, error=error)
        return
    manager.fitted_length = longest
    event(logging.INFO, "fit" if fresh else "refit", tokens=longest, tokens_before=before, step=manager.step_number)
    for sequence in manager.sequences:
        if sequence.phase is Phase.SPARSE and sequence.torn is None:
            try:
                with manager.rooms.arena.impatient():
                    _summarise(manager, sequence)
            except OasisError:
                unsettle(manager, sequence)  # the step that uses it next tries again, and says what is lost


def has_candidates(config: OasisConfig, sequence: Sequence) -> bool:
    """Whether a sequence has blocks that are neither sinks nor in the window."""
    return window_start(config, sequence.length) > config.sink_blocks


def _outgrown(manager: KVManager, sequences: list[Sequence]) -> bool:
    """Whether some sequence is much longer than those that the summary was fitted on."""
    longest = max((sequence.length for sequence in sequences), default=0)
    return manager.fitted_length is not None and 0 < longest >= manager.rooms.summary.serves * manager.fitted_length


def refit_outgrown(manager: KVManager, sequences: list[Sequence]) -> None:
    """Fit the summary anew if a sparse sequence has grown far beyond what it was fitted on. A pause, at every half more of its
    length: all sealed keys of the sparse sequences are read and digested again."""
    sparse = [sequence for sequence in sequences if sequence.phase is Phase.SPARSE and sequence.finite]
    if _outgrown(manager, sparse):
        manager.drain()
        _fit(manager, sparse)


def _samples(manager: KVManager, sequences: list[Sequence]) -> Iterator[KeySample]:
    # Attention sinks have keys like no other and are always resident: they are no sample of what is ranked.
    first, size = manager.config.sink_blocks, manager.config.block_size
    sequences = [sequence for sequence in sequences if len(sequence.pages) > first]
    positions = torch.cat([torch.arange(first * size, len(sequence.pages) * size) for sequence in sequences])
    positions = positions.to(manager.shape.device)
    for layer in range(manager.shape.num_layers):
        keys = [layout.sealed_keys(manager.rooms, sequence, layer, first, len(sequence.pages)) for sequence in sequences]
        flat = [part.transpose(0, 1).flatten(1, 2) for part in keys]
        yield KeySample(layer, torch.cat(flat, dim=1).float(), positions)


def _noise(manager: KVManager) -> Iterator[KeySample]:
    shape, tokens = manager.shape, 4 * manager.shape.head_dim
    generator = torch.Generator().manual_seed(0)
    for layer in range(shape.num_layers):
        keys = torch.randn((shape.kv_heads, tokens, shape.head_dim), generator=generator)
        yield KeySample(layer, keys.to(shape.device), torch.arange(tokens, device=shape.device))


def _summarise(manager: KVManager, sequence: Sequence) -> None:
    """Write the summaries of all sealed blocks that have none."""
    summary = manager.rooms.summary
    if not summary.fitted:
        return
    reserve_summaries(manager, sequence.pages)
    pages = torch.tensor(sequence.pages, dtype=torch.int64, device=manager.shape.device)
    for layer in range(manager.shape.num_layers):
        for start in range(sequence.summarised, len(sequence.pages), layout.STAGED_BLOCKS):
            end = min(start + layout.STAGED_BLOCKS, len(sequence.pages))
            summary.write(layer, pages[start:end], layout.sealed_keys(manager.rooms, sequence, layer, start, end))
    sequence.summarised = len(sequence.pages)


def _choose(manager: KVManager, sequence: Sequence) -> None:
    """Select the blocks that matter most to the predictor, by the last queries of the prompt."""
    best = [_best(manager, sequence, layer) for layer in range(manager.shape.num_layers)]
    blocks, mass = (torch.stack(part) for part in zip(*best, strict=True))
    slots = layout.selected_slots(manager.rooms, sequence.strips)
    manager.rooms.sets.selected.begin(sequence.row, blocks, mass, manager.step_number, slots)


def _best(manager: KVManager, sequence: Sequence, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best blocks of each head and their masses, best first, `(kv_heads, at most selected_places)`."""
    sets, config = manager.rooms.sets, manager.config
    low, high = config.sink_blocks, window_start(config, sequence.length)
    if low == high:
        none = torch.empty((manager.shape.kv_heads, 0), device=manager.shape.device)
        return none.long(), none
    rows = min(sets.recent_rows, sequence.length)
    queries = sets.recent[layer][sequence.row : sequence.row + 1, sets.recent_rows - rows :]
    pages = torch.tensor([sequence.pages], dtype=torch.int64, device=manager.shape.device)
    count = torch.tensor([len(sequence.pages)], device=manager.shape.device)
    index = LayerIndex(manager.rooms, layer, pages, count, sets.scales[layer])
    predictor = manager.rooms.predictor
    row = torch.tensor([sequence.row], device=manager.shape.device)
    mass = predictor.begin(layer, predictor.score(layer, queries, index), row)
    nothing = torch.full((1, manager.shape.kv_heads, 1), EMPTY, device=manager.shape.device)
    bounds = torch.tensor([[low], [high]], device=manager.shape.device)
    blocks, gain = ops.top_missing(mass, nothing, bounds[0], bounds[1], config.selected_places)
    return blocks[0], gain[0]


def reserve_summaries(manager: KVManager, pages: list[int]) -> None:
    """Make the summaries of some pages writable."""
    if pages:
        manager.scheduler.fence()
        manager.rooms.summary.reserve(max(pages) + 1)
