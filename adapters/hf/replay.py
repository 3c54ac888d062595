"""Known texts through a model in few forwards: a prompt once, then any number of configurations on its continuation.

    prompt = read_prompt(model, ids[:, :4096], ["transform"], config)
    replayed = replay(model, [prompt], ids[:, 4096:], config)

See `oasiskv.replay` for what a replay is and what it is not.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from oasiskv import ModelShape, OasisConfig, registry
from oasiskv.abc import KeySample, KeySummary, Predictor
from oasiskv.errors import InputError
from oasiskv.prefill import causal_attention
from oasiskv.replay import History, LayerReport, Replay, Rows
from oasiskv.types import MAX_STEP_ROWS

from .attention import OasisLength, marked
from .binding import Binding, cache_keyword
from .projection import HFProjection, ResidualStream
from .shape import model_shape, stock_layers

RECENT_ROWS = 32
"""Query rows kept of a prompt: what the most curious predictor wants."""


@dataclass
class Prompt:
    """What full attention has left of the first tokens of one text; lists are per full-attention layer.

    Attributes:
        ids: `(1, length)`.
        keys, values: `(kv_heads, length, head_dim)`.
        recent: `(RECENT_ROWS, query_heads, head_dim)`.
        summaries: by name, fitted on this prompt.
        stock: the cache layers that the model's other layers use, by model layer.
        guessable: whether the model makes its queries as `HFProjection` does, which an `OasisCache` checks too.
    """

    ids: torch.Tensor
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    recent: list[torch.Tensor] = field(default_factory=list)
    summaries: dict[str, KeySummary] = field(default_factory=dict)
    stock: dict[int, CacheLayerMixin] = field(default_factory=dict)
    guessable: bool = True

    @property
    def length(self) -> int:
        """Tokens."""
        return int(self.ids.shape[1])

    def history(self, summary: str) -> History:
        """For a replay that ranks by this summary."""
        return History(self.keys, self.values, self.recent, self.summaries[summary])


class _Layer(CacheLayerMixin):
    """Hands the rows of one full-attention layer to the cache."""

    is_compileable = False
    is_sliding = False

    def __init__(self, cache: _ReplayCache, index: int) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self._index = index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to allocate."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ANN401 - the signature of transformers
        **kwargs: Any,  # noqa: ANN401 - the signature of transformers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mark the rows for the attention function."""
        return marked(key_states, self), value_states

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        """`(batch, heads, rows, head_dim)` to `(batch, rows, query_heads, head_dim)`."""
        cache = self._cache()
        if cache is None:
            raise InputError("the cache of this layer is gone")
        scale = query.shape[3] ** -0.5 if scale is None else scale
        return cache.attend(self._index, query, key, value, scale)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys."""
        return OasisLength(self.get_seq_length() + query_length), 0

    def get_seq_length(self) -> int:
        """Tokens before this forward."""
        cache = self._cache()
        return 0 if cache is None else cache.length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class _ReplayCache(Cache):
    """A cache for one forward at a time; what its full-attention layers do depends on `mode`."""

    def __init__(self, model: PreTrainedModel) -> None:
        layers, full = stock_layers(model)
        self.shape = model_shape(model, len(full))
        for number, index in enumerate(full):
            layers[index] = _Layer(self, number)
        super().__init__(layers=layers)
        self.length = 0
        self.prompts: list[Prompt] = []
        self.reading = False
        self.replay: Replay | None = None
        self._scales: dict[int, float] = {}
        self._observers: list[KeySummary] = []
        self._model, self._full = model, full
        self._projection = HFProjection.of(model, full, self.shape)
        self.stream: ResidualStream | None = None

    def watch(self) -> None:
        """Check in the first forward whether the model makes its queries as the projection does."""
        if self._projection is not None:
            self.stream = ResidualStream(self._model, self._full, self._projection, self._show)

    def bind(self, predictor: Predictor) -> None:
        """Let a predictor guess by the residual stream, if it wants to and the prompts' check has allowed it."""
        if self._projection is None or not all(prompt.guessable for prompt in self.prompts):
            return
        predictor.bind(self._projection)
        if predictor.uses_hints:
            self.stream = ResidualStream(self._model, self._full, self._projection, self._show, most_rows=1 << 30)
            self.stream.checked = True

    def _show(self, target: int, hidden: torch.Tensor) -> None:
        if self.replay is not None:
            self.replay.hint(target, hidden)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Replay if there is a replay, else full attention; a prompt that is being read keeps what it sees."""
        if self.replay is not None:
            return self.replay.attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale)
        if self.reading:
            return self._read(layer, query, key, value, scale)
        outputs = []
        for prompt, queries, keys, values in zip(self.prompts, query, key, value, strict=True):
            whole = torch.cat([prompt.keys[layer], keys], 1), torch.cat([prompt.values[layer], values], 1)
            outputs.append(causal_attention(queries, *whole, prompt.length, scale))
        return torch.stack(outputs).transpose(1, 2)

    def _read(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        prompt = self.prompts[0]
        queries = query[0].transpose(0, 1)
        if self.length == 0:
            if self.stream is not None:
                prompt.guessable &= self.stream.check(layer, queries[-1], queries.shape[0] - 1, self.shape)
            prompt.keys.append(key[0])
            prompt.values.append(value[0])
            prompt.recent.append(queries[-RECENT_ROWS:])
        else:
            prompt.keys[layer] = torch.cat([prompt.keys[layer], key[0]], 1)
            prompt.values[layer] = torch.cat([prompt.values[layer], value[0]], 1)
            prompt.recent[layer] = torch.cat([prompt.recent[layer], queries])[-RECENT_ROWS:].clone()
        positions = torch.arange(self.length, self.length + queries.shape[0], device=queries.device)
        for summary in prompt.summaries.values():
            summary.observe(layer, queries, positions)
        return causal_attention(query[0], prompt.keys[layer], prompt.values[layer], self.length, scale).transpose(0, 1)[None]

    def take_stock(self, prompts: list[Prompt]) -> None:
        """Use copies of a prompt's other cache layers."""
        self.prompts, self.length = prompts, prompts[0].length
        if any(prompt.stock for prompt in prompts) and len(prompts) > 1:
            raise InputError("a model with sliding layers replays one text at a time")
        for index, layer in prompts[0].stock.items():
            self.layers[index] = copy.deepcopy(layer)


