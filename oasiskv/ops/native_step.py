"""A layer's step in native code. As in `native.py`: checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from . import reference_step as reference
from ._library import DTYPES, Library
from .native import c_softcap, query_shape, require_shape, require_slots, table
from .native_tables import require_places


class Steps:
    """`corrected_attention`."""

    def __init__(self, library: Library) -> None:
        self._corrected_attention = library.call("corrected_attention")

    def corrected_attention(
        self,
        queries: Tensor,
        pool: Tensor,
        slots: Tensor,
        blocks: Tensor,
        arena: Tensor,
        arena_slots: Tensor,
        logits: Tensor,
        num_blocks: Tensor,
        members: Tensor,
        rows: Tensor,
        selected: Tensor,
        selected_slots: Tensor,
        low: Tensor,
        high: Tensor,
        weights: Tensor,
        positions: Tensor,
        per_row: int,
        least_gain: float,
        scale: float,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As the reference."""
        arguments = (
            queries, pool, slots, blocks, arena, arena_slots, logits, num_blocks, members, rows, selected, selected_slots, low,
            high, weights, positions, per_row, least_gain, scale, softcap,
        )  # fmt: skip
        require_slots("pool", pool)
        require_slots("arena", arena)
        num_slots, _, block_size, head_dim = pool.shape
        if arena.shape[1:] != pool.shape[1:]:
            raise InputError(f"a slot of arena is {tuple(arena.shape[1:])}, one of pool {tuple(pool.shape[1:])}")
        sequences, query_rows, query_heads, kv_heads = query_shape(queries, head_dim, slots)
        places, sparse = slots.shape[2], members.shape[0]
        require_shape("blocks", blocks, (sequences, kv_heads, places), "that of slots")
        require_shape("positions", positions, (sequences, query_rows), "(sequences, rows)")
        require_shape("members", members, (sparse,), "(sparse_sequences,)")
        for name, value in (("rows", rows), ("num_blocks", num_blocks), ("low", low), ("high", high)):
            require_shape(name, value, (sparse,), "that of members")
        sealed = arena_slots.shape[-1]
        require_shape("arena_slots", arena_slots, (sparse, kv_heads, sealed), "(sparse_sequences, kv_heads, blocks)")
        expected = (sparse, query_rows, query_heads, sealed)
        require_shape("logits", logits, expected, "(sparse_sequences, rows, query_heads, blocks)")
        require_shape("weights", weights, (sparse, query_rows), "(sparse_sequences, rows)")
        require_places("selected", selected, kv_heads)
        require_shape("selected_slots", selected_slots, tuple(selected.shape), "that of selected")
        dtype = DTYPES.get(pool.dtype)
        dense = pool.is_contiguous() and arena.is_contiguous()
        alike = queries.dtype is pool.dtype is arena.dtype and logits.dtype is weights.dtype is torch.float32
        tables = selected.dtype is selected_slots.dtype is torch.int64
        if dtype is None or not (dense and alike and tables) or per_row < 0:
            return reference.corrected_attention(*arguments)
        queries = queries if queries.stride(3) == 1 else queries.contiguous()
        slots, blocks, positions = table("slots", slots), table("blocks", blocks), table("positions", positions)
        arena_slots = table("arena_slots", arena_slots)
        num_blocks, members, rows = table("num_blocks", num_blocks), table("members", members), table("rows", rows)
        low, high, logits, weights = table("low", low), table("high", high), logits.contiguous(), weights.contiguous()
        selected, selected_slots = selected.contiguous(), selected_slots.contiguous()
        output = torch.empty((sequences, query_rows, query_heads, head_dim), dtype=queries.dtype, device=queries.device)
        counts = torch.empty(3, dtype=torch.float32, device=queries.device)
        strides = queries.stride()
        served = self._corrected_attention(
            queries=queries.data_ptr(),
            pool=pool.data_ptr(),
            slots=slots.data_ptr(),
            blocks=blocks.data_ptr(),
            arena=arena.data_ptr(),
            arena_slots=arena_slots.data_ptr(),
            logits=logits.data_ptr(),
            num_blocks=num_blocks.data_ptr(),
            members=members.data_ptr(),
            table_rows=rows.data_ptr(),
            selected=selected.data_ptr(),
            selected_slots=selected_slots.data_ptr(),
            low=low.data_ptr(),
            high=high.data_ptr(),
            weights=weights.data_ptr(),
            positions=positions.data_ptr(),
            output=output.data_ptr(),
            counts=counts.data_ptr(),
            sequences=sequences,
            sparse_sequences=sparse,
            rows=query_rows,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            places=places,
            selected_places=selected.shape[2],
            num_table_rows=selected.shape[0],
            num_sealed=sealed,
            num_slots=num_slots,
            num_arena_slots=arena.shape[0],
            per_row=per_row,
            queries_sequence_stride=strides[0],
            queries_row_stride=strides[1],
            queries_head_stride=strides[2],
            dtype=dtype,
            least_gain=least_gain,
            scale=scale,
            softcap=c_softcap(softcap),
        )
        if served:
            return output, counts
        return reference.corrected_attention(*arguments)
