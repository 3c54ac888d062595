"""Moving and attending in native code: what a call must look like, and its way into the library.

Each op has the signature of its reference. An argument that cannot be right raises `InputError`. What the library has no code
for (mixed dtypes, a written tensor that is a view) goes to the reference. Tensors that are only read are made dense.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from . import reference
from ._library import DTYPES, Library
from .softcap import require_softcap


def table(name: str, value: Tensor) -> Tensor:
    """A table as the library reads it: dense int64."""
    if value.dtype is not torch.int64:
        if value.is_floating_point():
            raise InputError(f"{name}.dtype is {value.dtype}; tables hold int64")
        value = value.to(torch.int64)
    return value.contiguous()


def require_shape(name: str, value: Tensor, expected: tuple[int, ...], meaning: str) -> None:
    """Raise `InputError` unless `value` has that shape."""
    if value.shape != expected:
        raise InputError(f"{name}.shape is {tuple(value.shape)}; it must be {meaning}, {expected}")


def require_slots(name: str, value: Tensor) -> None:
    """Raise `InputError` unless `value` is a tensor of slots."""
    if value.dim() != 4 or value.shape[1] != 2:
        raise InputError(f"{name}.shape is {tuple(value.shape)}; it must be (num_slots, 2, block_size, head_dim)")


def query_shape(queries: Tensor, head_dim: int, heads_table: Tensor) -> tuple[int, int, int, int]:
    """Sequences, rows, query heads and kv heads; the last from a table `(S, H, ...)`. Raises `InputError`."""
    if queries.dim() != 4 or queries.shape[3] != head_dim:
        raise InputError(f"queries.shape is {tuple(queries.shape)}; it must be (sequences, rows, query_heads, {head_dim})")
    if heads_table.dim() != 3:
        raise InputError(f"slots.shape is {tuple(heads_table.shape)}; it must be (sequences, kv_heads, places)")
    sequences, rows, query_heads, _ = queries.shape
    kv_heads = heads_table.shape[1]
    if heads_table.shape[0] != sequences or not kv_heads or query_heads % kv_heads:
        raise InputError(
            f"slots.shape is {tuple(heads_table.shape)} and queries.shape {tuple(queries.shape)}; they must be of the same "
            "sequences, and the query heads a multiple of the kv heads"
        )
    return sequences, rows, query_heads, kv_heads


def c_softcap(softcap: float | None) -> float:
    """A soft cap as the library has it: 0 where there is none."""
    require_softcap(softcap)
    return softcap or 0.0


class Moves:
    """`append_rows` and `copy_blocks`."""

    def __init__(self, library: Library) -> None:
        self._append_rows = library.call("append_rows")
        self._copy_blocks = library.call("copy_blocks")

    def append_rows(self, pool: Tensor, keys: Tensor, values: Tensor, slots: Tensor, offsets: Tensor) -> None:
        """As the reference."""
        require_slots("pool", pool)
        num_slots, _, block_size, head_dim = pool.shape
        if keys.dim() != 3 or keys.shape[2] != head_dim:
            raise InputError(f"keys.shape is {tuple(keys.shape)}; it must be (num_tokens, kv_heads, {head_dim}), as the pool's")
        tokens, heads, _ = keys.shape
        require_shape("values", values, (tokens, heads, head_dim), "that of keys")
        require_shape("slots", slots, (tokens, heads), "(num_tokens, kv_heads)")
        require_shape("offsets", offsets, (tokens,), "(num_tokens,)")
        if not keys.dtype == values.dtype == pool.dtype:
            raise InputError(f"keys and values are {keys.dtype} and {values.dtype}; they must be {pool.dtype}, as the pool is")
        if not pool.is_contiguous():
            return reference.append_rows(pool, keys, values, slots, offsets)
        slots, offsets = table("slots", slots), table("offsets", offsets)
        keys = keys if keys.stride(2) == 1 else keys.contiguous()
        values = values if values.stride(2) == 1 else values.contiguous()
        keys_strides, values_strides = keys.stride(), values.stride()
        self._append_rows(
            pool=pool.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            slots=slots.data_ptr(),
            offsets=offsets.data_ptr(),
            num_slots=num_slots,
            num_tokens=tokens,
            kv_heads=heads,
            block_size=block_size,
            head_dim=head_dim,
            keys_token_stride=keys_strides[0],
            keys_head_stride=keys_strides[1],
            values_token_stride=values_strides[0],
            values_head_stride=values_strides[1],
            element_bytes=pool.itemsize,
        )
        return None

    def copy_blocks(self, source: Tensor, target: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
        """As the reference."""
        require_slots("source", source)
        require_slots("target", target)
        source_shape, target_shape = source.shape, target.shape
        if source_shape[1:] != target_shape[1:]:
            raise InputError(f"a slot of source is {tuple(source_shape[1:])}, one of target {tuple(target_shape[1:])}")
        if source_slots.shape != target_slots.shape:
            shapes = f"{tuple(source_slots.shape)} and {tuple(target_slots.shape)}"
            raise InputError(f"source_slots and target_slots have shapes {shapes}; they must be the same")
        if source.dtype is not target.dtype or not (source.is_contiguous() and target.is_contiguous()):
            return reference.copy_blocks(source, target, source_slots, target_slots)
        sources, targets = table("source_slots", source_slots), table("target_slots", target_slots)
        served = self._copy_blocks(
            source=source.data_ptr(),
            target=target.data_ptr(),
            source_slots=sources.data_ptr(),
            target_slots=targets.data_ptr(),
            num_pairs=sources.numel(),
            num_source_slots=source_shape[0],
            num_target_slots=target_shape[0],
            slot_bytes=2 * source_shape[2] * source_shape[3] * source.itemsize,
        )
        return None if served else reference.copy_blocks(source, target, sources, targets)


class Attention:
    """`paged_attention` and `exact_logits`."""

    def __init__(self, library: Library) -> None:
        self._paged_attention = library.call("paged_attention")
        self._exact_logits = library.call("exact_logits")

    def paged_attention(
        self,
        queries: Tensor,
        pool: Tensor,
        slots: Tensor,
        blocks: Tensor,
        arena: Tensor | None,
        arena_slots: Tensor | None,
        arena_blocks: Tensor | None,
        positions: Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As the reference."""
        rest = (pool, slots, blocks, arena, arena_slots, arena_blocks, positions, scale, softcap)
        require_slots("pool", pool)
        num_slots, _, block_size, head_dim = pool.shape
        sequences, rows, query_heads, kv_heads = query_shape(queries, head_dim, slots)
        places = slots.shape[2]
        require_shape("blocks", blocks, (sequences, kv_heads, places), "that of slots")
        require_shape("positions", positions, (sequences, rows), "(sequences, rows)")
        arena_pointer = arena_places = num_arena_slots = 0
        parts = (arena, arena_slots, arena_blocks)
        if arena is not None and arena_slots is not None and arena_blocks is not None:
            require_slots("arena", arena)
            if arena.shape[1:] != pool.shape[1:]:
                raise InputError(f"a slot of arena is {tuple(arena.shape[1:])}, one of pool {tuple(pool.shape[1:])}")
            arena_places = arena_slots.shape[-1]
            require_shape("arena_slots", arena_slots, (sequences, kv_heads, arena_places), "(sequences, kv_heads, places)")
            require_shape("arena_blocks", arena_blocks, (sequences, kv_heads, arena_places), "that of arena_slots")
            num_arena_slots, arena_pointer = arena.shape[0], arena.data_ptr()
            arena_slots, arena_blocks = table("arena_slots", arena_slots), table("arena_blocks", arena_blocks)
        elif any(part is not None for part in parts):
            raise InputError("arena, arena_slots and arena_blocks must be given all three or not at all")
        dtype = DTYPES.get(pool.dtype)
        dense = pool.is_contiguous() and (arena is None or arena.is_contiguous())
        alike = queries.dtype is pool.dtype and (arena is None or arena.dtype is pool.dtype)
        if dtype is None or not dense or not alike:
            return reference.paged_attention(queries, *rest)
        queries = queries if queries.stride(3) == 1 else queries.contiguous()
        slots, blocks, positions = table("slots", slots), table("blocks", blocks), table("positions", positions)
        output = torch.empty((sequences, rows, query_heads, head_dim), dtype=queries.dtype, device=queries.device)
        logsumexp = torch.empty((sequences, rows, query_heads), dtype=torch.float32, device=queries.device)
        strides = queries.stride()
        served = self._paged_attention(
            queries=queries.data_ptr(),
            pool=pool.data_ptr(),
            slots=slots.data_ptr(),
            blocks=blocks.data_ptr(),
            arena=arena_pointer,
            arena_slots=0 if arena_slots is None else arena_slots.data_ptr(),
            arena_blocks=0 if arena_blocks is None else arena_blocks.data_ptr(),
            positions=positions.data_ptr(),
            output=output.data_ptr(),
            logsumexp=logsumexp.data_ptr(),
            sequences=sequences,
            rows=rows,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            places=places,
            arena_places=arena_places,
            num_slots=num_slots,
            num_arena_slots=num_arena_slots,
            queries_sequence_stride=strides[0],
            queries_row_stride=strides[1],
            queries_head_stride=strides[2],
            dtype=dtype,
            scale=scale,
            softcap=c_softcap(softcap),
        )
        if served:
            return output, logsumexp
        return reference.paged_attention(queries, *rest)

    def exact_logits(
        self, queries: Tensor, arena: Tensor, pages: Tensor, kv_heads: int, scale: float, softcap: float | None = None
    ) -> Tensor:
        """As the reference."""
        require_slots("arena", arena)
        num_slots, _, block_size, head_dim = arena.shape
        if queries.dim() != 4 or queries.shape[3] != head_dim:
            raise InputError(f"queries.shape is {tuple(queries.shape)}; it must be (sequences, rows, query_heads, {head_dim})")
        sequences, rows, query_heads, _ = queries.shape
        if kv_heads < 1 or query_heads % kv_heads or num_slots % kv_heads:
            raise InputError(
                f"kv_heads is {kv_heads}; it must divide the {query_heads} query heads and the {num_slots} slots of arena"
            )
        require_shape("pages", pages, (sequences, pages.shape[-1]), "(sequences, blocks)")
        dtype = DTYPES.get(arena.dtype)
        if dtype is None or queries.dtype is not arena.dtype or not arena.is_contiguous():
            return reference.exact_logits(queries, arena, pages, kv_heads, scale, softcap)
        queries, pages = queries if queries.stride(3) == 1 else queries.contiguous(), table("pages", pages)
        blocks = pages.shape[1]
        logits = torch.empty((sequences, rows, query_heads, blocks), dtype=torch.float32, device=queries.device)
        strides = queries.stride()
        served = self._exact_logits(
            queries=queries.data_ptr(),
            arena=arena.data_ptr(),
            pages=pages.data_ptr(),
            logits=logits.data_ptr(),
            sequences=sequences,
            rows=rows,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            blocks=blocks,
            num_pages=num_slots // kv_heads,
            queries_sequence_stride=strides[0],
            queries_row_stride=strides[1],
            queries_head_stride=strides[2],
            dtype=dtype,
            scale=scale,
            softcap=c_softcap(softcap),
        )
        return logits if served else reference.exact_logits(queries, arena, pages, kv_heads, scale, softcap)