@torch.no_grad()
def read_prompt(
    model: PreTrainedModel,
    ids: torch.Tensor,
    summaries: Sequences[str],
    config: OasisConfig,
    chunk: int = 2048,
    advance: Callable[[int], None] = lambda _: None,
) -> Prompt:
    """Read `(1, length)` with full attention; keep what a replay needs, and fit and write the summaries of these names.

    `advance` gets the tokens read.
    """
    cache = _ReplayCache(model)
    prompt = Prompt(ids)
    for name in summaries:
        prompt.summaries[name] = registry.load(registry.KEY_SUMMARIES, name, KeySummary)(cache.shape, config)
    cache.prompts, cache.reading = [prompt], True
    cache.watch()
    binding = Binding.of(model)
    binding.attach()
    try:
        for piece in ids.split(chunk, dim=1):
            model(piece, **{cache_keyword(model): cache}, logits_to_keep=1)
            cache.length += piece.shape[1]
            _detach(cache)
            advance(piece.shape[1])
    finally:
        binding.detach()
        _detach(cache)
    prompt.stock = {index: layer for index, layer in enumerate(cache.layers) if not isinstance(layer, _Layer)}
    for summary in prompt.summaries.values():
        _digest(prompt, summary, cache.shape, config)
    return prompt


def _digest(prompt: Prompt, summary: KeySummary, shape: ModelShape, config: OasisConfig) -> None:
    """Fit a summary and write the prompt's blocks, as `settling` does."""
    size = config.block_size
    sealed = prompt.length // size
    first = config.sink_blocks * size
    if not summary.fitted:
        positions = torch.arange(first, sealed * size, device=shape.device)
        summary.fit(
            KeySample(layer, keys[:, first : sealed * size].float(), positions) for layer, keys in enumerate(prompt.keys)
        )
    summary.reserve(sealed)
    pages = torch.arange(sealed, device=shape.device)
    for layer, keys in enumerate(prompt.keys):
        summary.write(layer, pages, keys[:, : sealed * size].unflatten(1, (-1, size)).transpose(0, 1))


