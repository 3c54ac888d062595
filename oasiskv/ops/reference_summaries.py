"""The pure-torch reference of the key summaries' ops. Clear first; vectorised over sequences, heads and blocks.

Scores are computed in float32 whatever the KV's dtype. What a summary keeps may lie on another device than the queries:
rows are gathered where they lie, and moved packed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGEST = 60000.0
"""Bounds are clipped to this, so that fp16 holds them and what rounding adds."""

_SLACK = 2.0**-10
"""Relative; twice what rounding to fp16 can move a number."""

_TINY = 2.0**-24
"""The smallest fp16 number above 0, twice what rounding can move a number close to 0."""


def minmax_write(bounds: Tensor, pages: Tensor, keys: Tensor) -> None:
    """Store the smallest and largest value of each key channel: `bounds` is `(num_pages, H, 2, D)`, `keys` `(n, H, B, D)`."""
    _store(bounds, pages, torch.stack([keys.amin(2), keys.amax(2)], dim=2))


def minmax_score(bounds: Tensor, pages: Tensor, queries: Tensor, scale: float) -> Tensor:
    """The largest logit that any key within the bounds could give (Quest, arXiv 2406.10774, section 3.2): `(S, R, Hq, N)`."""
    sequences, rows, query_heads, _ = queries.shape
    kept = bounds[pages.clamp(min=0)].permute(0, 2, 3, 4, 1).float()
    kv_heads = kept.shape[1]
    grouped = _grouped(queries, kv_heads) * scale
    logits = grouped.clamp(max=0) @ kept[:, :, 0] + grouped.clamp(min=0) @ kept[:, :, 1]
    logits = logits.view(sequences, kv_heads, rows, query_heads // kv_heads, pages.shape[1]).permute(0, 2, 1, 3, 4)
    return logits.reshape(sequences, rows, query_heads, pages.shape[1]).contiguous()


def minmax4_write(codes: Tensor, ranges: Tensor, pages: Tensor, keys: Tensor, outward: bool) -> None:
    """Store the smallest and largest value of each key channel in 4 bits: `zero + step * code`.

    Args:
        codes: `(num_pages, H, 2, D / 2)` uint8, written. The low half of byte `d` belongs to channel `d`, the high half to
            channel `d + D / 2`.
        ranges: `(num_pages, H, 2, 2)` fp16, written: zero and step, of the smallest and of the largest values.
        pages: `(n,)`.
        keys: `(n, H, B, D)`; bounds beyond 60000 are clipped.
        outward: round smallest values down and largest values up, so that every key lies within; else to the nearest code.
    """
    bounds = torch.stack([keys.amin(2), keys.amax(2)], dim=2).float().clamp(-_LARGEST, _LARGEST)
    low, high = bounds.amin(3, keepdim=True), bounds.amax(3, keepdim=True)
    zero = (low - _SLACK * low.abs() - _TINY).half()
    step = ((high - zero.float()) / 15 * (1 + 2 * _SLACK) + _TINY).half()
    level = (bounds - zero.float()) / step.float()
    if outward:
        level = torch.stack([level[:, :, 0].floor(), level[:, :, 1].ceil()], dim=2)
    lower, upper = level.round().clamp(0, 15).to(torch.uint8).chunk(2, dim=3)
    _store(codes, pages, lower | (upper << 4))
    _store(ranges, pages, torch.cat([zero, step], dim=3))


def minmax4_read(codes: Tensor, ranges: Tensor, rows: Tensor) -> Tensor:
    """The bounds of some rows in float32, on the device of `rows`.

    Args:
        codes: `(num_rows, ..., 2, D / 2)`, as in `minmax4_write`.
        ranges: `(num_rows, ..., 2, 2)`.
        rows: any shape; `EMPTY` entries give meaningless bounds.

    Returns:
        `(*rows.shape, ..., 2, D)`.
    """
    packed, taken = _take(codes, rows), _take(ranges, rows).float()
    level = torch.cat([packed & 15, packed >> 4], dim=-1)
    return taken[..., :1] + taken[..., 1:] * level


def bit2_write(codes: Tensor, pages: Tensor, keys: Tensor, bounds: Tensor) -> None:
    """Encode every key channel as the nearest of four levels, evenly spaced from its lower to its upper bound.

    Args:
        codes: `(num_pages, H, B, D / 4)` uint8, written. Bits `2 i` and `2 i + 1` of byte `d` belong to channel `d + i D / 4`.
        pages: `(n,)`.
        keys: `(n, H, B, D)`.
        bounds: `(n, H, 2, D)` in float32, as `bit2_score` will see them. Where they are equal every code means the bound.
    """
    low, step = _levels(bounds)
    level = ((keys.float() - low) / step.clamp(min=_TINY)).round().clamp(0, 3).to(torch.uint8)
    first, second, third, fourth = level.chunk(4, dim=3)
    _store(codes, pages, first | (second << 2) | (third << 4) | (fourth << 6))


def bit2_score(codes: Tensor, slots: Tensor, bounds: Tensor, queries: Tensor, scale: float) -> Tensor:
    """Block logits from 2-bit codes: logsumexp over a block's tokens of `scale * q.(low + code * (high - low) / 3)`.

    Args:
        codes: `(num_slots, B, D / 4)`, packed as in `bit2_write`; the slot of page `p` and head `h` is `p * H + h`.
        slots: `(S, H, N)`; `EMPTY` entries give meaningless logits.
        bounds: `(S, H, N, 2, D)` in float32, of the same slots.
        queries: `(S, R, Hq, D)`.

    Returns:
        `(S, R, Hq, N)` in float32.
    """
    sequences, rows, query_heads, head_dim = queries.shape
    _, kv_heads, num_blocks = slots.shape
    packed = _take(codes, slots)
    level = torch.cat([packed & 3, (packed >> 2) & 3, (packed >> 4) & 3, packed >> 6], dim=-1)
    low, step = _levels(bounds)
    keys = (low + step * level).reshape(sequences, kv_heads, -1, head_dim)
    logits = (_grouped(queries, kv_heads) * scale) @ keys.transpose(2, 3)
    logits = logits.view(sequences, kv_heads, rows, query_heads // kv_heads, num_blocks, codes.shape[1]).logsumexp(-1)
    return logits.permute(0, 2, 1, 3, 4).reshape(sequences, rows, query_heads, num_blocks).contiguous()


def _levels(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest level and distance of levels, `(..., 1, D)`. Bounds that were rounded past each other give distance 0."""
    low, high = bounds[..., :1, :], bounds[..., 1:, :]
    return low, (high - low).clamp(min=0.0) / 3


