"""Two stages: a small code on the device proposes blocks, a finer one in host memory decides among them.

`transform` ranks all blocks. Per query row and kv head, the best of them by softmax mass, twice as many as a working set has
selected places, are scored again by 2-bit codes, and the better logits take the place of the first ones. The finer code costs
no device memory, and of it only the candidates' rows travel: a fixed number per step, however long the text is.

On CUDA this reference waits for the candidates before it gathers their codes, as reading blocks from the arena does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from ..abc import KeySample, KeySummary
from ..config import OasisConfig
from ..types import ModelShape
from .bit2 import Bit2
from .transform import Transform

CANDIDATES_PER_PLACE = 2
"""Blocks that are scored again, per selected place of the working set."""


class TwoStage(KeySummary):
    """`Transform` on the device, then `Bit2` with int4 scales in host memory for the candidates."""

    def __init__(self, shape: ModelShape, config: OasisConfig) -> None:
        super().__init__(shape, config)
        self._coarse = Transform(shape, config)
        on_host = dataclasses.replace(shape, device=torch.device("cpu"))
        self._fine = Bit2(on_host, config, int4_scales=True, pinned=shape.device.type == "cuda")

    @property
    def bytes_per_token(self) -> float:
        return self._coarse.bytes_per_token

    @property
    def host_bytes_per_token(self) -> float:
        """Host bytes per token and kv head."""
        return self._fine.bytes_per_token

    @property
    def fitted(self) -> bool:
        return self._coarse.fitted

    @property
    def serves(self) -> float:
        return self._coarse.serves

    def observe(self, layer: int, queries: torch.Tensor, positions: torch.Tensor) -> None:
        self._coarse.observe(layer, queries, positions)

    def fit(self, samples: Iterable[KeySample]) -> None:
        self._coarse.fit(samples)

    def reserve(self, num_pages: int) -> None:
        self._coarse.reserve(num_pages)
        self._fine.reserve(num_pages)

    def write(self, layer: int, pages: torch.Tensor, keys: torch.Tensor) -> None:
        self._coarse.write(layer, pages, keys)
        self._fine.write(layer, pages, keys)

    def score(self, layer: int, queries: torch.Tensor, pages: torch.Tensor, scale: float) -> torch.Tensor:
        logits = self._coarse.score(layer, queries, pages, scale)
        # Every row has candidates of its own: from here on a row is a sequence.
        by_row, row_pages = logits.flatten(0, 1)[:, None], pages.repeat_interleave(queries.shape[1], 0)
        blocks = self._candidates(by_row, row_pages)
        chosen = row_pages[:, None].expand(-1, self.shape.kv_heads, -1).gather(2, blocks)
        better = self._fine.score_per_head(layer, queries.flatten(0, 1)[:, None], chosen, scale)
        of_query_head = blocks.repeat_interleave(self.shape.group_size, 1)[:, None]
        return by_row.scatter(3, of_query_head, better).view(logits.shape)

    def _candidates(self, logits: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """The blocks of the most mass by the first stage, summed over the heads of a group: `(S, H, n)` for `(S, 1, Hq, N)`.

        Sinks and window are ranked along, and are no candidates of the selection, so there is room for them. Padding has no
        mass, and is only chosen where there are too few blocks.
        """
        padding = (pages < 0)[:, None]
        share = logits[:, 0].masked_fill(padding, float("-inf")).softmax(-1).nan_to_num(0.0)
        mass = share.view(share.shape[0], self.shape.kv_heads, -1, share.shape[2]).sum(2).masked_fill(padding, -1.0)
        config = self.config
        count = CANDIDATES_PER_PLACE * config.selected_blocks + config.sink_blocks + config.ring_blocks
        return mass.topk(min(count, logits.shape[3]), dim=2).indices

    def device_bytes(self) -> int:
        return self._coarse.device_bytes()

    def host_bytes(self) -> int:
        """Bytes of every tensor that is held in host memory, counted from the allocations."""
        return self._fine.device_bytes()
