"""How a transformers model makes queries, and the residual stream that is handed to the predictor.

The guess is checked before it is trusted: in the first forward the projection of what really enters each layer must give the
queries that the layer really makes. A model that makes them in another way simply goes without hints.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oasiskv.predictors.layer_ahead import LAYERS_AHEAD, PROJECTION_TOLERANCE, projection_error
from oasiskv.types import MAX_STEP_ROWS, ModelShape

from .binding import decoder_layers


class HFProjection:
    """A `QueryProjection` by the model's own modules: input norm, query projection, and query norm where there is one."""

    def __init__(self, layers: list[nn.Module], shape: ModelShape) -> None:
        self._layers = [weakref.ref(layer) for layer in layers]
        self._heads, self._head_dim = shape.query_heads, shape.head_dim

    @staticmethod
    def of(model: PreTrainedModel, full: list[int], shape: ModelShape) -> HFProjection | None:
        """The projection of the full-attention layers, or `None` if the model is built differently."""
        layers = decoder_layers(model)
        if layers is None or shape.rotary is None:
            return None
        chosen = [layers[index] for index in full]
        wanted = ("input_layernorm", "self_attn")
        if not all(hasattr(layer, name) for layer in chosen for name in wanted):
            return None
        if not all(hasattr(layer.self_attn, "q_proj") or hasattr(layer.self_attn, "qkv_proj") for layer in chosen):
            return None
        return HFProjection(chosen, shape)

    def project(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """`(..., hidden_size)` to `(..., query_heads, head_dim)` before rotary embedding."""
        module: Any = self._layers[layer]()
        attention = module.self_attn
        normed = module.input_layernorm(hidden)
        width = self._heads * self._head_dim
        if hasattr(attention, "q_proj"):
            flat = attention.q_proj(normed)
        else:
            flat = nn.functional.linear(normed, attention.qkv_proj.weight[:width])
        queries = flat.view(*hidden.shape[:-1], self._heads, self._head_dim)
        return attention.q_norm(queries) if hasattr(attention, "q_norm") else queries


class ResidualStream:
    """What enters the decoder layers in the forwards of a cache. It is shown for each full-attention layer, some layers ahead
    of it, in forwards of at most `most_rows` rows (longer ones are prompts)."""

    def __init__(
        self,
        full: list[int],
        projection: HFProjection,
        most_rows: int = MAX_STEP_ROWS,
    ) -> None:
        self.checked = False
        self._most_rows = most_rows
        self._projection = projection
        self._full = full
        self._targets = {index - LAYERS_AHEAD: number for number, index in enumerate(full) if index >= LAYERS_AHEAD}
        self._seen: dict[int, torch.Tensor] = {}

    def see(self, index: int, hidden: torch.Tensor, show: Callable[[int, torch.Tensor], None]) -> None:
        """`(batch, rows, hidden_size)` enters decoder layer `index`; `show` gets the layer that it is a hint for, and it."""
        if not self.checked:
            self._seen[index] = hidden[-1, -1].detach()
        elif index in self._targets and hidden.shape[1] <= self._most_rows:
            show(self._targets[index], hidden)

    @torch.no_grad()
    def check(self, layer: int, queries: torch.Tensor, position: int, shape: ModelShape) -> bool:
        """Whether the projection gives the queries `(query_heads, head_dim)` that full-attention layer `layer` really made."""
        hidden = self._seen.pop(self._full[layer], None)
        if hidden is None or shape.rotary is None:
            return False
        try:
            raw = self._projection.project(layer, hidden)
        except RuntimeError:  # shapes that do not fit: this model's projection does more than we know
            return False
        self.checked = layer == shape.num_layers - 1
        return projection_error(raw, queries, position, shape.rotary) <= PROJECTION_TOLERANCE

    def forget(self) -> None:
        """Drop what the last forward has left."""
        self._seen.clear()