def _grouped(queries: Tensor, kv_heads: int) -> Tensor:
    """Queries `(S, R, Hq, D)` by kv head in float32: `(S, H, R * Hq / H, D)`."""
    sequences, rows, query_heads, head_dim = queries.shape
    by_head = queries.view(sequences, rows, kv_heads, query_heads // kv_heads, head_dim).permute(0, 2, 1, 3, 4)
    return by_head.reshape(sequences, kv_heads, rows * (query_heads // kv_heads), head_dim).float()


def _store(kept: Tensor, rows: Tensor, values: Tensor) -> None:
    kept[rows.to(kept.device)] = values.to(kept.device, kept.dtype)


def _take(kept: Tensor, rows: Tensor) -> Tensor:
    """Rows of a tensor, on the device of `rows`; an `EMPTY` entry reads row 0."""
    taken = kept.index_select(0, rows.clamp(min=0).flatten().to(kept.device)).to(rows.device)
    return taken.view(*rows.shape, *kept.shape[1:])


def transform_write(
    codes: Tensor,
    pages: Tensor,
    keys: Tensor,
    mean: Tensor,
    encode: Tensor,
    thresholds: Tensor,
    nibbles: Tensor,
    shifts: Tensor,
) -> None:
    """Encode sealed blocks: `c_j = code((k - mean) @ encode)_j`, packed into nibbles.

    Args:
        codes: `(num_pages, M, B / 2)` uint8, written. M nibbles per token over all kv heads, those of a head adjacent;
            the low half of byte `t` belongs to token `t`, the high half to token `t + B / 2`.
        pages: `(n,)`.
        keys: `(n, H, B, D)`.
        mean: `(H, D)`.
        encode: `(H, D, C)`.
        thresholds: `(H, C, 15)`, ascending, padded with +inf: a component's code is the number of thresholds below it.
        nibbles, shifts: `(H, C)`: which nibble holds the component, and at which bit; unused components have no thresholds.
    """
    half = keys.shape[2] // 2
    components = ((keys.float() - mean[:, None]) @ encode).nan_to_num(0.0)
    code = torch.zeros_like(components, dtype=torch.uint8)
    for step in range(thresholds.shape[2]):
        code += components > thresholds[:, None, :, step]
    shifted = code << shifts[:, None].to(torch.uint8)
    packed = torch.zeros((keys.shape[0], codes.shape[1], keys.shape[2]), dtype=torch.uint8, device=codes.device)
    packed.index_add_(1, nibbles.flatten(), shifted.permute(0, 1, 3, 2).flatten(1, 2))
    codes[pages] = packed[..., :half] | (packed[..., half:] << 4)


def transform_score(
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
    """Block logits from transform codes, by one 16-entry table per nibble and query.

    Args:
        codes: as in `transform_write`.
        pages: `(S, N)`; `EMPTY` entries give meaningless logits.
        queries: `(S, R, Hq, D)`.
        mean: `(H, D)`.
        decode: `(H, C, D)`: a key is about `mean + level(code) @ decode`.
        levels: `(M, 16, 4)`: what each value of a nibble says of its (at most 4) components.
        components: `(M, 4)`: which components those are, counted over `H * C`.
        offsets: `(H,)`: the first nibble of each head.

    Returns:
        `(S, R, Hq, N)` in float32.
    """
    sequences, rows, query_heads, head_dim = queries.shape
    num_blocks = pages.shape[1]
    kv_heads = mean.shape[0]
    num_nibbles = codes.shape[1]
    block_size = codes.shape[2] * 2
    grouped = queries.view(sequences, rows, kv_heads, query_heads // kv_heads, head_dim).float() * scale
    rotated = torch.einsum("srhgd,hcd->shcrg", grouped, decode)
    width = rotated.shape[3] * rotated.shape[4]
    by_component = rotated.reshape(sequences, -1, width)[:, components]
    tables = torch.einsum("mvj,smjw->smvw", levels, by_component).reshape(-1, width)

    packed = codes[pages.clamp(min=0)]
    nibble = torch.cat([packed & 15, packed >> 4], dim=3).transpose(2, 3).to(torch.int32)
    entry = nibble + 16 * torch.arange(num_nibbles, dtype=torch.int32, device=codes.device)
    entry += (16 * num_nibbles) * torch.arange(sequences, dtype=torch.int32, device=codes.device)[:, None, None, None]
    tokens = sequences * num_blocks * block_size
    bags = torch.arange(tokens, dtype=torch.int32, device=codes.device)[:, None] * num_nibbles + offsets.to(torch.int32)
    logits = F.embedding_bag(entry.flatten(), tables, bags.flatten(), mode="sum")
    blocks = logits.view(sequences, num_blocks, block_size, kv_heads, width).logsumexp(2)
    blocks = blocks.view(sequences, num_blocks, kv_heads, rows, query_heads // kv_heads).permute(0, 3, 2, 4, 1)
    bias = torch.einsum("srhgd,hd->srhg", grouped, mean)
    return (blocks + bias[..., None]).reshape(sequences, rows, query_heads, num_blocks).contiguous()
