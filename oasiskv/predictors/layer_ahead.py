"""The next layer's query is nearly known a layer or two early: the residual stream changes slowly from layer to layer.

The query of layer l is guessed by sending the residual stream that enters layer l - d through layer l's own norm and
projection. What the layers between would have added is missing; most of it is the same from token to token, so a moving average
of the guess's own error, kept per sequence, layer and head, mends it. The guess is made in the step that uses it: nothing is
stale.
"""

from __future__ import annotations

import torch

from ..abc import QueryProjection
from ..config import OasisConfig
from ..types import ModelShape
from .lookahead import Lookahead

KEEP = 0.8
"""Weight of the old average when a new error comes in."""


class LayerAhead(Lookahead):
    """Scores guessed queries where the host hints at the residual stream; elsewhere it is `lookahead`."""

    def __init__(self, shape: ModelShape, config: OasisConfig) -> None:
        super().__init__(shape, config)
        self._projection: QueryProjection | None = None
        self._errors: list[torch.Tensor] = []
        self._guessed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def bind(self, projection: QueryProjection | None) -> None:
        self.uses_hints = False
        if projection is not None and self.shape.rotary is not None:
            self._projection = projection
            self.uses_hints = True

    def guess(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        assert self._projection is not None
        assert self.shape.rotary is not None
        raw = self._projection.project(layer, hidden).float()
        self._guessed[layer] = (raw[:, :1], positions[:, :1])
        return self.shape.rotary.rotate(raw + self._errors[layer][rows][:, None], positions)

    def learn(self, layer: int, queries: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> None:
        # Only the first row is certain to be part of the text.
        queries, positions = queries[:, :1], positions[:, :1]
        guessed, guessed_positions = self._guessed.pop(layer, (queries, positions[:0]))
        # A late guess may come in after its step; it teaches nothing about another one.
        if self.shape.rotary is None or guessed_positions.shape != positions.shape:
            return
        true = self.shape.rotary.rotate(queries, positions, inverse=True)
        before = self._errors[layer][rows]
        after = KEEP * before + (1 - KEEP) * (true - guessed)[:, 0]
        self._errors[layer][rows] = torch.where((guessed_positions == positions)[..., None], after, before)

    def reserve_rows(self, count: int) -> None:
        size = (count, self.shape.query_heads, self.shape.head_dim)
        old = self._errors
        self._errors = [torch.zeros(size, device=self.shape.device) for _ in range(self.shape.num_layers)]
        for table, before in zip(self._errors, old, strict=False):
            table[: before.shape[0]] = before

    def clear_row(self, row: int) -> None:
        for table in self._errors:
            table[row] = 0

    def copy_row(self, source: int, target: int) -> None:
        for table in self._errors:
            table[target] = table[source]

    def device_bytes(self) -> int:
        return sum(table.numel() * table.itemsize for table in self._errors)
