"""The rows of a sequence whose prompt is being read: exact attention over the whole history, one layer at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from .finite import all_finite, finite_rows
from .layout import become_unsettled, lay_out, pool_slots, read_kv, trim
from .ops.softcap import soft_capped
from .sequence import Sequence

if TYPE_CHECKING:
    from .manager import KVManager

_QUERY_CHUNK = 1024
"""Rows that attend at a time when there is a history, which bounds the mask."""
_CAPPED_CHUNK = 256
"""The same where logits have a soft cap, which bounds the logits themselves."""


class PrefillRows:
    """As layers attend, sealed blocks go to the arena, and the blocks of a dense sequence to its strips as well. The sequence
    itself changes at `commit` only: what lies beyond its length is ignored, so an abort loses nothing."""

    def __init__(self, manager: KVManager, sequence: Sequence, offset: int, num_tokens: int, dense: bool) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.packed = slice(offset, offset + num_tokens)
        self._manager = manager
        self._length = sequence.length + num_tokens
        size = manager.config.block_size
        self._first = len(sequence.pages)
        self.pages = manager.rooms.arena.allocate(self._length // size - self._first)
        self._page_index = torch.tensor(self.pages, dtype=torch.int64)
        self._positions = torch.arange(sequence.length, self._length, device=manager.shape.device)
        last = -(-self._length // size)
        self._slots = pool_slots(manager.rooms, sequence.strips[self._first : last]) if dense else None
        self._finite = True
        self._tails: list[torch.Tensor | None] = [None] * manager.shape.num_layers

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """As `Step.attend`, for the rows of this sequence."""
        manager, sequence = self._manager, self.sequence
        past = sequence.length
        both = read_kv(manager.rooms, sequence, layer, spare=self.num_tokens)
        both[0, :, past:] = keys.transpose(0, 1)
        both[1, :, past:] = values.transpose(0, 1)
        output = causal_attention(queries.transpose(0, 1), both[0], both[1], past, scale, softcap)
        self._store(layer, both)
        rooms = manager.rooms
        rooms.summary.observe(layer, finite_rows(queries), self._positions)
        if layer == rooms.shape.num_layers - 1:
            self._finite = all_finite(both[:, :, past:])
        rooms.sets.remember_queries(layer, torch.full((1,), sequence.row, device=queries.device), queries[None])
        return output.transpose(0, 1)

    def _store(self, layer: int, both: torch.Tensor) -> None:
        """Write what seals to the arena, and what stays open to the strips of a dense sequence, or keep it for `commit`. `both`
        is `(2, kv_heads, length, head_dim)`."""
        rooms = self._manager.rooms
        shape, size = rooms.shape, rooms.config.block_size
        start, end = self._first * size, self._length // size * size
        blocks = (2, shape.kv_heads, len(self.pages), size, shape.head_dim)
        sealed = both[:, :, start:end].reshape(blocks).permute(2, 1, 0, 3, 4)
        if self.pages:
            rooms.arena.write(layer, self._page_index, sealed)
            rooms.counters.add(stored_blocks=len(self.pages) * shape.kv_heads)
        tail = None
        if self._length > end:
            tail = torch.zeros((shape.kv_heads, 2, size, shape.head_dim), dtype=shape.dtype, device=shape.device)
            tail[:, :, : self._length - end] = both[:, :, end:].transpose(0, 1)
        if self._slots is None:
            self._tails[layer] = tail
            return
        rooms.pool.slots[self._slots[layer, : len(self.pages)]] = sealed
        if tail is not None:
            rooms.pool.slots[self._slots[layer, len(self.pages)]] = tail

    def commit(self) -> None:
        """Take the rows over. No background work may run."""
        manager, sequence = self._manager, self.sequence
        pages, self.pages = self.pages, []
        sequence.pages.extend(pages)
        manager.rooms.sets.set_pages(sequence.row, self._first, pages)
        manager.rooms.arena.sealed(sequence.pages, self._first)
        sequence.length = self._length
        sequence.finite &= self._finite
        if self._slots is None:
            # A sparse sequence chooses anew: what the new text looks at may be anywhere.
            become_unsettled(manager.rooms, sequence)
            lay_out(manager.rooms, sequence, self._tails)

    def abort(self) -> None:
        """Give the new pages and places back."""
        gone, self.pages = self.pages, []
        self._manager.rooms.arena.release(gone)
        trim(self._manager.rooms, self.sequence)


def causal_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    past: int,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of the last rows: `(query_heads, rows, head_dim)` over `(kv_heads, past + rows, head_dim)`."""
    if softcap is not None:
        return _capped_attention(queries, keys, values, past, scale, softcap)
    grouped = queries.shape[0] != keys.shape[0]
    if not past:
        return F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], is_causal=True, scale=scale, enable_gqa=grouped
        )[0]
    rows = queries.shape[1]
    outputs = []
    for start in range(0, rows, _QUERY_CHUNK):
        end = min(start + _QUERY_CHUNK, rows)
        seen = past + end
        mask = torch.ones((end - start, seen), dtype=torch.bool, device=queries.device).tril(past + start)
        outputs.append(
            F.scaled_dot_product_attention(
                queries[None, :, start:end],
                keys[None, :, :seen],
                values[None, :, :seen],
                attn_mask=mask,
                scale=scale,
                enable_gqa=grouped,
            )[0]
        )
    return torch.cat(outputs, dim=1)


def _capped_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, scale: float, softcap: float
) -> torch.Tensor:
    """The same with a soft cap of the logits, which torch's attention does not have. A chunk of rows of one kv head at a time,
    so that the float32 logits held at once are at most `(group, _CAPPED_CHUNK, past + rows)`."""
    heads, rows = keys.shape[0], queries.shape[1]
    grouped = queries.unflatten(0, (heads, -1))
    output = torch.empty_like(grouped)
    for head in range(heads):
        own_keys, own_values = keys[head].float(), values[head].float()
        for start in range(0, rows, _CAPPED_CHUNK):
            end = min(start + _CAPPED_CHUNK, rows)
            seen = past + end
            logits = (grouped[head, :, start:end].float() @ own_keys[:seen].T).mul_(scale)
            future = torch.ones((end - start, seen), dtype=torch.bool, device=queries.device).triu(past + start + 1)
            weights = soft_capped(logits, softcap).masked_fill_(future, float("-inf")).softmax(-1)
            output[head, :, start:end] = (weights @ own_values[:seen]).to(output.dtype)
    return output.flatten(0, 1)