def _forward(model: PreTrainedModel, cache: _ReplayCache, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    binding = Binding.of(model)
    binding.attach()
    try:
        logits: torch.Tensor = model(ids, position_ids=positions[None], **{cache_keyword(model): cache}).logits
    finally:
        binding.detach()
        _detach(cache)
    return logits.float()


def _detach(cache: _ReplayCache) -> None:
    """Take the hooks off the model."""
    if cache.stream is not None:
        cache.stream.detach()
        cache.stream = None


@torch.no_grad()
def full_attention(model: PreTrainedModel, prompts: list[Prompt], ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities after each token of the continuations `(B, T)`, by full attention: `(B, T, vocab_size)`."""
    cache = _ReplayCache(model)
    cache.take_stock(prompts)
    positions = torch.arange(cache.length, cache.length + ids.shape[1], device=ids.device)
    return _forward(model, cache, ids, positions).log_softmax(-1)


@dataclass(frozen=True)
class Replayed:
    """What a replay gave.

    Attributes:
        log_probabilities: after each row that stayed, `(B, tokens, vocab_size)`.
        layers: see `LayerReport`.
        rows: the steps.
    """

    log_probabilities: torch.Tensor
    layers: list[LayerReport]
    rows: Rows


@torch.no_grad()
def replay(
    model: PreTrainedModel,
    prompts: list[Prompt],
    ids: torch.Tensor,
    config: OasisConfig,
    rows: Sequences[int] | None = None,
    accepted: Sequences[int] | None = None,
) -> Replayed:
    """Decode the continuations of some prompts, all of one length, under one configuration.

    Args:
        ids: `(B, T)`, the tokens of all rows, in the order of the steps: rejected drafts too.
        rows, accepted: rows of each step and how many of them stay; one row per step if `None`.

    Raises:
        InputError: prompts that are shorter than the budget or differ in length; rows that do not add up; steps that a manager
            would not take for decoding; rejected rows in a model whose other layers would take them for text.
    """
    lengths = {prompt.length for prompt in prompts}
    if len(lengths) != 1 or ids.shape[0] != len(prompts):
        raise InputError(f"a replay needs prompts of one length and a row of ids for each; got lengths {sorted(lengths)}")
    length = lengths.pop()
    if length <= config.budget_tokens:
        raise InputError(f"the prompt has {length} tokens, which the budget of {config.budget_tokens} holds: nothing is sparse")
    counts = list(rows) if rows is not None else [1] * ids.shape[1]
    if sum(counts) != ids.shape[1]:
        raise InputError(f"the steps have {sum(counts)} rows, and ids {ids.shape[1]}")
    stay = list(accepted) if accepted is not None else counts
    _check_steps(counts, stay, hybrid=bool(prompts[0].stock))
    layout = Rows.of(length, counts, stay, prompts[0].keys[0].device)
    shape = model_shape(model, len(prompts[0].keys))
    predictor = registry.load(registry.PREDICTORS, config.predictor, Predictor)(shape, config)
    if predictor.prompt_rows > RECENT_ROWS:
        raise InputError(
            f"predictor {config.predictor!r} wants the last {predictor.prompt_rows} rows of a prompt; a replay keeps {RECENT_ROWS}"
        )
    cache = _ReplayCache(model)
    cache.take_stock(prompts)
    cache.bind(predictor)
    for prompt in prompts:
        prompt.summaries[config.summary].config = config
    histories = [prompt.history(config.summary) for prompt in prompts]
    cache.replay = Replay(shape, config, predictor, histories, layout)
    logits = _forward(model, cache, ids, layout.positions)
    return Replayed(logits[:, layout.kept].log_softmax(-1), cache.replay.reports, layout)


def _check_steps(rows: list[int], accepted: list[int], hybrid: bool) -> None:
    if len(rows) != len(accepted):
        raise InputError(f"rows lists {len(rows)} steps, and accepted {len(accepted)}")
    for number, (count, stay) in enumerate(zip(rows, accepted, strict=True)):
        if not 1 <= count <= MAX_STEP_ROWS:
            raise InputError(f"step {number} has {count} rows; a step that decodes has 1 to {MAX_STEP_ROWS}")
        if not 1 <= stay <= count:
            raise InputError(f"step {number} keeps {stay} of its {count} rows; the first row always stays")
    if hybrid and rows != accepted:
        raise InputError("the sliding layers of a hybrid model would take rejected rows for text; replay it without")
