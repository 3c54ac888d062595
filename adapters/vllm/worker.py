"""The worker's side: sequences of a `KVManager` beside vLLM's requests, and the step that both take together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from oasiskv import KVManager, OasisConfig
from oasiskv.abc import LayerWork, Ticket
from oasiskv.adoption import Adoption
from oasiskv.errors import IntegrityError
from oasiskv.lent_pool import LentPool
from oasiskv.sequence import Sequence
from oasiskv.step import Step
from oasiskv.types import ModelShape, Rotary

from .batch_rows import Rows, rows_of
from .device_blocks import BlockReader, storage_of
from .messages import Row, Start, StepMessage
from .residual_stream import ResidualStream

_COUNTED = ("decoded_tokens", "stored_blocks", "loaded_blocks", "corrected_blocks", "late_layers")
"""Counters of the manager that are shown as metrics."""

_WATCHED_EVERY = 8
"""Of a recorded request that decodes, one token in so many is watched: its queries choose a first working set if it is handed
over in the middle of an answer. To watch all of them takes a fifth of a step."""


@dataclass
class Plan:
    """Whose the rows of a batch are; the same for all layers of a step.

    Attributes:
        step: of the requests that OasisKV attends to, if there are any.
        ours: their tokens in the batch.
        hinted: whether all of them decode, so that hints help.
        num_tokens: in the batch, the last one at `last_position`.
        dense: numbers of the requests that vLLM attends to.
        watched: sequences that are recorded while vLLM attends.
        watched_tokens: their tokens in the batch, one sequence after another; `counts` of each, the first at position `starts`.
    """

    step: Step | None = None
    ours: Rows | None = None
    hinted: bool = False
    num_tokens: int = 0
    last_position: int = 0
    dense: list[int] = field(default_factory=list)
    watched: list[Sequence] = field(default_factory=list)
    watched_tokens: Rows | None = None
    counts: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


class Worker:
    """Obeys the scheduler's messages, and attends for the requests that were handed over.

    Args:
        config: of the `KVManager`.
        caches: `(blocks, kv_heads, tokens, 2 * head_dim)` by layer, in the order in which the layers run.
        query_heads: of a layer, on this worker.
        reader: of the caches' blocks.
        rotary: of the model's keys, if it is known.
        stream: of the model, if hints can be had.
    """

    def __init__(
        self,
        config: OasisConfig,
        caches: dict[str, torch.Tensor],
        query_heads: int,
        reader: BlockReader,
        rotary: Rotary | None = None,
        stream: ResidualStream | None = None,
    ) -> None:
        first = next(iter(caches.values()))
        _, kv_heads, self.block_size, content = first.shape
        shape = ModelShape(
            num_layers=len(caches),
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=content // 2,
            dtype=first.dtype,
            device=first.device,
            rotary=rotary,
        )
        self._numbers = {name: number for number, name in enumerate(caches)}
        self._caches = list(caches.values())
        self._reader = reader
        with torch.inference_mode(False):
            pool = _pool(shape, config.block_size, self._caches)
            self.manager = KVManager(shape, config, projection=stream, pool=pool)
        self.stream = stream
        if stream is not None and not self.manager.rooms.predictor.uses_hints:
            self._end_hints()
        self._sequences: dict[int, Sequence] = {}
        self._step: Step | None = None
        self._step_keys: list[int] = []
        self._copies: list[_Copy] = []
        self._tickets: list[Ticket] = []
        self._stored: dict[int, int] = {}
        self._owners: dict[int, Row] = {}
        self._reported: dict[str, int] = {}

    @property
    def host_blocks(self) -> int | None:
        """Device blocks' worth of tokens that the arena and the tiers below can hold; `None` if that is not limited."""
        pages = self.manager.rooms.arena.capacity_pages
        return None if pages is None else pages * self.manager.config.block_size // self.block_size

    def layer_number(self, name: str) -> int | None:
        """Which of our layers this is; `None` for others, such as a draft model's."""
        return self._numbers.get(name)

    # Between the steps

    @torch.inference_mode(False)
    @torch.no_grad()
    def obey(self, message: StepMessage) -> None:
        """Begin a step as the scheduler says."""
        self._close_step(message.lengths)
        self._finish_copies()
        for key in message.reclaimed:
            self.manager.reclaim(self._sequences[key])
        for start in message.starts:
            self._sequences[start.key] = self._start(start)
        for key in message.dropped:
            self.manager.free(self._sequences.pop(key))
        for row in message.rows.values():
            if row.lent and not self._sequences[row.key].strips:
                self._take_over(row)
            elif row.copy:
                self._copies.append(self._begin_copy(row))
        self._owners = {block: row for row in message.rows.values() for block in row.tail}

    def _start(self, start: Start) -> Sequence:
        if start.source is None:
            return self.manager.create()
        return self.manager.branch(self._sequences[start.source], start.blocks * self.block_size)

    def _take_over(self, row: Row) -> None:
        """Attend for a request from now on. All but its last blocks is on the host."""
        sequence, manager, size = self._sequences[row.key], self.manager, self.manager.config.block_size
        first = row.copy_from if row.copy else row.computed // self.block_size
        self._crop(sequence, first)
        if sequence.length != first * self.block_size:
            raise IntegrityError(f"the host has {sequence.length} tokens of a request that needs {first * self.block_size}")
        full, left = divmod(row.computed - sequence.length, size)
        blocks = torch.tensor(row.copy + row.tail[: bool(row.computed % self.block_size)], dtype=torch.int64)
        parts = torch.stack([self._reader.read(cache, blocks) for cache in self._caches])
        if full:
            adoption = manager.adopt(sequence, full)
            for layer, part in enumerate(parts):
                adoption.write(layer, part[:full])
            adoption.commit()
        strips = self._pool.strips_of(row.lent)[: manager.config.budget_blocks]  # the last block may have some to spare
        manager.lend(sequence, strips, parts[:, full] if left else None, left)

    def _crop(self, sequence: Sequence, blocks: int) -> None:
        """Forget what a sequence has beyond some device blocks: it will be computed again."""
        if sequence.length > blocks * self.block_size:
            self.manager.crop(sequence, blocks * self.block_size)

    @property
    def _pool(self) -> LentPool:
        pool = self.manager.rooms.pool
        assert isinstance(pool, LentPool)
        return pool

    # Copies to the host

    def _begin_copy(self, row: Row) -> _Copy:
        sequence, parts = self._sequences[row.key], self.block_size // self.manager.config.block_size
        self._crop(sequence, row.copy_from)
        return _Copy(row.key, self.manager.adopt(sequence, len(row.copy) * parts), torch.tensor(row.copy))

    def copy_layer(self, name: str) -> None:
        """Copy what is full now of a layer to the host, in the background."""
        number = self._numbers.get(name)
        if number is not None and self._copies:
            work = _CopyLayer(number, self._caches[number], self._reader, self._copies)
            self._tickets.append(self.manager.scheduler.submit(work))

    def _finish_copies(self) -> None:
        for ticket in self._tickets:
            ticket.wait()
        for copy in self._copies:
            copy.adoption.commit()
            self._stored[copy.key] = self._sequences[copy.key].length // self.block_size
        self._tickets, self._copies = [], []

    def take_stored(self) -> dict[int, int]:
        """Device blocks' worth of tokens on the host, by key, where that has changed since the last call."""
        stored, self._stored = self._stored, {}
        return stored

    # The step

    def plan(self, starts: list[int], lengths: list[int], tables: torch.Tensor) -> Plan:
        """Divide a batch, and open the step of the requests that OasisKV attends to.

        Args:
            starts: first token of every request in the batch, and the end of the last one.
            lengths: tokens of every request after this step.
            tables: `(requests, blocks)` device blocks.
        """
        plan = Plan(num_tokens=starts[-1], last_position=lengths[-1] - 1)
        handed: list[tuple[Row, int]] = []
        watched: list[tuple[int, int]] = []
        counts = [end - start for start, end in pairwise(starts)]
        befores = [length - tokens for length, tokens in zip(lengths, counts, strict=True)]
        for number, (length, tokens, row) in enumerate(zip(lengths, counts, self.rows_at(tables, befores), strict=True)):
            if not tokens:
                continue
            if row is not None and (row.computed, row.tokens) != (length - tokens, tokens):
                raise IntegrityError(
                    f"a request has {tokens} tokens after {length - tokens}; the scheduler says {row.tokens} at {row.computed}"
                )
            if row is not None and row.lent:
                handed.append((row, starts[number]))
                continue
            plan.dense.append(number)
            if row is not None and (row.prompt or row.computed % _WATCHED_EVERY == 0):
                plan.watched.append(self._sequences[row.key])
                plan.counts.append(tokens)
                plan.starts.append(row.computed)
                watched.append((starts[number], tokens))
        plan.watched_tokens = rows_of(watched, tables.device)
        if handed:
            self._open_step([row for row, _ in handed])
            plan.step = self._step
            plan.hinted = not any(row.prompt for row, _ in handed)
            plan.ours = rows_of([(start, row.tokens) for row, start in handed], tables.device)
        return plan

    def rows_at(self, tables: torch.Tensor, positions: list[int]) -> list[Row | None]:
        """The scheduler's rows of a batch's requests, known by the device block that holds a position: the first of a step, or
        one that a draft model has run ahead to. `None` for requests that are not recorded.

        Args:
            tables: `(requests, blocks)` device blocks, with more rows perhaps.
        """
        if not self._owners:
            return [None] * len(positions)
        columns = torch.tensor(positions, device=tables.device).clamp(min=0) // self.block_size
        blocks = tables[: len(positions)].gather(1, columns[:, None].to(torch.int64))[:, 0].tolist()
        return [self._owners.get(block) for block in blocks]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _open_step(self, rows: list[Row]) -> None:
        sequences = [self._sequences[row.key] for row in rows]
        self._step = self.manager.begin_step(
            sequences, [row.tokens for row in rows], [row.drafts for row in rows], [row.prompt for row in rows]
        )
        self._step_keys = [row.key for row in rows]

    def watch(self, number: int, plan: Plan, queries: torch.Tensor, scale: float) -> None:
        """Let the manager see the queries of requests that are recorded, in a batch."""
        assert plan.watched_tokens is not None
        own = queries[plan.watched_tokens]
        self.manager.observe(number, plan.watched, own, plan.counts, plan.starts, scale)

    @property
    def checks_stream(self) -> bool:
        """Whether it is not known yet if the residual stream makes the queries of the layers."""
        return self.stream is not None and not self.stream.checked

    def check_stream(self, number: int, plan: Plan, queries: torch.Tensor) -> None:
        """Until the residual stream is known to make a layer's queries, look whether it made those of a batch."""
        stream = self.stream
        if stream is None or stream.checked or len(queries) != plan.num_tokens:  # longer ones are padded
            return
        if not stream.check(number, queries, plan.last_position):
            self._end_hints()

    def _end_hints(self) -> None:
        assert self.stream is not None
        self.stream.detach()
        self.stream = None
        self.manager.rooms.predictor.bind(None)

    def hint(self, number: int, plan: Plan, project: Callable[[Rows], torch.Tensor]) -> None:
        """Let the manager choose blocks for a layer to come, by queries that are projected for some rows of the batch."""
        if plan.step is not None and plan.hinted:
            assert plan.ours is not None
            plan.step.hint(number, project(plan.ours))

    def attend(
        self, number: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of the requests that were handed over, as `Step.attend`. A step without drafts ends with its last layer."""
        step = self._step
        assert step is not None
        output = step.attend(number, queries, keys, values, scale)
        if step.complete and step.certain:
            self._close_step({})
        return output

    @torch.inference_mode(False)
    @torch.no_grad()
    def _close_step(self, lengths: dict[int, int]) -> None:
        """Keep the rows that were accepted: all of a step without drafts, else up to the lengths that the scheduler knows."""
        step, self._step = self._step, None
        if step is None:
            return
        if step.certain:
            step.commit()
        else:
            step.commit([lengths[key] - self._sequences[key].length for key in self._step_keys])

    def report(self) -> dict[str, float]:
        """What the manager has done since the last call, and holds now, by the names of the metrics."""
        counters = self.manager.rooms.counters.totals()
        totals = {name: getattr(counters, name) for name in _COUNTED}
        grown = {name: value - self._reported.get(name, 0) for name, value in totals.items()}
        self._reported = totals
        held = self.manager.rooms.arena.used_bytes
        return {**{name: value for name, value in grown.items() if value}, "arena_bytes": held}

    def close(self) -> None:
        """Give everything back."""
        self.manager.close()


@dataclass
class _Copy:
    """Blocks of a request that are on their way to the host."""

    key: int
    adoption: Adoption
    blocks: torch.Tensor


class _CopyLayer(LayerWork):
    """The background work that copies the blocks of one layer."""

    def __init__(self, layer: int, cache: torch.Tensor, reader: BlockReader, copies: list[_Copy]) -> None:
        self.layer = layer
        self._cache = cache
        self._reader = reader
        self._copies = copies

    def predict(self) -> None:
        """Nothing to predict."""

    def select(self) -> None:
        """Nothing to select."""

    def mark(self) -> None:
        """Nobody sees these blocks yet."""

    def transfer(self) -> None:
        """Read the blocks and write them to the arena."""
        for copy in self._copies:
            copy.adoption.write(self.layer, self._reader.read(self._cache, copy.blocks))

    def pending_blocks(self) -> int:
        """Blocks that attention may miss: none, since vLLM has them."""
        return 0


def _pool(shape: ModelShape, block_size: int, caches: list[torch.Tensor]) -> LentPool:
    """The caches' memory as slots. All layers lie in one allocation."""
    everything = storage_of(caches[0])
    slot = 2 * block_size * shape.head_dim
    slots = everything[: everything.numel() // slot * slot].view(-1, 2, block_size, shape.head_dim)
    first = caches[0]
    offsets = [cache.storage_offset() // slot for cache in caches]
    return LentPool(shape, block_size, slots, offsets, first.shape[0], first.stride(0) // slot, first.shape[2])
