"""Transform codes in native code. As in `native.py`: checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from . import reference_summaries as reference
from ._library import DTYPES, Library
from .native import require_shape, table
from .native_summaries import key_strides, query_strides, require_codes, require_keys, require_queries, with_dense_rows


class Transform:
    """`transform_write` and `transform_score`."""

    def __init__(self, library: Library) -> None:
        self._transform_write = library.call("transform_write")
        self._transform_score = library.call("transform_score")

    def transform_write(
        self,
        codes: Tensor,
        pages: Tensor,
        keys: Tensor,
        mean: Tensor,
        encode: Tensor,
        thresholds: Tensor,
        nibbles: Tensor,
        shifts: Tensor,
    ) -> None:
        """As the reference."""
        num_pages, num_nibbles, half = _codes_shape(codes)
        heads, head_dim = _mean_shape(mean)
        require_keys(keys, heads, head_dim, pages)
        require_shape("keys", keys, (keys.shape[0], heads, 2 * half, head_dim), "(pages, kv_heads, block_size, head_dim)")
        components = encode.shape[-1]
        require_shape("encode", encode, (heads, head_dim, components), "(kv_heads, head_dim, components)")
        require_shape("thresholds", thresholds, (heads, components, 15), "(kv_heads, components, 15)")
        require_shape("nibbles", nibbles, (heads, components), "(kv_heads, components)")
        require_shape("shifts", shifts, (heads, components), "(kv_heads, components)")
        dtype = DTYPES.get(keys.dtype)
        floats = all(each.dtype is torch.float32 for each in (mean, encode, thresholds))
        if dtype is None or not floats or not codes.is_contiguous():
            return reference.transform_write(codes, pages, keys, mean, encode, thresholds, nibbles, shifts)
        pages, nibbles, shifts = table("pages", pages), table("nibbles", nibbles), table("shifts", shifts)
        keys, mean, encode, thresholds = with_dense_rows(keys), mean.contiguous(), encode.contiguous(), thresholds.contiguous()
        served = self._transform_write(
            codes=codes.data_ptr(),
            pages=pages.data_ptr(),
            keys=keys.data_ptr(),
            mean=mean.data_ptr(),
            encode=encode.data_ptr(),
            thresholds=thresholds.data_ptr(),
            nibbles=nibbles.data_ptr(),
            shifts=shifts.data_ptr(),
            count=keys.shape[0],
            num_pages=num_pages,
            num_nibbles=num_nibbles,
            components=components,
            kv_heads=heads,
            block_size=2 * half,
            head_dim=head_dim,
            dtype=dtype,
            **key_strides(keys),
        )
        return None if served else reference.transform_write(codes, pages, keys, mean, encode, thresholds, nibbles, shifts)

    def transform_score(
        self,
        codes: Tensor,
        pages: Tensor,
        queries: Tensor,
        mean: Tensor,
        decode: Tensor,
        levels: Tensor,
        components: Tensor,
        offsets: Tensor,
        scale: float,
    ) -> Tensor:
        """As the reference, but for the rounding of tables to bytes.

        Let `r` be how far apart a query's logits can be by 8 nibbles of a head, in nats, for those 8 where it is most.
        Entries are rounded to steps of `s = (r + ln 2) / 249`, rounded up to a multiple of `ln 2 / 128`. A block logit is off
        by at most `s / 2` for each nibble of the head, and by 0.034 because powers of two are read off a line through each
        octave. The errors of nibbles are independent: over 16 nibbles their standard deviation is `1.2 s`. A query that would
        need steps above 0.34, whose logits are within 0.02 of each other, or that is not finite, is scored in floats.
        """
        num_pages, num_nibbles, half = _codes_shape(codes)
        heads, head_dim = _mean_shape(mean)
        sequences, rows, query_heads = require_queries(queries, heads, head_dim)
        blocks, count = pages.shape[-1], decode.shape[-2]
        require_shape("pages", pages, (sequences, blocks), "(sequences, blocks)")
        require_shape("decode", decode, (heads, count, head_dim), "(kv_heads, components, head_dim)")
        require_shape("levels", levels, (num_nibbles, 16, 4), "(nibbles, 16, 4)")
        require_shape("components", components, (num_nibbles, 4), "(nibbles, 4)")
        require_shape("offsets", offsets, (heads,), "(kv_heads,)")
        dtype = DTYPES.get(queries.dtype)
        if dtype is None or not all(each.dtype is torch.float32 for each in (mean, decode, levels)):
            return reference.transform_score(codes, pages, queries, mean, decode, levels, components, offsets, scale)
        codes, queries = codes.contiguous(), with_dense_rows(queries)
        pages, components, offsets = table("pages", pages), table("components", components), table("offsets", offsets)
        mean, decode, levels = mean.contiguous(), decode.contiguous(), levels.contiguous()
        logits = torch.empty((sequences, rows, query_heads, blocks), dtype=torch.float32, device=queries.device)
        served = self._transform_score(
            codes=codes.data_ptr(),
            pages=pages.data_ptr(),
            queries=queries.data_ptr(),
            mean=mean.data_ptr(),
            decode=decode.data_ptr(),
            levels=levels.data_ptr(),
            components=components.data_ptr(),
            offsets=offsets.data_ptr(),
            logits=logits.data_ptr(),
            sequences=sequences,
            rows=rows,
            query_heads=query_heads,
            kv_heads=heads,
            head_dim=head_dim,
            block_size=2 * half,
            blocks=blocks,
            num_pages=num_pages,
            num_nibbles=num_nibbles,
            num_components=count,
            dtype=dtype,
            scale=scale,
            **query_strides(queries),
        )
        if served:
            return logits
        return reference.transform_score(codes, pages, queries, mean, decode, levels, components, offsets, scale)


def _codes_shape(codes: Tensor) -> tuple[int, int, int]:
    """Pages, nibbles of a token, and half a block. Raises `InputError`."""
    require_codes("codes", codes, "(num_pages, nibbles, block_size / 2)", 3)
    if not codes.shape[2]:
        raise InputError(f"codes.shape is {tuple(codes.shape)}; it must be (num_pages, nibbles, block_size / 2)")
    num_pages, num_nibbles, half = codes.shape
    return num_pages, num_nibbles, half


def _mean_shape(mean: Tensor) -> tuple[int, int]:
    """Kv heads and head_dim. Raises `InputError`."""
    if mean.dim() != 2:
        raise InputError(f"mean.shape is {tuple(mean.shape)}; it must be (kv_heads, head_dim)")
    heads, head_dim = mean.shape
    return heads, head_dim
