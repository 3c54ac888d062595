"""The cache that a model runs with while a prompt is read, full attention is asked, or a configuration is replayed."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from oasiskv.abc import KeySummary, Predictor
from oasiskv.errors import InputError
from oasiskv.prefill import causal_attention
from oasiskv.replay import History, Replay

from .attention import OasisLength, marked
from .binding import BoundCache
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


class ReplayLayer(CacheLayerMixin):
    """Hands the rows of one full-attention layer to the cache."""

    is_compileable = False
    is_sliding = False

    def __init__(self, cache: ReplayCache, index: int) -> None:
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
        softcap: float | None,
    ) -> torch.Tensor:
        """`(batch, heads, rows, head_dim)` to `(batch, rows, query_heads, head_dim)`."""
        cache = self._cache()
        if cache is None:
            raise InputError("the cache of this layer is gone")
        scale = query.shape[3] ** -0.5 if scale is None else scale
        return cache.attend(self._index, query, key, value, scale, softcap)

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


class ReplayCache(BoundCache):
    """A cache for one forward at a time; see `attend`."""

    def __init__(self, model: PreTrainedModel) -> None:
        layers, full = stock_layers(model)
        self.shape = model_shape(model, full)
        for number, index in enumerate(full):
            layers[index] = ReplayLayer(self, number)
        super().__init__(layers=layers)
        self.length = 0
        self.prompts: list[Prompt] = []
        self.reading = False
        self.replay: Replay | None = None
        self._full = full
        self._projection = HFProjection.of(model, full, self.shape)
        self.stream: ResidualStream | None = None

    def watch(self) -> None:
        """Check in the first forward whether the model makes its queries as the projection does."""
        if self._projection is not None:
            self.stream = ResidualStream(self._full, self._projection)

    def bind(self, predictor: Predictor) -> None:
        """Let a predictor guess by the residual stream, if it wants to and the prompts' check has allowed it."""
        if self._projection is None or not all(prompt.guessable for prompt in self.prompts):
            return
        predictor.bind(self._projection)
        if predictor.uses_hints:
            self.stream = ResidualStream(self._full, self._projection, most_rows=1 << 30)
            self.stream.checked = True

    def see(self, index: int, hidden: torch.Tensor) -> None:
        """`(batch, rows, hidden_size)` enters decoder layer `index`."""
        if self.stream is not None:
            self.stream.see(index, hidden, self._show)

    def _show(self, target: int, hidden: torch.Tensor) -> None:
        if self.replay is not None:
            self.replay.hint(target, hidden)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Replay if there is a replay, else full attention; a prompt that is being read keeps what it sees."""
        if self.replay is not None:
            return self.replay.attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale, softcap)
        if self.reading:
            return self._read(layer, query, key, value, scale, softcap)
        outputs = []
        for prompt, queries, keys, values in zip(self.prompts, query, key, value, strict=True):
            whole = torch.cat([prompt.keys[layer], keys], 1), torch.cat([prompt.values[layer], values], 1)
            outputs.append(causal_attention(queries, *whole, prompt.length, scale, softcap))
        return torch.stack(outputs).transpose(1, 2)

    def _read(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
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
        keys, values = prompt.keys[layer], prompt.values[layer]
        return causal_attention(query[0], keys, values, self.length, scale, softcap).transpose(0, 1)[None]

    def take_stock(self, prompts: list[Prompt]) -> None:
        """Use copies of a prompt's other cache layers."""
        self.prompts, self.length = prompts, prompts[0].length
        if any(prompt.stock for prompt in prompts) and len(prompts) > 1:
            raise InputError("a model with sliding layers replays one text at a time")
        for index, layer in prompts[0].stock.items():
            self.layers[index] = copy.deepcopy(layer)
