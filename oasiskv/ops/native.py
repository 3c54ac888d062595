"""Moving and attending in native code: what a call must look like, and its way into the library.

Each op has the signature of its reference. An argument that cannot be right raises `InputError`; one that the library has no code
for (mixed dtypes, a written tensor that is a view) goes to the reference. Tensors that are only read are made dense.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from . import reference
from ._library import Library


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
