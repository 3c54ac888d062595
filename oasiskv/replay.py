"""What a configuration would have chosen: the decode steps of known texts, replayed layer by layer instead of step by step.

When the tokens are known in advance, everything a layer needs from all steps of a text is there once the layer below has run,
so all steps go through the model in one forward, and texts of one length side by side. Only the choice of the working set goes
step by step. The choices are made by the same summaries, predictors and ops as in a `Step`, on keys and values that stay whole
on the device: a replay is for measuring quality, not for saving memory. Tests hold it against the manager.

Where a sequence shares its budget, the floor follows what all layers hold after each step, which a replay, layer by layer, does
not know. It is told the floors; `floors_for_budget` says which ones fill the budget at every step. A manager, which learns of a
burst when it has come, stays behind that.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import torch

from . import ops
from .abc import KeySummary, Predictor
from .config import OasisConfig
from .ops.reference_step import need_over_rows, replaced
from .predictors.lookahead import likely_rows
from .refresh import load_limits
from .selected import KEPT_ABOVE, first_floor, usable_slots
from .sequence import Sequence
from .types import EMPTY, ModelShape
from .whole import ROW_CHUNK, WholeIndex, masked_attention
from .working_set import window_start


@dataclass(frozen=True)
class History:
    """A text's prompt as full attention left it; lists are per layer.

    Attributes:
        keys, values: `(kv_heads, length, head_dim)`.
        recent: the queries of the last rows, `(rows, query_heads, head_dim)`, oldest first.
        summary: fitted; page `n` belongs to block `n`. The replay writes the blocks that seal after the prompt.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    recent: list[torch.Tensor]
    summary: KeySummary

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return int(self.keys[0].shape[1])


@dataclass(frozen=True)
class Rows:
    """The rows of all steps: `T` rows in `I` steps; a step's first row is the text's next token, the others are drafts.

    Attributes:
        positions: `(T,)`.
        step: `(T,)`, the step of each row.
        kept: `(T,)`, whether the row became text.
        starts: first row of each step, and the end of the last, `I + 1` numbers.
        lengths: tokens of the text before each step, and after the last, `I + 1` numbers.
    """

    positions: torch.Tensor
    step: torch.Tensor
    kept: torch.Tensor
    starts: list[int]
    lengths: list[int]

    @staticmethod
    def of(length: int, rows: Sequences[int], accepted: Sequences[int], device: torch.device) -> Rows:
        """Steps after `length` tokens: `rows[i]` rows in step `i`, of which the first `accepted[i]` stay."""
        positions: list[int] = []
        step: list[int] = []
        kept: list[bool] = []
        starts, lengths = [0], [length]
        for number, (count, stay) in enumerate(zip(rows, accepted, strict=True)):
            positions.extend(range(lengths[-1], lengths[-1] + count))
            step.extend([number] * count)
            kept.extend([row < stay for row in range(count)])
            starts.append(starts[-1] + count)
            lengths.append(lengths[-1] + stay)
        return Rows(
            torch.tensor(positions, device=device),
            torch.tensor(step, device=device),
            torch.tensor(kept, device=device),
            starts,
            lengths,
        )

    @property
    def num_steps(self) -> int:
        """How many steps there are."""
        return len(self.starts) - 1


@dataclass(frozen=True)
class LayerReport:
    """What happened in one layer.

    Attributes:
        loaded: blocks moved into the working set before each step's attention, `(B, I, kv_heads)`.
        corrected: blocks read in place, `(B, I, kv_heads)`.
        coverage: share of full attention's weights, with the replay's own queries, that fell on what a row saw,
            `(B, T, query_heads)`.
    """

    loaded: torch.Tensor
    corrected: torch.Tensor
    coverage: torch.Tensor


