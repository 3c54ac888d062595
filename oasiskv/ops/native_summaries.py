"""Summaries of bounds and of two bits in native code. As in `native.py`: checks, then one call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import InputError
from . import reference_summaries as reference
from ._library import DTYPES, Library
from .native import require_shape, table


def require_keys(keys: Tensor, heads: int, head_dim: int, pages: Tensor) -> None:
    """Raise `InputError` unless `keys` are blocks of such heads, one per page."""
    if keys.dim() != 4 or keys.shape[1] != heads or keys.shape[3] != head_dim or not keys.shape[2]:
        raise InputError(f"keys.shape is {tuple(keys.shape)}; it must be (pages, {heads}, block_size, {head_dim})")
    require_shape("pages", pages, (keys.shape[0],), "one per block of keys")


def require_queries(queries: Tensor, heads: int, head_dim: int) -> tuple[int, int, int]:
    """Sequences, rows and query heads of queries for `heads` kv heads. Raises `InputError`."""
    if queries.dim() != 4 or queries.shape[3] != head_dim:
        raise InputError(f"queries.shape is {tuple(queries.shape)}; it must be (sequences, rows, query_heads, {head_dim})")
    sequences, rows, query_heads, _ = queries.shape
    if not heads or not query_heads or query_heads % heads:
        raise InputError(f"queries.shape is {tuple(queries.shape)}; its query heads must be a multiple of the {heads} kv heads")
    return sequences, rows, query_heads


def require_codes(name: str, codes: Tensor, shape: str, dims: int) -> None:
    """Raise `InputError` unless `codes` are bytes of that many dimensions."""
    if codes.dim() != dims or codes.dtype is not torch.uint8:
        raise InputError(f"{name} is {codes.dtype} of shape {tuple(codes.shape)}; it must be uint8 of shape {shape}")


def key_strides(keys: Tensor) -> dict[str, int]:
    """The fields of a write op that say how `keys` `(n, H, B, D)` lie."""
    block, head, token, _ = keys.stride()
    return {"keys_block_stride": block, "keys_head_stride": head, "keys_token_stride": token}


def query_strides(queries: Tensor) -> dict[str, int]:
    """The fields of a score op that say how `queries` `(S, R, Hq, D)` lie."""
    sequence, row, head, _ = queries.stride()
    return {"queries_sequence_stride": sequence, "queries_row_stride": row, "queries_head_stride": head}


def with_dense_rows(tensor: Tensor) -> Tensor:
    """The tensor with its last dimension dense."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class MinMax:
    """`minmax_write`, `minmax_score`, `minmax4_write` and `minmax4_read`."""

    def __init__(self, library: Library) -> None:
        self._minmax_write = library.call("minmax_write")
        self._minmax_score = library.call("minmax_score")
        self._minmax4_write = library.call("minmax4_write")
        self._minmax4_read = library.call("minmax4_read")

    def minmax_write(self, bounds: Tensor, pages: Tensor, keys: Tensor) -> None:
        """As the reference."""
        num_pages, heads, head_dim = _bounds_shape(bounds)
        require_keys(keys, heads, head_dim, pages)
        dtype = DTYPES.get(keys.dtype)
        if dtype is None or bounds.dtype is not keys.dtype or not bounds.is_contiguous():
            return reference.minmax_write(bounds, pages, keys)
        pages, keys = table("pages", pages), with_dense_rows(keys)
        served = self._minmax_write(
            bounds=bounds.data_ptr(),
            pages=pages.data_ptr(),
            keys=keys.data_ptr(),
            count=keys.shape[0],
            num_pages=num_pages,
            kv_heads=heads,
            block_size=keys.shape[2],
            head_dim=head_dim,
            dtype=dtype,
            **key_strides(keys),
        )
        return None if served else reference.minmax_write(bounds, pages, keys)

    def minmax_score(self, bounds: Tensor, pages: Tensor, queries: Tensor, scale: float) -> Tensor:
        """As the reference."""
        num_pages, heads, head_dim = _bounds_shape(bounds)
        sequences, rows, query_heads = require_queries(queries, heads, head_dim)
        blocks = pages.shape[-1]
        require_shape("pages", pages, (sequences, blocks), "(sequences, blocks)")
        queries_dtype, bounds_dtype = DTYPES.get(queries.dtype), DTYPES.get(bounds.dtype)
        if queries_dtype is None or bounds_dtype is None:
            return reference.minmax_score(bounds, pages, queries, scale)
        bounds, pages, queries = bounds.contiguous(), table("pages", pages), with_dense_rows(queries)
        logits = torch.empty((sequences, rows, query_heads, blocks), dtype=torch.float32, device=queries.device)
        served = self._minmax_score(
            bounds=bounds.data_ptr(),
            pages=pages.data_ptr(),
            queries=queries.data_ptr(),
            logits=logits.data_ptr(),
            sequences=sequences,
            rows=rows,
            query_heads=query_heads,
            kv_heads=heads,
            head_dim=head_dim,
            blocks=blocks,
            num_pages=num_pages,
            queries_dtype=queries_dtype,
            bounds_dtype=bounds_dtype,
            scale=scale,
            **query_strides(queries),
        )
        return logits if served else reference.minmax_score(bounds, pages, queries, scale)

    def minmax4_write(self, codes: Tensor, ranges: Tensor, pages: Tensor, keys: Tensor, outward: bool) -> None:
        """As the reference."""
        require_codes("codes", codes, "(num_pages, kv_heads, 2, head_dim / 2)", 4)
        num_pages, heads, _, half = codes.shape
        require_shape("codes", codes, (num_pages, heads, 2, half), "(num_pages, kv_heads, 2, head_dim / 2)")
        require_shape("ranges", ranges, (num_pages, heads, 2, 2), "(num_pages, kv_heads, 2, 2)")
        require_keys(keys, heads, 2 * half, pages)
        dtype = DTYPES.get(keys.dtype)
        dense = codes.is_contiguous() and ranges.is_contiguous()
        if dtype is None or ranges.dtype is not torch.float16 or not dense:
            return reference.minmax4_write(codes, ranges, pages, keys, outward)
        pages, keys = table("pages", pages), with_dense_rows(keys)
        served = self._minmax4_write(
            codes=codes.data_ptr(),
            ranges=ranges.data_ptr(),
            pages=pages.data_ptr(),
            keys=keys.data_ptr(),
            count=keys.shape[0],
            num_pages=num_pages,
            kv_heads=heads,
            block_size=keys.shape[2],
            head_dim=2 * half,
            dtype=dtype,
            outward=outward,
            **key_strides(keys),
        )
        return None if served else reference.minmax4_write(codes, ranges, pages, keys, outward)

    def minmax4_read(self, codes: Tensor, ranges: Tensor, rows: Tensor) -> Tensor:
        """As the reference."""
        if codes.dim() < 3 or codes.shape[-2] != 2 or codes.dtype is not torch.uint8:
            raise InputError(
                f"codes is {codes.dtype} of shape {tuple(codes.shape)}; it must be uint8 of shape (rows, ..., 2, head_dim / 2)"
            )
        require_shape("ranges", ranges, (*codes.shape[:-1], 2), "that of codes, with zero and step at the end")
        if ranges.dtype is not torch.float16 or not codes.is_contiguous() or not ranges.is_contiguous():
            return reference.minmax4_read(codes, ranges, rows)
        rows = table("rows", rows)
        bounds = torch.empty((*rows.shape, *codes.shape[1:-1], 2 * codes.shape[-1]), dtype=torch.float32, device=rows.device)
        served = self._minmax4_read(
            codes=codes.data_ptr(),
            ranges=ranges.data_ptr(),
            rows=rows.data_ptr(),
            bounds=bounds.data_ptr(),
            count=rows.numel(),
            num_rows=codes.shape[0],
            inner=math.prod(codes.shape[1:-2]),
            head_dim=2 * codes.shape[-1],
        )
        return bounds if served else reference.minmax4_read(codes, ranges, rows)


