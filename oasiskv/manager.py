"""`KVManager`: owns the memory, the sequences and the background lanes of one model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import torch

from . import adoption, layout, ops, registry, room
from .abc import KeySummary, Predictor, QueryProjection, Ticket, TransferScheduler
from .adoption import Adoption
from .arena import Arena
from .change import Change
from .config import OasisConfig
from .errors import InputError, IntegrityError, StateError
from .integrity import check_integrity
from .log import event
from .metrics import Counters, Stats
from .pool import OwnPool, Pool
from .refresh import Rooms
from .repair import repair
from .scheduler import InlineScheduler, ThreadScheduler
from .sequence import UNFINISHED, Phase, Sequence
from .settling import cut, refit_outgrown
from .step import Step
from .streams import StreamScheduler
from .trace import Trace
from .traced import TracedScheduler, TracedStep
from .types import ModelShape
from .uncopied import Uncopied
from .working_set import WorkingSets

if TYPE_CHECKING:
    from .tiers.abc import TierStore

F = TypeVar("F", bound=Callable[..., object])


def _persistent(function: F) -> F:
    """For what allocates tensors that outlive the call: made without gradients, and usable outside of inference mode, even when
    the caller is in it."""
    wrapped: F = torch.inference_mode(False)(torch.no_grad()(function))
    return wrapped


def default_scheduler(device: torch.device, workers: int) -> TransferScheduler:
    """Background work inline without workers, else on streams of a GPU, or on threads."""
    if not workers:
        return InlineScheduler()
    return StreamScheduler(device) if device.type == "cuda" else ThreadScheduler(workers)


def _arena(shape: ModelShape, config: OasisConfig, tier: TierStore | None, trace: Trace | None) -> Arena:
    if tier is None and not config.tiers:
        return Arena(shape, config.block_size, config.arena_bytes)
    from .tiered_arena import tiered_arena  # with it comes anyio, which nobody else needs

    return tiered_arena(shape, config, tier, trace)


class KVManager(Uncopied):
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
        tier: a store below the arena, in place of `config.tier`; made for `SegmentLayout.of(shape, config)` and not open yet.
        trace: takes what runs when (`Trace.save`), if there is one.
        pool: slots in memory of a serving engine (`LentPool`), in place of a pool of its own. Sequences then own no strips but
            those that are lent to them, and are never dense.
    """

    @_persistent
    def __init__(
        self,
        shape: ModelShape,
        config: OasisConfig | None = None,
        scheduler: TransferScheduler | None = None,
        projection: QueryProjection | None = None,
        tier: TierStore | None = None,
        trace: Trace | None = None,
        pool: Pool | None = None,
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
            pool=pool or OwnPool(shape, config.block_size, config.pool_bytes, config.poison_freed),
            arena=_arena(shape, config, tier, trace),
            sets=WorkingSets(shape, config, predictor.prompt_rows),
            summary=summary,
            predictor=predictor,
            counters=Counters(),
        )
        self.scheduler = scheduler or default_scheduler(shape.device, config.workers)
        if trace is not None:
            self.scheduler = TracedScheduler(self.scheduler, trace, shape, config.block_size)
        self._trace = trace
        self.tickets: list[Ticket | None] = [None] * shape.num_layers
        self.step_number = 0
        self.fitted_length: int | None = None
        self._sequences: dict[int, Sequence] = {}
        self._free_rows: list[int] = []
        self.adoptions: list[Adoption] = []
        self.open_changes = 0
        self.open_step: Step | None = None
        self._closed = False

    # Sequences

    def create(self) -> Sequence:
        """A new, empty sequence."""
        self._check_open()
        return self._made(self._new)

    def _made(self, make: Callable[[], Sequence]) -> Sequence:
        """A sequence that `make` has listed. If its caller never gets it, `repair` frees it."""
        self.open_changes += 1
        sequence = make()
        sequence.torn = None
        self.open_changes -= 1
        return sequence

    @_persistent
    def _new(self) -> Sequence:
        if not self._free_rows:
            self.drain()
            capacity = self.rooms.sets.capacity
            rows = max(1, 2 * capacity)
            self.rooms.predictor.reserve_rows(rows)
            self.rooms.sets.reserve_rows(rows)
            self._free_rows.extend(range(rows - 1, capacity - 1, -1))
        phase = Phase.UNSETTLED if self.rooms.pool.lent else Phase.DENSE
        sequence = Sequence(self._free_rows.pop(), phase=phase, torn=UNFINISHED)
        self._sequences[sequence.row] = sequence
        self.rooms.sets.set_pages(sequence.row, 0, [])
        self.rooms.sets.set_strips(sequence.row, [])
        self.rooms.sets.selected.clear(sequence.row)
        self.rooms.predictor.clear_row(sequence.row)
        return sequence

    def free(self, sequence: Sequence) -> None:
        """Give back everything that a sequence holds, and abort what it adopts. Its handle is dead afterwards. A sequence that
        another call has left half changed can be freed, too."""
        self._check_idle(sequence, torn=True)
        self.drain()
        for pending in [pending for pending in self.adoptions if pending.sequence is sequence]:
            pending.abort()
        whole = sequence.torn is None
        with Change(self, "free"):
            del self._sequences[sequence.row]
            pages, strips = sequence.pages, sequence.strips
            sequence.pages, sequence.strips, sequence.length, sequence.phase = [], [], 0, Phase.FREED
            if whole:
                self.rooms.arena.release(pages)
                self.rooms.pool.release(strips)
                self._free_rows.append(sequence.row)
        if not whole:
            repair(self)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens. Sealed blocks are shared; the working set is copied.

        Raises:
            StateError: the pool is lent: `branch` needs no strips.
            PoolExhausted: no strips for a copy. Dense sequences may have turned sparse by then, and nothing else has changed.
        """
        self._check_idle(sequence)
        return self._made(partial(self._forked, sequence))

    @_persistent
    def _forked(self, sequence: Sequence) -> Sequence:
        rooms, pool = self.rooms, self.rooms.pool
        if not isinstance(pool, OwnPool):
            raise StateError("the pool is lent by a serving engine, and has no strips for a fork; use branch")
        self.drain()
        strips = room.take(self, len(sequence.strips), keep=sequence)
        child = self._new()
        child.length, child.phase, child.summarised = sequence.length, sequence.phase, sequence.summarised
        child.acceptance, child.finite = sequence.acceptance, sequence.finite
        child.pages, child.strips = list(sequence.pages), strips
        rooms.arena.share(child.pages)
        rooms.sets.set_strips(child.row, strips)
        rooms.sets.copy_row(sequence.row, child.row, lambda slots: pool.moved(slots, sequence.strips, strips))
        rooms.predictor.copy_row(sequence.row, child.row)
        source, target = layout.pool_slots(self.rooms, sequence.strips), layout.pool_slots(self.rooms, strips)
        ops.copy_blocks(rooms.pool.slots, rooms.pool.slots, source, target)
        return child

    @_persistent
    def crop(self, sequence: Sequence, length: int) -> None:
        """Forget the tokens from `length` on.

        Raises:
            InputError: there are no `length` tokens; or a part of a block is to stay of a sequence of a lent pool that has no
                strips to hold it.
            TierError: blocks that must be read are lost, or the tier store fails. The sequence is as it was if the tail block
                is among them, and is cropped otherwise.
            WorkerError: as `TierError`, from a tier store that breaks its contract; or background work failed, and the sequence
                is as it was.
        """
        self._check_idle(sequence)
        if not 0 <= length <= sequence.length:
            raise InputError(f"crop to {length} tokens, but the sequence has {sequence.length}; pass 0 to {sequence.length}")
        if length == sequence.length:
            return
        if length % self.config.block_size and not sequence.strips and self.rooms.pool.lent:
            raise InputError(
                f"crop to {length} tokens, but without strips a sequence has whole blocks of {self.config.block_size} only"
            )
        self.drain()
        cut(self, sequence, length)

    # Sequences that another engine begins

    @_persistent
    def adopt(self, sequence: Sequence, num_blocks: int) -> Adoption:
        """Take over sealed blocks that were computed elsewhere; they follow what the sequence has.

        Raises:
            InputError: no blocks.
            StateError: the pool is not lent, or the sequence holds lent strips.
            ArenaExhausted: no room for them. Above a tier store, blocks that are not stored yet take it all, or a step is open
                that may use others.
            WorkerError: background work failed, for which making room has waited.
        """
        self._check_idle(sequence)
        with Change(self, "adopt"):
            adoption = Adoption(self, sequence, num_blocks)
            self.adoptions.append(adoption)
        return adoption

    @torch.no_grad()
    def observe(
        self,
        layer: int,
        sequences: Sequences[Sequence],
        queries: torch.Tensor,
        num_tokens: list[int],
        first_positions: list[int],
        scale: float | None = None,
    ) -> None:
        """See the queries of tokens whose attention somebody else computes: they choose the first working set, and tell the
        summary which directions matter.

        Args:
            queries: `(num_rows, query_heads, head_dim)` after rotary embedding, `num_tokens[i]` rows of each sequence in turn.
            first_positions: of each sequence's first row.
            scale: as for `Step.attend`.

        Raises `InputError` for other numbers of rows.
        """
        if sum(num_tokens) != len(queries):
            raise InputError(f"queries have {len(queries)} rows, and num_tokens says {sum(num_tokens)}")
        if scale is not None:
            self.rooms.sets.scales[layer] = scale
        adoption.observe(self, layer, sequences, queries, num_tokens, first_positions)

    @_persistent
    def lend(self, sequence: Sequence, strips: list[int], tail: torch.Tensor | None = None, tail_tokens: int = 0) -> None:
        """Give a sequence strips of a `LentPool`, so that it can take part in steps. Its next decode step chooses the working
        set.

        Args:
            strips: `config.budget_blocks` of them, which nobody else uses until `reclaim` or `free`.
            tail: `(num_layers, kv_heads, 2, block_size, head_dim)`, the block that is not full yet.
            tail_tokens: how many tokens of it there are; they follow the sealed ones.

        Raises:
            InputError: another number of strips, strips that the pool does not have, or a tail of another shape.
            StateError: the pool is not lent, or the sequence has strips.
        """
        self._check_idle(sequence)
        adoption.lend(self, sequence, strips, tail, tail_tokens)

    @_persistent
    def reclaim(self, sequence: Sequence) -> None:
        """Take lent strips away; they may belong to others already, and are not read. The sequence keeps its sealed blocks, and
        forgets the tokens of its tail. Without strips there is nothing to do."""
        self._check_idle(sequence)
        adoption.reclaim(self, sequence)

    def branch(self, sequence: Sequence, length: int) -> Sequence:
        """A new sequence that shares the first `length` tokens, whole blocks, and has no strips. Raises `InputError` for other
        lengths, and `StateError` if the pool is not lent: `fork` does more."""
        self._check_idle(sequence)
        return self._made(_persistent(partial(adoption.branch, self, sequence, length, self._new)))

    # Steps

    @_persistent
    def begin_step(
        self,
        sequences: Sequences[Sequence],
        num_tokens: Sequences[int],
        num_drafts: Sequences[int] | None = None,
        prompt: Sequences[bool] | None = None,
    ) -> Step:
        """Open a step over some sequences.

        Args:
            sequences: each at most once.
            num_tokens: rows of each sequence in this forward, drafts included; 1 or more.
            num_drafts: how many of them, the last ones, are draft tokens that `commit` may reject. A step without drafts is
                certain: its background work starts layer by layer, before it is committed.
            prompt: whether a sequence's rows are part of a prompt, and attend to the whole history however few they are.
                Without it, and where it is false, their number tells: a row behind a history decodes, as do up to
                `MAX_STEP_ROWS` rows with drafts among them.

        Raises:
            InputError: lengths that do not fit, no tokens, more drafts than tokens less one.
            PoolExhausted, ArenaExhausted: before a token is taken; sequences may have turned sparse to make room for others.
            StateError: another step is open.
            TierError: blocks that a sequence needs to turn sparse are lost, or the tier store fails.
        """
        self._check_open()
        if self.open_step is not None:
            raise StateError("another step is open; commit or abort it first")
        drafts = list(num_drafts) if num_drafts is not None else [0] * len(sequences)
        reads = list(prompt) if prompt is not None else [False] * len(sequences)
        if not sequences or not len(sequences) == len(num_tokens) == len(drafts) == len(reads):
            raise InputError(
                f"a step needs one num_tokens, one num_drafts and one prompt per sequence: got {len(sequences)} sequences, "
                f"{len(num_tokens)} num_tokens, {len(drafts)} num_drafts, {len(reads)} prompt"
            )
        if len({id(sequence) for sequence in sequences}) != len(sequences):
            raise InputError("a sequence is listed twice; fork it to run it twice in one step")
        for sequence, tokens, draft in zip(sequences, num_tokens, drafts, strict=True):
            self._check_alive(sequence)
            if tokens < 1:
                raise InputError(f"num_tokens is {tokens}; a sequence takes part in a step with at least 1 token")
            if not 0 <= draft < tokens:
                raise InputError(f"num_drafts is {draft} of {tokens} tokens; at least one token must not be a draft")
        with Change(self, "begin_step"):
            refit_outgrown(self, list(sequences))
            self.step_number += 1
            self.rooms.arena.begin_step()
            make = Step if self._trace is None else partial(TracedStep, self._trace)
            return make(self, list(sequences), list(num_tokens), drafts, reads)

    def list_free_rows(self) -> None:
        """Rows of the tables that no sequence has are free."""
        self._free_rows = [row for row in range(self.rooms.sets.capacity - 1, -1, -1) if row not in self._sequences]

    def forget(self, sequence: Sequence) -> None:
        """A sequence whose handle nobody has is no more; `repair` counts what it held as free."""
        del self._sequences[sequence.row]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def prompt_piece(self, most: int) -> int:
        """Tokens of a prompt to read in one step: `most`, or what fits a third of an arena above a tier store, so that blocks
        can be on their way to the store meanwhile."""
        arena = self.rooms.arena
        return max(1, min(most, arena.num_pages // 3 * self.config.block_size)) if arena.tiered else most

    # Reading

    def full_kv(self, sequence: Sequence, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All committed keys and values of a layer on the device, `(kv_heads, length, head_dim)` each, put together from the
        arena, the tier store and the tail block: what full attention would have kept, bit for bit unless the store compresses.
        Raises `TierError` if some of it is lost."""
        self._check_alive(sequence)
        both = layout.read_kv(self.rooms, sequence, layer)
        return both[0], both[1]

    def stats(self) -> Stats:
        """What the manager holds and has done."""
        counters, rooms = self.rooms.counters.totals(), self.rooms
        live = self.sequences
        tokens = sum(sequence.length for sequence in live)
        moved = counters.loaded_blocks + counters.corrected_blocks
        wanted = counters.wanted_blocks
        return Stats(
            sequences=len(live),
            sparse_sequences=sum(sequence.phase is Phase.SPARSE for sequence in live),
            tokens=tokens,
            steps=counters.steps,
            decoded_tokens=counters.decoded_tokens,
            prefilled_tokens=counters.prefilled_tokens,
            pool_bytes=rooms.pool.allocated_bytes,
            summary_bytes=rooms.summary.device_bytes(),
            table_bytes=rooms.sets.device_bytes() + rooms.predictor.device_bytes(),
            arena_bytes=rooms.arena.used_bytes,
            arena_peak_bytes=rooms.arena.peak_bytes,
            full_kv_bytes=tokens * self.shape.token_bytes(),
            hit_rate=counters.resident_blocks / wanted if wanted else 1.0,
            coverage=counters.coverage_sum / counters.coverage_count if counters.coverage_count else 1.0,
            late_blocks=counters.late_blocks,
            late_layers=counters.late_layers,
            loaded_blocks=counters.loaded_blocks,
            corrected_blocks=counters.corrected_blocks,
            stored_blocks=counters.stored_blocks,
            moved_bytes_per_token=moved * self.shape.slot_bytes(self.config.block_size) / max(1, counters.decoded_tokens),
            most_new_blocks=counters.most_new_blocks,
            most_corrected_blocks=counters.most_corrected_blocks,
            **rooms.arena.tier_stats(),
        )

    # Life

    @property
    def sequences(self) -> list[Sequence]:
        """The live sequences."""
        return list(self._sequences.values())

    def check_integrity(self) -> None:
        """See `integrity.check_integrity`."""
        self._check_open()
        try:
            check_integrity(self)
        except IntegrityError as error:
            event(logging.ERROR, "integrity", step=self.step_number, error=error)
            raise

    def drain(self) -> None:
        """Wait for all background work. Raises `WorkerError` if some of it failed, once per failure."""
        self.scheduler.drain()
        for layer, ticket in enumerate(self.tickets):
            if ticket is not None:
                self.tickets[layer] = None
                ticket.wait()

    def flush(self) -> None:
        """Wait until the sealed segments are in the tier store, or it fails. Nothing to do without one."""
        self._check_open()
        self.rooms.arena.drain()

    def close(self) -> None:
        """Stop the background lanes and give all memory back. Idempotent; every later call raises `StateError`."""
        if self._closed:
            return
        self._closed = True
        self.rooms.arena.give_up()
        if self.open_step is not None:
            self.open_step.abort()
        self.scheduler.close()
        for pending in list(self.adoptions):
            pending.abort()
        for sequence in self._sequences.values():
            sequence.phase = Phase.FREED
        self._sequences.clear()
        try:
            self.rooms.arena.close()
        finally:
            self.rooms.pool.close()

    def __enter__(self) -> KVManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the manager is closed; create a new one")
        if self.open_changes:
            repair(self)

    def _check_alive(self, sequence: Sequence, torn: bool = False) -> None:
        """Raise unless the sequence is in use; a `torn` one is taken for alive if that is asked for."""
        self._check_open()
        if self._sequences.get(sequence.row) is not sequence:
            raise StateError("the sequence was freed, or belongs to another manager")
        if sequence.torn is not None and not torn:
            raise StateError(
                f"{sequence.torn} ended in the middle and left the sequence half changed; free it, and read its text again"
            )

    def _check_idle(self, sequence: Sequence, torn: bool = False) -> None:
        self._check_alive(sequence, torn)
        if self.open_step is not None and any(sequence is other for other in self.open_step.sequences):
            raise StateError("the sequence takes part in the open step; commit or abort the step first")