class Replay:
    """Some texts of one length through the decode steps of one configuration.

    Args:
        shape: of the model.
        config: of the manager that is replayed.
        predictor: new, and bound to a projection if it shall use hints.
        histories: one per text, all of one length, longer than the budget.
        rows: see `Rows`.
        floors: `(B, I)`, for a budget per sequence; `None` means those of the first selection.
    """

    def __init__(
        self,
        shape: ModelShape,
        config: OasisConfig,
        predictor: Predictor,
        histories: list[History],
        rows: Rows,
        floors: torch.Tensor | None = None,
    ) -> None:
        self.shape, self.config, self.predictor = shape, config, predictor
        self.reports: list[LayerReport] = []
        self.histories, self.rows = histories, rows
        self._members = torch.arange(len(histories), device=shape.device)
        predictor.reserve_rows(len(histories))
        for row in range(len(histories)):
            predictor.clear_row(row)
        for history in histories:
            history.summary.reserve(rows.lengths[-1] // config.block_size + 1)
        self._hidden: dict[int, torch.Tensor] = {}
        self._low = torch.full((len(histories),), config.sink_blocks, device=shape.device)
        self._expected = self._expectations()
        self._scale = shape.head_dim**-0.5
        self._softcap: float | None = None
        self._first: list[torch.Tensor] = []
        self._floors = floors
        self._held = torch.zeros((len(histories), rows.num_steps), device=shape.device)
        self._masses: list[torch.Tensor] = []
        self._measures = config.budget_per == "sequence" and floors is None

    def _expectations(self) -> list[torch.Tensor]:
        """How likely each row of each step was to be accepted, `(R,)` per step; see `DecodeRows`."""
        learner, weights = Sequence(0), []
        for step in range(self.rows.num_steps):
            count = self.rows.starts[step + 1] - self.rows.starts[step]
            weights.append(torch.tensor([learner.acceptance**row for row in range(count)], device=self.shape.device))
            if count > 1:
                learner.learn_acceptance(self.rows.lengths[step + 1] - self.rows.lengths[step] - 1, count - 1)
        return weights

    def floors_for_budget(self) -> torch.Tensor:
        """Floors by which the texts would hold as many blocks as the budget has slots for, but for the spare ones. More blocks
        are held than exceed the floor, since they stay a while; the share is taken to be that of this replay."""
        assert self._floors is not None
        masses = torch.stack(self._masses).permute(2, 1, 0, 3, 4).flatten(2).sort(dim=2, descending=True).values
        above = (masses > self._floors[..., None]).sum(2)
        wanted = above * usable_slots(self.shape, self.config) / self._held.clamp(min=1)
        rank = wanted.round().long().clamp(min=1, max=masses.shape[2])
        return masses.gather(2, rank[..., None] - 1)[..., 0].clamp(min=0.0)

    def hint(self, layer: int, hidden: torch.Tensor) -> None:
        """The residual stream of all rows, `(B, T, hidden_size)`; as `Step.hint`."""
        if self.predictor.uses_hints:
            self._hidden[layer] = hidden

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, softcap: float | None = None
    ) -> torch.Tensor:
        """The next layer's attention: queries `(B, T, query_heads, head_dim)`, keys and values `(B, T, kv_heads, head_dim)`;
        `scale` and `softcap` as for `Step.attend`, the same for all layers."""
        layer, rows, config = len(self.reports), self.rows, self.config
        self._scale, self._softcap = scale, softcap
        all_keys = torch.cat([torch.stack([history.keys[layer] for history in self.histories]), keys.transpose(1, 2)], 2)
        all_values = torch.cat([torch.stack([history.values[layer] for history in self.histories]), values.transpose(1, 2)], 2)
        start = rows.lengths[0]
        text = torch.cat([all_keys[:, :, :start], all_keys[:, :, start:][:, :, rows.kept]], 2)
        self._summarise(layer, text)
        num_blocks = torch.tensor(rows.lengths[:-1], device=text.device)[rows.step] // config.block_size
        summaries = [history.summary for history in self.histories]
        index = WholeIndex(summaries, layer, text, num_blocks, config.block_size, scale, softcap)
        selected, loaded = self.choose(layer, queries, index, text, scale)
        self._held += (selected >= 0).sum((2, 3))
        corrected = self._correct(queries, index, selected)
        output, coverage = self._attend(queries, all_keys, all_values, torch.cat([selected, corrected], 3))
        self.reports.append(LayerReport(loaded, (corrected >= 0).sum(3), coverage))
        return output

    def _summarise(self, layer: int, text: torch.Tensor) -> None:
        """Digest the blocks that seal after the prompt; `text` is `(B, kv_heads, tokens, head_dim)`."""
        size = self.config.block_size
        first, end = self.rows.lengths[0] // size, text.shape[2] // size
        for history, keys in zip(self.histories, text, strict=True):
            blocks = keys[:, first * size : end * size].unflatten(1, (-1, size)).transpose(0, 1)
            if end > first:
                history.summary.write(layer, torch.arange(first, end, device=text.device), blocks)

    def choose(
        self, layer: int, queries: torch.Tensor, index: WholeIndex, text: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The selected blocks of each step, `(B, I, kv_heads, C)`, and how many were new, `(B, I, kv_heads)`."""
        rows, config, predictor = self.rows, self.config, self.predictor
        if not self._first:
            self._begin(scale)
        resident = self._first[layer]
        stamps = torch.zeros_like(resident)
        assert self._floors is not None
        hidden = self._hidden.pop(layer, None)
        early = predictor.foreground or hidden is not None
        guesses = queries if hidden is None else self._guess(layer, hidden, queries)
        mass = predictor.score(layer, guesses, index)
        most, pooled = load_limits(config, predictor, self.shape.kv_heads)
        selected, loaded, masses = [], [], []
        moved = torch.zeros(resident.shape[:2], dtype=torch.int64, device=resident.device)
        for step in range(rows.num_steps):
            own = slice(rows.starts[step], rows.starts[step + 1])
            before, after = rows.lengths[step], rows.lengths[step + 1]
            if early:
                weights = likely_rows(self._expected[step])
            else:
                weights = rows.kept[own].float()
                selected.append(resident)
                loaded.append(moved)
            high = window_start(config, before if early else after)
            weights = weights.expand(len(self.histories), -1)
            score = predictor.aggregate(layer, mass[:, own, :, : before // config.block_size], weights, self._members)
            bounds = self._low, torch.full_like(self._low, high)
            if self._measures:
                nothing = torch.full_like(resident[..., :1], EMPTY)
                masses.append(ops.top_missing(score, nothing, *bounds, config.selected_places)[1])
            places, blocks, resident, stamps, _ = ops.select(
                score,
                resident,
                stamps,
                *bounds,
                self._floors[:, step],
                step + 1,
                most,
                pooled,
                config.swap_gain * self.shape.group_size,
                KEPT_ABOVE,
            )
            resident = replaced(resident, places, blocks)
            moved = (places >= 0).sum(2)
            if early:
                selected.append(resident)
                loaded.append(moved)
        if self._measures:
            self._masses.append(torch.stack(masses))
        return torch.stack(selected, 1), torch.stack(loaded, 1)

    def _begin(self, scale: float) -> None:
        """The first selected blocks of all layers, `(B, kv_heads, C)` each; see `settling`."""
        config = self.config
        best = [self._best(layer, scale) for layer in range(self.shape.num_layers)]
        blocks, mass = (torch.stack(part) for part in zip(*best, strict=True))
        if config.budget_per == "head":
            self._floors = torch.full_like(self._held, -1.0)
        elif self._floors is None:
            first = torch.stack([first_floor(self.shape, config, mass[:, text]) for text in range(mass.shape[1])])
            self._floors = first[:, None].expand_as(self._held)
        blocks = blocks.masked_fill(mass <= self._floors[:, :1, None], EMPTY)
        padding = config.selected_places - blocks.shape[3]
        self._first = list(torch.nn.functional.pad(blocks, (0, padding), value=EMPTY))

    def _best(self, layer: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        config, length = self.config, self.rows.lengths[0]
        first = []
        for number, history in enumerate(self.histories):
            recent = history.recent[layer][None, -min(self.predictor.prompt_rows, length) :]
            sealed = torch.full(recent.shape[1:2], length // config.block_size, device=recent.device)
            keys = history.keys[layer][None, :, :length]
            index = WholeIndex([history.summary], layer, keys, sealed, config.block_size, scale, self._softcap)
            mass = self.predictor.score(layer, recent, index)
            first.append(self.predictor.begin(layer, mass, self._members[number : number + 1]))
        score = torch.cat(first)
        nothing = torch.full((*score.shape[:2], 1), EMPTY, device=score.device)
        high = torch.full_like(self._low, window_start(config, length))
        return ops.top_missing(score, nothing, self._low, high, config.selected_places)

    def _guess(self, layer: int, hidden: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        guesses = []
        for start, end in zip(self.rows.starts[:-1], self.rows.starts[1:], strict=True):
            positions = self.rows.positions[start:end].expand(len(self.histories), -1)
            guesses.append(self.predictor.guess(layer, hidden[:, start:end], positions, self._members))
            self.predictor.learn(layer, queries[:, start:end], positions, self._members)
        return torch.cat(guesses, 1)

    def _correct(self, queries: torch.Tensor, index: WholeIndex, selected: torch.Tensor) -> torch.Tensor:
        """The blocks that each step reads in place, `(B, I, kv_heads, m)`; see `DecodeRows`."""
        rows, config = self.rows, self.config
        texts, steps, heads = selected.shape[:3]
        if not config.correction_blocks or self.predictor.foreground:
            return selected.new_empty((texts, steps, heads, 0))
        mass = index.summary_mass(queries)
        by_step = [
            need_over_rows(mass[:, start:end], weights.expand(texts, -1))
            for start, end, weights in zip(rows.starts[:-1], rows.starts[1:], self._expected, strict=True)
        ]
        flat = torch.stack(by_step, 1).flatten(0, 1)
        high = torch.tensor([window_start(config, length) for length in rows.lengths[:-1]], device=flat.device).repeat(texts)
        low = torch.full_like(high, config.sink_blocks)
        counts = torch.tensor(rows.starts[1:], device=flat.device) - torch.tensor(rows.starts[:-1], device=flat.device)
        most = config.correction_blocks * counts.repeat(texts)[:, None, None]
        blocks, gain = ops.top_missing(flat, selected.flatten(0, 1), low, high, int(most.max()))
        wanted = (gain > config.correction_gain * self.shape.group_size) & (
            torch.arange(gain.shape[2], device=gain.device) < most
        )
        blocks = torch.where(wanted, blocks, EMPTY)
        return blocks.view(texts, steps, heads, -1)

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the blocks of each step, `(B, I, kv_heads, K)`, and what every row sees anyway."""
        rows, config = self.rows, self.config
        start, size = rows.lengths[0], config.block_size
        position = torch.cat([torch.arange(start, device=keys.device), rows.positions])
        number = position // size
        window = torch.tensor([window_start(config, length) for length in rows.lengths[:-1]], device=keys.device)
        seen = torch.zeros((*blocks.shape[:3], int(number.max()) + 2), dtype=torch.bool, device=keys.device)
        seen.scatter_(3, torch.where(blocks >= 0, blocks, seen.shape[3] - 1), True)
        outputs, coverages = [], []
        for first in range(0, rows.positions.shape[0], ROW_CHUNK):
            own = slice(first, first + ROW_CHUNK)
            step = rows.step[own]
            # Causal in the text, and among the rows of one step; rejected drafts are seen by their own step only.
            same = rows.step == step[:, None]
            told = torch.cat([torch.ones((len(step), start), dtype=torch.bool, device=keys.device), rows.kept | same], 1)
            told &= position <= rows.positions[own][:, None]
            told[:, start:] &= rows.step <= step[:, None]
            base = (number < config.sink_blocks) | (number >= window[step][:, None])
            for text in range(queries.shape[0]):
                visible = told[:, None] & (base[:, None] | seen[text, step][..., number])
                output, coverage = masked_attention(
                    queries[text, own],
                    keys[text],
                    values[text],
                    told,
                    visible.transpose(0, 1),
                    self._scale,
                    self._softcap,
                )
                outputs.append(output)
                coverages.append(coverage)
        texts = queries.shape[0]
        chunks = range(len(outputs) // texts)
        joined = [
            torch.stack([torch.cat([parts[chunk * texts + text] for chunk in chunks]) for text in range(texts)])
            for parts in (outputs, coverages)
        ]
        return joined[0].to(queries.dtype), joined[1]
