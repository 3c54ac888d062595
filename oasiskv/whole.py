"""Masses and attention over texts whose keys and values are whole on the device: what a replay computes with."""

from __future__ import annotations

import torch

from . import ops
from .abc import KeySummary
from .ops.softcap import soft_capped, soft_capped_blocks

ROW_CHUNK = 128
"""Query rows whose logits over the whole text are held at a time."""


class WholeIndex:
    """A `BlockIndex` whose rows see different numbers of blocks: `num_blocks` is `(R,)`."""

    def __init__(
        self,
        summaries: list[KeySummary],
        layer: int,
        keys: torch.Tensor,
        num_blocks: torch.Tensor,
        size: int,
        scale: float,
        softcap: float | None = None,
    ) -> None:
        self._summaries, self._layer, self._size = summaries, layer, size
        self._scale, self._softcap = scale, softcap
        self._count = int(num_blocks.max())
        self._keys = keys[:, :, : self._count * size]
        self._num_blocks = num_blocks
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def summary_mass(self, queries: torch.Tensor) -> torch.Tensor:
        if self._last is None or self._last[0] is not queries:
            mass = [self._mass(self._logits(summary, text)) for summary, text in zip(self._summaries, queries, strict=True)]
            self._last = (queries, torch.stack(mass))
        return self._last[1]

    def _logits(self, summary: KeySummary, queries: torch.Tensor) -> torch.Tensor:
        """`(R, query_heads, head_dim)` to `(1, R, query_heads, N)`. Rows that see the same blocks are scored together."""
        parts = []
        counts, sizes = torch.unique_consecutive(self._num_blocks, return_counts=True)
        for count, rows in zip(counts.tolist(), queries.split(sizes.tolist()), strict=True):
            pages = torch.arange(count, device=queries.device)[None]
            for part in _chunks(rows[None]):
                logits = summary.score(self._layer, part, pages, self._scale)
                logits = soft_capped_blocks(logits, self._softcap, self._size)
                parts.append(torch.nn.functional.pad(logits, (0, self._count - count)))
        return torch.cat(parts, 1)

    def exact_mass(self, queries: torch.Tensor) -> torch.Tensor:
        mass = []
        for text, keys in zip(queries, self._keys, strict=True):
            grouped = text.view(text.shape[0], keys.shape[0], -1, text.shape[2])
            logits = torch.einsum("rhgd,htd->rhgt", grouped.float(), keys.float()).mul_(self._scale)
            logits = soft_capped(logits, self._softcap)
            mass.append(self._mass(logits.unflatten(3, (-1, self._size)).logsumexp(4).flatten(1, 2)[None]))
        return torch.stack(mass)

    def _mass(self, logits: torch.Tensor) -> torch.Tensor:
        """`(1, R, query_heads, N)` to `(R, kv_heads, N)`."""
        return ops.block_mass(logits.transpose(0, 1), self._num_blocks, self._keys.shape[1])[:, 0]


def _chunks(queries: torch.Tensor) -> list[torch.Tensor]:
    return [part.contiguous() for part in queries.split(ROW_CHUNK, dim=1)]


def masked_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    told: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(R, query_heads, head_dim)` over `(kv_heads, K, head_dim)`; `told` is `(R, K)`, `visible` `(kv_heads, R, K)`.

    Returns the output and the share of the told weights that is visible, `(R, query_heads)`.
    """
    count, query_heads, head_dim = queries.shape
    heads = keys.shape[0]
    grouped = queries.view(count, heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2).float()
    logits = soft_capped((grouped @ keys.float().transpose(1, 2)).mul_(scale), softcap).unflatten(1, (-1, count))
    whole = logits.masked_fill_(~told, float("-inf")).logsumexp(3)
    logits.masked_fill_(~visible[:, None], float("-inf"))
    lse = logits.logsumexp(3)
    weights = logits.sub_(lse[..., None]).exp_()
    output = (weights.flatten(1, 2) @ values.float()).unflatten(1, (-1, count))
    coverage = (lse - whole).exp().permute(2, 0, 1).reshape(count, query_heads)
    return output.permute(2, 0, 1, 3).reshape(count, query_heads, head_dim), coverage
