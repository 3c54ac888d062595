"""Shows the predictor what enters the model's decoder layers, two layers before it is needed (`Step.hint`).

The queries that a layer will make are projected here, in the thread of the forward: vLLM's linear layers may not run in two
threads at once. The projection is checked before it is trusted: in the first forward, what really enters each layer must give
the queries that the layer really makes. A model that makes them in another way simply goes without hints.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from oasiskv.log import event
from oasiskv.predictors.layer_ahead import LAYERS_AHEAD, PROJECTION_TOLERANCE, projection_error
from oasiskv.types import Rotary

from .batch_rows import Rows
from .decoder_layers import decoder_layers_around
from .notices import COST

Show = Callable[[int, Callable[[Rows], torch.Tensor]], None]
"""Is told a layer of ours, and how to project some rows of the batch for it."""


class ResidualStream:
    """Hooks on the decoder layers of a model. As a `QueryProjection` it takes queries that are projected already.

    Args:
        layers: the decoder layer of each of our attention layers.
        ahead: the decoder layer whose input is shown for each of our attention layers; `None` where there is none before it.
        query_heads, head_dim: of a layer, on this worker.
        rotary: of the model's queries.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        ahead: list[nn.Module | None],
        query_heads: int,
        head_dim: int,
        rotary: Rotary,
    ) -> None:
        self.checked = False
        self._layers = layers
        self._heads, self._head_dim, self._rotary = query_heads, head_dim, rotary
        self._show: Show | None = None
        self._entered: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._unchecked = [
            layer.register_forward_pre_hook(self._hook(number, layer, self._enter), with_kwargs=True)
            for number, layer in enumerate(layers)
        ]
        self._handles = [
            layer.register_forward_pre_hook(self._hook(number, layer, self._pass_on), with_kwargs=True)
            for number, layer in enumerate(ahead)
            if layer is not None
        ]

    @staticmethod
    def around(attentions: list[nn.Module], query_heads: int, head_dim: int, rotary: Rotary | None) -> ResidualStream | None:
        """The stream of the model that these attention layers are in, or `None` if it is built differently."""
        places = [decoder_layers_around(attention) for attention in attentions]
        found = [place for place in places if place is not None]
        if rotary is None or len(found) < len(attentions):
            return None
        layers = [stack[index] for stack, index in found]
        if not all(_is_known(layer) for layer in layers):
            return None
        ahead = [stack[index - LAYERS_AHEAD] if index >= LAYERS_AHEAD else None for stack, index in found]
        return ResidualStream(layers, ahead, query_heads, head_dim, rotary)

    def show(self, show: Show) -> None:
        """Tell this from now on what passes, once the projection has been checked."""
        self._show = show

    def project(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """`(..., query_heads * head_dim)` to `(..., query_heads, head_dim)`: the queries that `Show` was given."""
        return hidden.view(*hidden.shape[:-1], self._heads, self._head_dim)

    def check(self, number: int, queries: torch.Tensor, position: int) -> bool:
        """Whether the last row of what entered our layer `number` is projected to the queries `(rows, query_heads, head_dim)`
        that the layer made, as far as is known. One layer that differs ends the hints; they begin when all were right."""
        entered = self._entered.pop(number, None)
        if entered is None:
            return True
        try:
            raw = self.project(number, self._queries(number, *entered))[0]
            error = projection_error(raw, queries[-1], position, self._rotary)
        except RuntimeError:  # shapes that do not fit: this model's layers do more than we know
            error = math.inf
        if not error <= PROJECTION_TOLERANCE:  # nor if it is not a number
            event(logging.WARNING, "hints-off", layer=number, error=error, cost=COST)
            self.detach()
            return False
        self.checked = number == len(self._layers) - 1
        if self.checked:
            _remove(self._unchecked)
            event(logging.INFO, "hints-on", layers=len(self._handles))
        return True

    def detach(self) -> None:
        """Take the hooks off the model."""
        _remove(self._unchecked)
        _remove(self._handles)
        self._entered.clear()
        self._show = None

    def _hook(self, number: int, layer: nn.Module, seen: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(layer.forward).parameters)
        first, second = names.index("hidden_states"), names.index("residual")

        def hook(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            hidden = arguments[first] if first < len(arguments) else keywords["hidden_states"]
            residual = arguments[second] if second < len(arguments) else keywords.get("residual")
            seen(number, hidden, residual)

        return hook

    def _enter(self, number: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        # Copies: norms write in place.
        self._entered[number] = hidden[-1:].clone(), None if residual is None else residual[-1:].clone()

    def _pass_on(self, number: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        if self.checked and self._show is not None:
            self._show(number, lambda rows: self._queries(number, hidden[rows], None if residual is None else residual[rows]))

    def _queries(self, number: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """What our layer would make of a residual stream `(rows, hidden_size)`: `(rows, query_heads * head_dim)`, before rotary
        embedding."""
        layer: Any = self._layers[number]
        attention = layer.self_attn
        stream = hidden.clone() if residual is None else hidden + residual
        made = attention.qkv_proj(layer.input_layernorm(stream))
        flat: torch.Tensor = (made[0] if isinstance(made, tuple) else made)[..., : self._heads * self._head_dim]
        if hasattr(attention, "q_norm"):
            flat = attention.q_norm(self.project(number, flat.contiguous())).flatten(-2)
        return flat


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _is_known(layer: nn.Module) -> bool:
    """Whether a decoder layer has the parts and the arguments that a projection is made of."""
    parts = hasattr(layer, "input_layernorm") and hasattr(getattr(layer, "self_attn", None), "qkv_proj")
    return parts and {"hidden_states", "residual"} <= set(inspect.signature(layer.forward).parameters)
