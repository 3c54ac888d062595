"""The next layer's query is nearly known a layer or two early: the residual stream changes slowly from layer to layer.

The query of layer l is guessed by sending the residual stream that enters layer l - d through layer l's own norm and
projection. What the layers between would have added is missing; most of it is the same from token to token, so a moving average
of the guess's own error, kept per sequence, layer and head, mends it. The guess is made in the step that uses it: nothing is
stale.
"""

from __future__ import annotations

import torch

from .. import ops
from ..abc import QueryProjection
from ..config import OasisConfig
from ..types import ModelShape, Rotary
from .lookahead import Lookahead

KEEP = 0.8
"""Weight of the old average when a new error comes in."""

LAYERS_AHEAD = 2
"""Model layers between the residual stream that a host shows and the layer that it is shown for."""

PROJECTION_TOLERANCE = 0.02
"""Largest `projection_error` of a projection that is trusted; half precision needs some."""


@torch.no_grad()
def projection_error(raw: torch.Tensor, queries: torch.Tensor, position: int, rotary: Rotary) -> float:
    """How far the queries that a projection gives, `(query_heads, head_dim)` before rotary embedding, are from those that the
    layer really made at a position: the norm of the difference, relative to that of the latter."""
    real = queries.float()
    difference = rotary.rotate(raw, torch.tensor(position, device=raw.device)) - real
    return float(difference.norm() / real.norm().clamp(min=torch.finfo(real.dtype).tiny))


class LayerAhead(Lookahead):
    """Scores guessed queries where the host hints at the residual stream; elsewhere it is `lookahead`."""

    def __init__(self, shape: ModelShape, config: OasisConfig) -> None:
        super().__init__(shape, config)
        self._projection: QueryProjection | None = None
        self._errors: list[torch.Tensor] = []
        self._guessed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._turns: tuple[torch.Tensor, torch.Tensor] | None = None

    def bind(self, projection: QueryProjection | None) -> None:
        self.uses_hints = False
        if projection is not None and self.shape.rotary is not None:
            self._projection = projection
            self.uses_hints = True

    def guess(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        assert self._projection is not None
        assert self.shape.rotary is not None
        raw = self._projection.project(layer, hidden)
        self._guessed[layer] = (raw, positions)
        return ops.guess_queries(raw, self._errors[layer], rows, self._turns_at(self.shape.rotary, positions))

    def learn(self, layer: int, queries: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> None:
        guessed, guessed_positions = self._guessed.pop(layer, (queries, positions[:0]))
        rotary = self.shape.rotary
        # A late guess may come in after its step; it teaches nothing about another one.
        if rotary is None or guessed_positions.shape != positions.shape:
            return
        turns = self._turns_at(rotary, positions)
        errors = self._errors[layer]
        ops.learn_errors(errors, rows, queries, guessed, turns, positions, guessed_positions, rotary.scaling, KEEP)

    def _turns_at(self, rotary: Rotary, positions: torch.Tensor) -> torch.Tensor:
        """`Rotary.turns`, made once for all layers of a step, which pass the same tensor."""
        last = self._turns
        if last is None or last[0] is not positions:
            last = self._turns = (positions, rotary.turns(positions))
        return last[1]

    def reserve_rows(self, count: int) -> None:
        size = (count, self.shape.query_heads, self.shape.head_dim)
        errors = [torch.zeros(size, device=self.shape.device) for _ in range(self.shape.num_layers)]
        for table, before in zip(errors, self._errors, strict=False):
            table[: before.shape[0]] = before
        self._errors = errors

    def clear_row(self, row: int) -> None:
        for table in self._errors:
            table[row] = 0

    def copy_row(self, source: int, target: int) -> None:
        for table in self._errors:
            table[target] = table[source]

    def device_bytes(self) -> int:
        return sum(table.numel() * table.itemsize for table in self._errors)
