"""The rows of sequences that decode or verify: attention over the working set, and the work that renews it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import layout, ops
from .correction import Correction
from .finite import finite_rows
from .log import event
from .predictors.lookahead import likely_rows
from .refresh import LayerIndex, Refresh, SparseRows, load_limits
from .sealing import Sealing
from .sequence import Phase, Sequence
from .types import EMPTY
from .working_set import place_of, window_start

if TYPE_CHECKING:
    from .manager import KVManager


class DecodeRows:
    """Everything that is the same for all layers of a step is computed once, here; `attend` is tensor work only."""

    def __init__(
        self,
        manager: KVManager,
        sequences: list[Sequence],
        num_tokens: list[int],
        num_drafts: list[int],
        offsets: list[int],
        certain: bool,
    ) -> None:
        self.sequences = sequences
        self._manager = manager
        self._rooms = manager.rooms
        self._num_tokens = num_tokens
        self._num_drafts = num_drafts
        self._certain = certain
        device = manager.shape.device
        self.packed = torch.tensor(
            [offset + row for offset, tokens in zip(offsets, num_tokens, strict=True) for row in range(tokens)], device=device
        )
        self._rows = torch.tensor([sequence.row for sequence in sequences], device=device)
        self._plan_rows()
        self._plan_tables()
        self._sealing: Sealing | None = None
        self._waiting: dict[int, tuple[LayerIndex, torch.Tensor]] = {}
        self._hinted: set[int] = set()
        if certain:
            self._sealing = Sealing(manager, sequences, num_tokens)
            self._plan_next(num_tokens)

    @property
    def pages(self) -> list[int]:
        """That were taken for blocks which seal, and belong to no sequence yet."""
        return [page for pages in self._sealing.new_pages for page in pages] if self._sealing is not None else []

    # Planning, once per step

    def _plan_rows(self) -> None:
        """Where each row goes: `(S, R)` positions, and the slot and offset of every packed row."""
        config, device = self._rooms.config, self._rooms.shape.device
        size = config.block_size
        most = max(self._num_tokens)
        self._ragged = any(tokens != most for tokens in self._num_tokens)
        positions: list[list[int]] = []
        strips: list[int] = []
        offsets: list[int] = []
        for sequence, tokens in zip(self.sequences, self._num_tokens, strict=True):
            dense = sequence.phase is Phase.DENSE
            own = range(sequence.length, sequence.length + tokens)
            positions.append([*own, *[EMPTY] * (most - tokens)])
            strips.extend(sequence.strips[place_of(config, position // size, dense)] for position in own)
            offsets.extend(position % size for position in own)
        self._positions = torch.tensor(positions, device=device)
        self._slots = layout.pool_slots(self._rooms, strips)
        self._offsets = torch.tensor(offsets, device=device)

    def _plan_tables(self) -> None:
        """The part of the block tables that all layers share, and the tables of the sparse sequences."""
        config, sets, shape = self._rooms.config, self._rooms.sets, self._rooms.shape
        size, device = config.block_size, shape.device
        blocks, places = [], []
        for sequence, tokens in zip(self.sequences, self._num_tokens, strict=True):
            last = (sequence.length + tokens - 1) // size
            if sequence.phase is Phase.DENSE:
                blocks.append(list(range(last + 1)))
                places.append(blocks[-1])
            else:
                window = range(window_start(config, sequence.length), last + 1)
                blocks.append([*range(min(config.sink_blocks, last + 1)), *window])
                places.append([place_of(config, block, False) for block in blocks[-1]])
        width = max(map(len, blocks))
        pad = [[EMPTY] * (width - len(row)) for row in blocks]
        self._base_blocks = torch.tensor([row + more for row, more in zip(blocks, pad, strict=True)], device=device)
        place = torch.tensor([row + [0] * len(more) for row, more in zip(places, pad, strict=True)], device=device)
        slots = self._rooms.pool.slots_of(sets.strips[self._rows].gather(1, place)).transpose(1, 2)
        self._base_slots = torch.where(self._base_blocks[:, None] >= 0, slots, EMPTY).contiguous()
        self._base_blocks = self._base_blocks[:, None].repeat(1, shape.kv_heads, 1)

        members = [number for number, sequence in enumerate(self.sequences) if self._selects(sequence)]
        self._members = torch.tensor(members, dtype=torch.int64, device=device)
        self._all_sparse = len(members) == len(self.sequences)
        self._sparse: SparseRows | None = None
        self._correction: Correction | None = None
        self._dense_rows = self._rows
        if not members:
            return
        self._sparse = layout.sparse_rows(self._rooms, [self.sequences[number] for number in members])
        dense = [number for number in range(len(self.sequences)) if number not in members]
        self._dense_rows = self._rows[dense]
        self._dense_members = torch.tensor(dense, dtype=torch.int64, device=device)
        self._low = torch.full((len(members),), config.sink_blocks, device=device)
        self._high = torch.tensor([window_start(config, self.sequences[number].length) for number in members], device=device)
        expected = [self._expectation(number) for number in members]
        self._expected = torch.tensor(expected, dtype=torch.float32, device=device)
        self._likely = likely_rows(self._expected)
        self._sparse_positions = self._gather(self._positions).clamp(min=0)
        if config.correction_blocks and not self._rooms.predictor.foreground:
            self._correction = Correction(
                self._rooms, self._sparse, self._members, self._expected, self._low, self._high, self._positions
            )

    def _selects(self, sequence: Sequence) -> bool:
        """Whether there are summaries to select blocks by. A sparse sequence of a lent pool may be too short for that."""
        return sequence.phase is Phase.SPARSE and self._rooms.summary.fitted and bool(sequence.pages)

    def _expectation(self, number: int) -> list[float]:
        """How likely each row of a sequence is to be accepted."""
        tokens, certain = self._num_tokens[number], self._num_tokens[number] - self._num_drafts[number]
        accepted = self.sequences[number].acceptance
        padding = [0.0] * (max(self._num_tokens) - tokens)
        return [accepted ** max(0, row + 1 - certain) for row in range(tokens)] + padding

    def _plan_next(self, accepted: list[int]) -> None:
        """What work for the next step has to know: `accepted[i]` rows of each sequence stay."""
        if self._sparse is None:
            return
        config, device = self._rooms.config, self._rooms.shape.device
        kept = torch.tensor(accepted, device=device)[self._members]
        self._kept_rows = (torch.arange(max(self._num_tokens), device=device) < kept[:, None]).float()
        nexts = [window_start(config, self.sequences[number].length + accepted[number]) for number in self._members.tolist()]
        self._next_high = torch.tensor(nexts, device=device)

    # Attention, once per layer

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """As `Step.attend`, for the rows of these sequences."""
        rooms = self._rooms
        pool = rooms.pool.slots
        self._await(layer)
        ops.append_rows(pool, keys, values, self._slots[layer], self._offsets)
        if self._certain and self._sealing is not None:
            self._sealing.seal(layer)
        padded = self._pad(queries)
        blocks, slots = self._base_blocks, self._base_slots[layer]
        if self._sparse is None:
            output = ops.paged_attention(padded, pool, slots, blocks, None, None, None, self._positions, scale, softcap)[0]
        else:
            output = self._attend_sparse(layer, self._sparse, padded, slots, blocks, scale, softcap)
        self._remember(layer, padded)
        return self._unpad(output)

    def _attend_sparse(
        self,
        layer: int,
        sparse: SparseRows,
        padded: torch.Tensor,
        slots: torch.Tensor,
        blocks: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention where some sequences are sparse, and the work that follows from it."""
        rooms = self._rooms
        queries = self._gather(padded)
        index = LayerIndex(rooms, layer, sparse.pages, sparse.num_blocks, scale)
        if rooms.predictor.foreground:
            self._refresh_now(layer, index, queries)
        if self._correction is not None:
            output = self._correction.attend(layer, padded, slots, blocks, index.summary_logits(queries), scale, softcap)
        else:
            selected, there = rooms.sets.selected.read(layer, sparse.rows)
            blocks = torch.cat([blocks, self._spread(selected)], dim=2)
            slots = torch.cat([slots, self._spread(there)], dim=2)
            pool, positions = rooms.pool.slots, self._positions
            output = ops.paged_attention(padded, pool, slots, blocks, None, None, None, positions, scale, softcap)[0]
        if layer in self._hinted:
            rooms.predictor.learn(layer, queries, self._sparse_positions, sparse.rows)
        elif not rooms.predictor.foreground:
            self._later(layer, index, queries)
        return output

    def hint(self, layer: int, hidden: torch.Tensor) -> None:
        """As `Step.hint`, for the rows of these sequences."""
        if self._sparse is None or not self._rooms.predictor.uses_hints:
            return
        self._hinted.add(layer)
        padded = self._gather(self._pad(hidden))
        index = LayerIndex(self._rooms, layer, self._sparse.pages, self._sparse.num_blocks, self._rooms.sets.scales[layer])
        rows, positions, predictor = self._sparse.rows, self._sparse_positions, self._rooms.predictor
        work = self._refresh(
            layer,
            index,
            lambda: predictor.guess(layer, padded, positions, rows),
            self._likely,
            self._high,
        )
        self._manager.tickets[layer] = self._manager.scheduler.submit(work)

    def _await(self, layer: int) -> None:
        """Wait for the last step's work on this layer, or go on without it and count what is missing."""
        ticket = self._manager.tickets[layer]
        if ticket is None:
            return
        if self._rooms.config.on_late == "wait":
            self._manager.tickets[layer] = None
            ticket.wait()
            return
        late = ticket.skip()
        if late is not None:
            blocks = late.pending_blocks()
            self._rooms.counters.add(late_layers=1, late_blocks=blocks)
            event(logging.DEBUG, "late", layer=layer, blocks=blocks, step=self._manager.step_number)

    def _gather(self, table: torch.Tensor) -> torch.Tensor:
        """The part of a table of all sequences that belongs to the sparse ones."""
        return table if self._all_sparse else table[self._members]

    def _refresh(
        self,
        layer: int,
        index: LayerIndex,
        queries: Callable[[], torch.Tensor],
        weights: torch.Tensor,
        high: torch.Tensor,
    ) -> Refresh:
        assert self._sparse is not None
        rooms, number = self._rooms, self._manager.step_number
        limits = load_limits(rooms.config, rooms.predictor, rooms.shape.kv_heads)
        return Refresh(rooms, layer, self._sparse, index, queries, weights, self._low, high, number, *limits)

    def _refresh_now(self, layer: int, index: LayerIndex, queries: torch.Tensor) -> None:
        """A foreground predictor chooses this step's own working set, without a cap."""
        work = self._refresh(layer, index, lambda: queries, self._likely, self._high)
        work.predict()
        work.select()
        work.mark()
        work.transfer()

    def _later(self, layer: int, index: LayerIndex, queries: torch.Tensor) -> None:
        """Renew the working set in the background: at once if nothing can be rejected, else when the step is committed."""
        if self._certain:
            self._submit_after(layer, index, queries)
        else:
            self._waiting[layer] = (index, queries)

    def _submit_after(self, layer: int, index: LayerIndex, queries: torch.Tensor) -> None:
        """Submit the work for the next step by the queries of this one."""
        work = self._refresh(layer, index, lambda: queries, self._kept_rows, self._next_high)
        self._manager.tickets[layer] = self._manager.scheduler.submit(work)

    def _remember(self, layer: int, queries: torch.Tensor) -> None:
        """Keep the queries of dense sequences, which choose their first working set; only row 0 is certain to stay."""
        if self._sparse is None:
            kept, positions, rows = queries, self._positions, self._rows
        elif self._all_sparse:
            return
        else:
            kept, positions, rows = queries[self._dense_members], self._positions[self._dense_members], self._dense_rows
        self._rooms.sets.remember_queries(layer, rows, kept[:, :1])
        if not self._rooms.summary.fitted:
            self._rooms.summary.observe(layer, finite_rows(kept[:, 0]), positions[:, 0])

    def _pad(self, packed: torch.Tensor) -> torch.Tensor:
        """`(num_rows, ...)` to `(S, R, ...)`."""
        sequences, rows = self._positions.shape
        if not self._ragged:
            return packed.view(sequences, rows, *packed.shape[1:])
        padded = packed.new_zeros((sequences, rows, *packed.shape[1:]))
        padded[self._positions >= 0] = packed
        return padded

    def _unpad(self, padded: torch.Tensor) -> torch.Tensor:
        return padded[self._positions >= 0] if self._ragged else padded.flatten(0, 1)

    def _spread(self, table: torch.Tensor) -> torch.Tensor:
        """A table of the sparse sequences as one of all sequences, `EMPTY` for the dense ones."""
        if self._all_sparse:
            return table
        wide = table.new_full((len(self.sequences), *table.shape[1:]), EMPTY)
        wide[self._members] = table
        return wide

    # The end

    def prepare_commit(self, accepted: list[int]) -> None:
        """Take the pages that `accepted` rows of each sequence need; may fail, and changes nothing else."""
        self._kept = accepted
        if self._certain:
            return
        before, self._sealing = self._sealing, None
        if before is not None:
            before.release()
        self._sealing = Sealing(self._manager, self.sequences, accepted)

    def commit(self) -> None:
        """Keep the rows that `prepare_commit` was told."""
        rooms, accepted, sealing = self._rooms, self._kept, self._sealing
        assert sealing is not None
        if not self._certain:
            self._plan_next(accepted)
            for layer in range(rooms.shape.num_layers):
                sealing.seal(layer)
        news, sealing.new_pages = sealing.new_pages, []
        drafted = zip(self._num_tokens, self._num_drafts, strict=True)
        for sequence, new, tokens, (rows, drafts) in zip(self.sequences, news, accepted, drafted, strict=True):
            if new:
                sequence.pages.extend(new)
                rooms.sets.set_pages(sequence.row, len(sequence.pages) - len(new), new)
                rooms.arena.sealed(sequence.pages, len(sequence.pages) - len(new))
                if sequence.phase is Phase.SPARSE and rooms.summary.fitted:
                    sequence.summarised = len(sequence.pages)
            sequence.length += tokens
            if drafts:
                sequence.learn_acceptance(tokens - (rows - drafts), drafts)
        for layer, (index, queries) in self._waiting.items():
            self._submit_after(layer, index, queries)

    def abort(self) -> None:
        """Give the new pages back. Rows in tail blocks lie beyond the sequences' lengths, where nothing looks."""
        self._manager.scheduler.drain()
        if self._sealing is not None:
            self._sealing.release()
        for sequence in self.sequences:
            self._rooms.sets.selected.trim(sequence.row, window_start(self._rooms.config, sequence.length))
            layout.trim(self._rooms, sequence)
