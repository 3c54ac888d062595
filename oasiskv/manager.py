"""`KVManager`: owns the memory, the sequences and the background lanes of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequences
from types import TracebackType
from typing import TypeVar

import torch

from . import ops, registry, room
from .abc import KeySample, KeySummary, Predictor, QueryProjection, Ticket, TransferScheduler
from .arena import Arena
from .config import OasisConfig
from .errors import InputError, OasisError, StateError
from .integrity import check_integrity
from .metrics import Counters, Stats
from .pool import Pool
from .refresh import LayerIndex, Rooms, SparseRows
from .scheduler import InlineScheduler, ThreadScheduler
from .sequence import Phase, Sequence
from .step import Step
from .types import EMPTY, ModelShape
from .working_set import RECENT_ROWS, WorkingSets, place_of, window_start

_STAGED_BLOCKS = 512
"""Blocks of one layer that are staged on the device at a time on their way from the arena."""

_REFIT_GROWTH = 1.5
"""A summary is fitted again for sequences longer than this many times those it was fitted on."""


F = TypeVar("F", bound=Callable[..., object])


def _persistent(function: F) -> F:
    """For what allocates tensors that outlive the call: made without gradients, and usable outside of inference mode, even when
    the caller is in it."""
    wrapped: F = torch.inference_mode(False)(torch.no_grad()(function))
    return wrapped


class KVManager:
    """The cache of many sequences: dense ones whole on the device, sparse ones with a bounded working set.

    Calls come from one thread. A step is opened with `begin_step`, attends layer by layer, and is committed:

        step = manager.begin_step([sequence], num_tokens=[1])
        for layer in range(shape.num_layers):
            output = step.attend(layer, queries, keys, values)
        step.commit()

    Args:
        shape: of the model.
        config: settings; the defaults if `None`.
        scheduler: runs the background work; by default as `config.workers` says.
        projection: how the model makes queries, for predictors that look a layer ahead (`Step.hint`).
    """

    @_persistent
    def __init__(
        self,
        shape: ModelShape,
        config: OasisConfig | None = None,
        scheduler: TransferScheduler | None = None,
        projection: QueryProjection | None = None,
    ) -> None:
        config = config or OasisConfig()
        self.shape = shape
        self.config = config
        summary = registry.load(registry.KEY_SUMMARIES, config.summary, KeySummary)(shape, config)
        predictor = registry.load(registry.PREDICTORS, config.predictor, Predictor)(shape, config)
        if projection is not None:
            predictor.bind(projection)
        self.rooms = Rooms(
            shape=shape,
            config=config,
            pool=Pool(shape, config.block_size, config.pool_bytes, config.poison_freed),
            arena=Arena(shape, config.block_size, config.arena_bytes),
            sets=WorkingSets(shape, config),
            summary=summary,
            predictor=predictor,
            counters=Counters(),
        )
        self.scheduler = scheduler or (ThreadScheduler(config.workers) if config.workers else InlineScheduler())
        self.tickets: list[Ticket | None] = [None] * shape.num_layers
        self.step_number = 0
        self._fitted_length: int | None = None
        self._sequences: dict[int, Sequence] = {}
        self._free_rows: list[int] = []
        self._open: Step | None = None
        self._closed = False

    # Sequences

    @_persistent
    def create(self) -> Sequence:
        """A new, empty sequence."""
        self._check_open()
        if not self._free_rows:
            self.drain()
            capacity = self.rooms.sets.capacity
            rows = max(1, 2 * capacity)
            self.rooms.sets.reserve_rows(rows)
            self.rooms.predictor.reserve_rows(rows)
            self._free_rows.extend(range(rows - 1, capacity - 1, -1))
        sequence = Sequence(self._free_rows.pop())
        self.rooms.sets.set_pages(sequence.row, 0, [])
        self.rooms.sets.clear_selected(sequence.row)
        self.rooms.predictor.clear_row(sequence.row)
        self._sequences[sequence.row] = sequence
        return sequence

    def free(self, sequence: Sequence) -> None:
        """Give back everything that a sequence holds. Its handle is dead afterwards."""
        self._check_idle(sequence)
        self.drain()
        rooms = self.rooms
        rooms.arena.release(sequence.pages)
        rooms.pool.release(sequence.strips)
        rooms.sets.set_pages(sequence.row, 0, [])
        rooms.sets.set_strips(sequence.row, [])
        rooms.sets.clear_selected(sequence.row)
        del self._sequences[sequence.row]
        self._free_rows.append(sequence.row)
        sequence.pages, sequence.strips, sequence.length, sequence.phase = [], [], 0, Phase.FREED

    @_persistent
    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens. Sealed blocks are shared; the working set is copied."""
        self._check_idle(sequence)
        self.drain()
        rooms = self.rooms
        strips = room.take(self, len(sequence.strips), keep=sequence)
        try:
            child = self.create()
        except OasisError:
            rooms.pool.release(strips)
            raise
        child.length, child.phase, child.summarised = sequence.length, sequence.phase, sequence.summarised
        child.pages = list(sequence.pages)
        rooms.arena.share(child.pages)
        child.strips = strips
        rooms.sets.copy_row(sequence.row, child.row)
        rooms.predictor.copy_row(sequence.row, child.row)
        rooms.sets.set_strips(child.row, strips)
        source, target = self.slots(sequence.strips), self.slots(strips)
        for pool in rooms.pool.layers:
            ops.copy_blocks(pool, pool, source, target)
        return child

    @_persistent
    def crop(self, sequence: Sequence, length: int) -> None:
        """Forget the tokens from `length` on. Raises `InputError` when there are no `length` tokens."""
        self._check_idle(sequence)
        if not 0 <= length <= sequence.length:
            raise InputError(f"crop to {length} tokens, but the sequence has {sequence.length}; pass 0 to {sequence.length}")
        if length == sequence.length:
            return
        self.drain()
        size = self.config.block_size
        tail = [self.read_tail(sequence, layer, length) for layer in range(self.shape.num_layers)]
        sealed = length // size
        self.rooms.arena.release(sequence.pages[sealed:])
        sequence.pages = sequence.pages[:sealed]
        self.rooms.sets.set_pages(sequence.row, sealed, [])
        sequence.summarised = min(sequence.summarised, sealed)
        sequence.length = length
        if sequence.phase is not Phase.DENSE and length <= self.config.budget_tokens:
            self.rooms.sets.clear_selected(sequence.row)
            sequence.phase = Phase.DENSE
        self.rooms.sets.trim_selected(sequence.row, window_start(self.config, length))
        room.trim(self, sequence)
        self.lay_out(sequence, tail)

    # Steps

    @_persistent
    def begin_step(
        self, sequences: Sequences[Sequence], num_tokens: Sequences[int], num_drafts: Sequences[int] | None = None
    ) -> Step:
        """Open a step over some sequences.

        Args:
            sequences: each at most once.
            num_tokens: rows of each sequence in this forward, drafts included; 1 or more.
            num_drafts: how many of them, the last ones, are draft tokens that `commit` may reject. A step without drafts is
                certain: its background work starts layer by layer, before it is committed.

        Raises:
            InputError: lengths that do not fit, no tokens, more drafts than tokens less one.
            PoolExhausted, ArenaExhausted: before a token is taken; sequences may have turned sparse to make room for others.
            StateError: another step is open.
        """
        self._check_open()
        if self._open is not None:
            raise StateError("another step is open; commit or abort it first")
        drafts = list(num_drafts) if num_drafts is not None else [0] * len(sequences)
        if not sequences or not len(sequences) == len(num_tokens) == len(drafts):
            raise InputError(
                f"a step needs one num_tokens and one num_drafts per sequence: got {len(sequences)} sequences, "
                f"{len(num_tokens)} num_tokens, {len(drafts)} num_drafts"
            )
        if len({id(sequence) for sequence in sequences}) != len(sequences):
            raise InputError("a sequence is listed twice; fork it to run it twice in one step")
        for sequence, tokens, draft in zip(sequences, num_tokens, drafts, strict=True):
            self._check_alive(sequence)
            if tokens < 1:
                raise InputError(f"num_tokens is {tokens}; a sequence takes part in a step with at least 1 token")
            if not 0 <= draft < tokens:
                raise InputError(f"num_drafts is {draft} of {tokens} tokens; at least one token must not be a draft")
        self.step_number += 1
        self._open = Step(self, list(sequences), list(num_tokens), drafts)
        return self._open

    def close_step(self, step: Step) -> None:
        """Called by a step when it is committed or aborted."""
        if self._open is step:
            self._open = None

    @property
    def open_step(self) -> Step | None:
        """The step that is neither committed nor aborted."""
        return self._open

    # The device, used by steps

    def become_unsettled(self, sequence: Sequence) -> None:
        """Change the phase and trim the strips to the budget; the caller lays the sequence out anew."""
        budget = self.config.budget_blocks
        self.rooms.pool.release(sequence.strips[budget:])
        sequence.strips = sequence.strips[:budget]
        self.rooms.sets.set_strips(sequence.row, sequence.strips)
        self.rooms.sets.clear_selected(sequence.row)
        sequence.phase = Phase.UNSETTLED

    def settle(self, sequences: list[Sequence]) -> None:
        """Choose and load the first working set of sequences that turn sparse; fit the summary if it has not been.

        Dense sequences are taken over as they are: their sealed blocks are in the arena already.
        """
        self.drain()
        for sequence in sequences:
            room.give(self, sequence, self.config.budget_blocks)
        tails = [[self.read_tail(s, layer, s.length) for layer in range(self.shape.num_layers)] for s in sequences]
        for sequence in sequences:
            self.become_unsettled(sequence)
        self._fit(sequences)
        for sequence, tail in zip(sequences, tails, strict=True):
            self._summarise(sequence)
            sequence.phase = Phase.SPARSE
            for layer in range(self.shape.num_layers):
                self._choose(sequence, layer)
            self.lay_out(sequence, tail)

    def _fit(self, sequences: list[Sequence]) -> None:
        """Fit the summary if it never was, or if these sequences are much longer than those it was fitted on: keys at
        positions that a fit has not seen are coded badly. A new fit writes all summaries anew."""
        longest = max(sequence.length for sequence in sequences)
        summary = self.rooms.summary
        if summary.fitted and (self._fitted_length is None or longest < _REFIT_GROWTH * self._fitted_length):
            return
        summary.fit(self._samples(sequences))
        self._fitted_length = longest
        for sequence in self.sequences:
            sequence.summarised = 0
            if sequence.phase is Phase.SPARSE:
                self._summarise(sequence)

    def _samples(self, sequences: list[Sequence]) -> Iterator[KeySample]:
        # Attention sinks have keys like no other and are always resident: they are no sample of what is ranked.
        first = self.config.sink_blocks
        for layer in range(self.shape.num_layers):
            keys = [self._sealed_keys(sequence, layer, first, len(sequence.pages)) for sequence in sequences]
            flat = [part.transpose(0, 1).flatten(1, 2) for part in keys]
            yield KeySample(layer, torch.cat(flat, dim=1).float())

    def _summarise(self, sequence: Sequence) -> None:
        """Write the summaries of all sealed blocks that have none."""
        summary = self.rooms.summary
        self.reserve_summaries(sequence.pages)
        pages = torch.tensor(sequence.pages, dtype=torch.int64, device=self.shape.device)
        for layer in range(self.shape.num_layers):
            for start in range(sequence.summarised, len(sequence.pages), _STAGED_BLOCKS):
                end = min(start + _STAGED_BLOCKS, len(sequence.pages))
                summary.write(layer, pages[start:end], self._sealed_keys(sequence, layer, start, end))
        sequence.summarised = len(sequence.pages)

    def reserve_summaries(self, pages: list[int]) -> None:
        """Make the summaries of some pages writable."""
        if pages:
            self.rooms.summary.reserve(max(pages) + 1)

    def _choose(self, sequence: Sequence, layer: int) -> None:
        """Select the blocks that the last queries of the prompt looked at most."""
        sets, config = self.rooms.sets, self.config
        low, high = config.sink_blocks, window_start(config, sequence.length)
        rows = min(RECENT_ROWS, sequence.length)
        queries = sets.recent[layer][sequence.row : sequence.row + 1, RECENT_ROWS - rows :]
        pages = torch.tensor([sequence.pages], dtype=torch.int64, device=self.shape.device)
        count = torch.tensor([len(sequence.pages)], device=self.shape.device)
        index = LayerIndex(self.rooms, layer, pages, count, sets.scales[layer])
        mass = index.summary_mass(queries).mean(1)
        nothing = torch.full((1, self.shape.kv_heads, 1), EMPTY, device=self.shape.device)
        bounds = torch.tensor([[low], [high]], device=self.shape.device)
        blocks, _ = ops.top_missing(mass, nothing, bounds[0], bounds[1], config.selected_blocks)
        sets.selected[layer][sequence.row] = EMPTY
        sets.selected[layer][sequence.row, :, : blocks.shape[2]] = blocks[0]
        sets.selected_at[layer][sequence.row] = self.step_number

    def lay_out(self, sequence: Sequence, tail: list[torch.Tensor | None], first: int = 0) -> None:
        """Fill the pool's places of a sequence from the arena and from the tail block, `(kv_heads, 2, block_size, head_dim)`
        per layer. A dense sequence has its blocks before `first` already. No background work may run."""
        config, rooms = self.config, self.rooms
        size, dense = config.block_size, sequence.phase is Phase.DENSE
        sealed = len(sequence.pages)
        if dense:
            blocks = list(range(first, sealed))
            places = blocks
        elif sequence.phase is Phase.SPARSE:
            window = range(window_start(config, sequence.length), sealed)
            blocks = [*range(config.sink_blocks), *window]
            places = [*range(config.sink_blocks), *(place_of(config, block, dense) for block in window)]
        else:
            blocks, places = [], []
        source = self.slots([sequence.pages[block] for block in blocks])
        target = self.slots([sequence.strips[place] for place in places])
        tail_block = sequence.length // size
        for layer, pool in enumerate(rooms.pool.layers):
            arena = rooms.arena.layers[layer]
            ops.copy_blocks(arena, pool, source, target)
            if sequence.phase is Phase.SPARSE:
                chosen = self.sparse_rows([sequence])
                selected = rooms.sets.selected[layer][chosen.rows]
                place = torch.arange(selected.shape[2], device=selected.device).expand_as(selected)
                ops.copy_blocks(
                    arena, pool, chosen.arena_slots(selected), chosen.pool_slots(torch.where(selected >= 0, place, EMPTY))
                )
            content = tail[layer]
            if content is not None:
                strip = sequence.strips[place_of(config, tail_block, dense)]
                pool[strip * self.shape.kv_heads : (strip + 1) * self.shape.kv_heads] = content

    def sparse_rows(self, sequences: list[Sequence]) -> SparseRows:
        """Tables of sparse sequences, in the order given."""
        sets, device = self.rooms.sets, self.shape.device
        rows = torch.tensor([sequence.row for sequence in sequences], device=device)
        sealed = [len(sequence.pages) for sequence in sequences]
        first = self.config.budget_blocks - self.config.selected_blocks
        return SparseRows(
            rows=rows,
            pages=sets.pages[rows, : max(sealed)],
            num_blocks=torch.tensor(sealed, device=device),
            strips=sets.strips[rows, first : self.config.budget_blocks],
        )

    # Reading

    def full_kv(self, sequence: Sequence, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All committed keys and values of a layer on the device, `(kv_heads, length, head_dim)` each, put together from the
        arena and the tail block: what full attention would have kept, bit for bit."""
        self._check_alive(sequence)
        both = self.read_kv(sequence, layer)
        return both[0], both[1]

    def read_kv(self, sequence: Sequence, layer: int, spare: int = 0) -> torch.Tensor:
        """As `full_kv`, in one tensor `(2, kv_heads, length + spare, head_dim)` whose last `spare` tokens are for the caller to
        fill. Besides it, a few hundred blocks at most are on the device at a time."""
        size, length, shape = self.config.block_size, sequence.length, self.shape
        both = torch.empty((2, shape.kv_heads, length + spare, shape.head_dim), dtype=shape.dtype, device=shape.device)
        for start in range(0, len(sequence.pages), _STAGED_BLOCKS):
            end = min(start + _STAGED_BLOCKS, len(sequence.pages))
            blocks = self._sealed(sequence, layer, start, end).permute(2, 1, 0, 3, 4)
            both[:, :, start * size : end * size] = blocks.reshape(2, shape.kv_heads, -1, shape.head_dim)
        tail = self.read_tail(sequence, layer, length)
        if tail is not None:
            both[:, :, length - length % size : length] = tail[:, :, : length % size].transpose(0, 1)
        return both

    def _sealed(self, sequence: Sequence, layer: int, start: int, end: int) -> torch.Tensor:
        """Sealed blocks on the device, `(end - start, kv_heads, 2, block_size, head_dim)`."""
        arena = self.rooms.arena.layers[layer]
        pages = torch.tensor(sequence.pages[start:end], dtype=torch.int64)
        by_page = arena.view(-1, self.shape.kv_heads, *arena.shape[1:])
        return by_page.index_select(0, pages).to(self.shape.device)

    def _sealed_keys(self, sequence: Sequence, layer: int, start: int, end: int) -> torch.Tensor:
        """Keys of sealed blocks, `(end - start, kv_heads, block_size, head_dim)`."""
        return self._sealed(sequence, layer, start, end)[:, :, 0]

    def read_tail(self, sequence: Sequence, layer: int, length: int) -> torch.Tensor | None:
        """The block that holds token `length`, if some of its tokens are below `length`: `(kv_heads, 2, block_size, head_dim)`.

        It lies in the pool if it is the unsealed tail, and in the arena if a crop reaches into a sealed block.
        """
        size = self.config.block_size
        if length % size == 0:
            return None
        block = length // size
        if block < len(sequence.pages):
            return self._sealed(sequence, layer, block, block + 1)[0]
        heads = self.shape.kv_heads
        strip = sequence.strips[place_of(self.config, block, sequence.phase is Phase.DENSE)]
        return self.rooms.pool.layers[layer][strip * heads : (strip + 1) * heads].clone()

    def slots(self, strips_or_pages: list[int]) -> torch.Tensor:
        """Slots of strips or pages for all heads, `(count, kv_heads)`."""
        heads = self.shape.kv_heads
        first = torch.tensor(strips_or_pages, dtype=torch.int64, device=self.shape.device)[:, None] * heads
        return first + torch.arange(heads, device=self.shape.device)

    def stats(self) -> Stats:
        """What the manager holds and has done."""
        counters, rooms = self.rooms.counters, self.rooms
        live = self.sequences
        tokens = sum(sequence.length for sequence in live)
        moved = int(counters.loaded_blocks) + int(counters.corrected_blocks)
        wanted = int(counters.wanted_blocks)
        return Stats(
            sequences=len(live),
            sparse_sequences=sum(sequence.phase is Phase.SPARSE for sequence in live),
            tokens=tokens,
            steps=int(counters.steps),
            decoded_tokens=int(counters.decoded_tokens),
            prefilled_tokens=int(counters.prefilled_tokens),
            pool_bytes=rooms.pool.allocated_bytes,
            summary_bytes=rooms.summary.device_bytes(),
            table_bytes=rooms.sets.device_bytes() + rooms.predictor.device_bytes(),
            arena_bytes=rooms.arena.used_bytes,
            arena_peak_bytes=rooms.arena.peak_bytes,
            full_kv_bytes=tokens * self.shape.token_bytes(),
            hit_rate=int(counters.resident_blocks) / wanted if wanted else 1.0,
            coverage=float(counters.coverage_sum) / counters.coverage_count if counters.coverage_count else 1.0,
            late_blocks=int(counters.late_blocks),
            late_layers=int(counters.late_layers),
            loaded_blocks=int(counters.loaded_blocks),
            corrected_blocks=int(counters.corrected_blocks),
            stored_blocks=int(counters.stored_blocks),
            moved_bytes_per_token=moved * self.shape.slot_bytes(self.config.block_size) / max(1, int(counters.decoded_tokens)),
            most_new_blocks=int(counters.most_new_blocks),
            most_corrected_blocks=int(counters.most_corrected_blocks),
        )

    # Life

    @property
    def sequences(self) -> list[Sequence]:
        """The live sequences."""
        return list(self._sequences.values())

    def check_integrity(self) -> None:
        """See `integrity.check_integrity`."""
        check_integrity(self)

    def drain(self) -> None:
        """Wait for all background work. Raises `WorkerError` if some of it failed, once per failure."""
        self.scheduler.drain()
        for layer, ticket in enumerate(self.tickets):
            if ticket is not None:
                self.tickets[layer] = None
                ticket.wait()

    def close(self) -> None:
        """Stop the background lanes and give all memory back. Idempotent; every later call raises `StateError`."""
        if self._closed:
            return
        self._closed = True
        if self._open is not None:
            self._open.abort()
        self.scheduler.close()
        for sequence in self._sequences.values():
            sequence.phase = Phase.FREED
        self._sequences.clear()
        self.rooms.arena.close()
        self.rooms.pool.layers.clear()

    def __enter__(self) -> KVManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the manager is closed; create a new one")

    def _check_alive(self, sequence: Sequence) -> None:
        self._check_open()
        if self._sequences.get(sequence.row) is not sequence:
            raise StateError("the sequence was freed, or belongs to another manager")

    def _check_idle(self, sequence: Sequence) -> None:
        self._check_alive(sequence)
        if self._open is not None and any(sequence is other for other in self._open.sequences):
            raise StateError("the sequence takes part in the open step; commit or abort the step first")