class Bit2:
    """`bit2_write` and `bit2_score`."""

    def __init__(self, library: Library) -> None:
        self._bit2_write = library.call("bit2_write")
        self._bit2_score = library.call("bit2_score")

    def bit2_write(self, codes: Tensor, pages: Tensor, keys: Tensor, bounds: Tensor) -> None:
        """As the reference."""
        require_codes("codes", codes, "(num_pages, kv_heads, block_size, head_dim / 4)", 4)
        num_pages, heads, block_size, quarter = codes.shape
        require_keys(keys, heads, 4 * quarter, pages)
        require_shape("keys", keys, (keys.shape[0], heads, block_size, 4 * quarter), "(pages, kv_heads, block_size, head_dim)")
        require_shape("bounds", bounds, (keys.shape[0], heads, 2, 4 * quarter), "(pages, kv_heads, 2, head_dim)")
        dtype = DTYPES.get(keys.dtype)
        if dtype is None or bounds.dtype is not torch.float32 or not codes.is_contiguous():
            return reference.bit2_write(codes, pages, keys, bounds)
        pages, keys, bounds = table("pages", pages), with_dense_rows(keys), bounds.contiguous()
        served = self._bit2_write(
            codes=codes.data_ptr(),
            pages=pages.data_ptr(),
            keys=keys.data_ptr(),
            bounds=bounds.data_ptr(),
            count=keys.shape[0],
            num_pages=num_pages,
            kv_heads=heads,
            block_size=block_size,
            head_dim=4 * quarter,
            dtype=dtype,
            **key_strides(keys),
        )
        return None if served else reference.bit2_write(codes, pages, keys, bounds)

    def bit2_score(self, codes: Tensor, slots: Tensor, bounds: Tensor, queries: Tensor, scale: float) -> Tensor:
        """As the reference."""
        require_codes("codes", codes, "(num_slots, block_size, head_dim / 4)", 3)
        num_slots, block_size, quarter = codes.shape
        if slots.dim() != 3:
            raise InputError(f"slots.shape is {tuple(slots.shape)}; it must be (sequences, kv_heads, blocks)")
        heads, blocks = slots.shape[1:]
        sequences, rows, query_heads = require_queries(queries, heads, 4 * quarter)
        require_shape("slots", slots, (sequences, heads, blocks), "(sequences, kv_heads, blocks)")
        require_shape("bounds", bounds, (*slots.shape, 2, 4 * quarter), "(sequences, kv_heads, blocks, 2, head_dim)")
        dtype = DTYPES.get(queries.dtype)
        if dtype is None or bounds.dtype is not torch.float32:
            return reference.bit2_score(codes, slots, bounds, queries, scale)
        codes, slots, bounds, queries = codes.contiguous(), table("slots", slots), bounds.contiguous(), with_dense_rows(queries)
        logits = torch.empty((sequences, rows, query_heads, blocks), dtype=torch.float32, device=queries.device)
        served = self._bit2_score(
            codes=codes.data_ptr(),
            slots=slots.data_ptr(),
            bounds=bounds.data_ptr(),
            queries=queries.data_ptr(),
            logits=logits.data_ptr(),
            sequences=sequences,
            rows=rows,
            query_heads=query_heads,
            kv_heads=heads,
            head_dim=4 * quarter,
            block_size=block_size,
            blocks=blocks,
            num_slots=num_slots,
            dtype=dtype,
            scale=scale,
            **query_strides(queries),
        )
        return logits if served else reference.bit2_score(codes, slots, bounds, queries, scale)


def _bounds_shape(bounds: Tensor) -> tuple[int, int, int]:
    """Pages, kv heads and head_dim. Raises `InputError`."""
    if bounds.dim() != 4 or bounds.shape[2] != 2:
        raise InputError(f"bounds.shape is {tuple(bounds.shape)}; it must be (num_pages, kv_heads, 2, head_dim)")
    num_pages, heads, _, head_dim = bounds.shape
    return num_pages, heads, head_dim
