"""The pure-torch reference of attention and selection. Clear first; vectorised over sequences, heads and blocks.

Tables hold `EMPTY` (-1) where a place is unused. Attention and scores are computed in float32 whatever the KV's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import EMPTY
from .softcap import soft_capped


def append_rows(pool: Tensor, keys: Tensor, values: Tensor, slots: Tensor, offsets: Tensor) -> None:
    """Write token rows into their blocks.

    Args:
        pool: `(num_slots, 2, B, D)`, written.
        keys, values: `(num_tokens, H, D)`.
        slots: `(num_tokens, H)`, the slot of the token's block.
        offsets: `(num_tokens,)`, the token's place in the block.
    """
    block_size, head_dim = pool.shape[2:]
    rows = pool.view(-1, head_dim)
    first = slots * (2 * block_size) + offsets[:, None]
    rows[first] = keys
    rows[first + block_size] = values


def copy_blocks(source: Tensor, target: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copy whole slots, in either direction between pool and arena; pairs with an `EMPTY` side are left out.

    Args:
        source, target: `(num_slots, 2, B, D)`; `target` is written.
        source_slots, target_slots: tables of one shape.
    """
    valid = (source_slots >= 0) & (target_slots >= 0)
    moved = source.index_select(0, source_slots[valid].to(source.device))
    target.index_copy_(0, target_slots[valid].to(target.device), moved.to(target.device, target.dtype))


def paged_attention(
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
    """Attention of a few query rows over the working set of each kv head.

    A row sees every listed token whose position is at most its own: causal among the step's own tokens, and blind to what
    a rejected draft left behind in a tail block. No block may be listed twice for one head.

    Args:
        queries: `(S, R, Hq, D)`.
        pool: `(num_slots, 2, B, D)`.
        slots, blocks: `(S, H, P)`: where each resident block lies, and which one it is.
        arena, arena_slots, arena_blocks: the same for blocks that are read in place, `(S, H, M)`; all three or none.
        positions: `(S, R)` of the rows; below 0 for padding rows.
        scale: of the logits.
        softcap: of the scaled logits, see `soft_capped`; `None` for none.

    Returns:
        Output in the queries' dtype, `(S, R, Hq, D)`, zero for a row that sees nothing; and the natural logsumexp of its
        logits in float32, `(S, R, Hq)`, -inf for such a row.
    """
    sequences, rows, query_heads, head_dim = queries.shape
    kv_heads = slots.shape[1]
    keys, values = _gather(pool, slots)
    if arena is not None and arena_slots is not None and arena_blocks is not None:
        more_keys, more_values = _gather(arena, arena_slots)
        keys = torch.cat([keys, more_keys.to(keys.device)], dim=2)
        values = torch.cat([values, more_values.to(values.device)], dim=2)
        blocks = torch.cat([blocks, arena_blocks], dim=2)
    block_size = pool.shape[2]
    token = blocks[..., None] * block_size + torch.arange(block_size, device=blocks.device)
    token = torch.where(blocks[..., None] >= 0, token, torch.iinfo(torch.int64).max).flatten(2)
    visible = token[:, :, None, :] <= positions[:, None, :, None]
    # A zero weight does not silence a NaN in memory that no row may see, so such values are cleared first.
    values.masked_fill_(~visible.any(2)[..., None], 0.0)
    group = query_heads // kv_heads
    grouped = queries.view(sequences, rows, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(sequences, kv_heads, group * rows, head_dim).float()
    logits = soft_capped((grouped @ keys.transpose(2, 3)).mul_(scale), softcap)
    logits = logits.view(sequences, kv_heads, group, rows, token.shape[2])
    logits.masked_fill_(~visible[:, :, None], float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - torch.where(lse.isinf(), 0.0, lse)[..., None])
    output = weights.view(sequences, kv_heads, group * rows, token.shape[2]) @ values
    output = output.view(sequences, kv_heads, group, rows, head_dim).permute(0, 3, 1, 2, 4)
    return (
        output.reshape(queries.shape).to(queries.dtype).contiguous(),
        lse.permute(0, 3, 1, 2).reshape(sequences, rows, query_heads).contiguous(),
    )


def _gather(slots_tensor: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of a table `(S, H, P)` as float32 `(S, H, P * B, D)`; an `EMPTY` entry reads slot 0."""
    _, _, block_size, head_dim = slots_tensor.shape
    rows = slots_tensor.view(-1, block_size * head_dim)
    first = slots.clamp(min=0).flatten().to(rows.device) * 2
    shape = (*slots.shape[:2], slots.shape[2] * block_size, head_dim)
    return rows.index_select(0, first).view(shape).float(), rows.index_select(0, first + 1).view(shape).float()


def exact_logits(
    queries: Tensor, arena: Tensor, pages: Tensor, kv_heads: int, scale: float, softcap: float | None = None
) -> Tensor:
    """Block logits by the keys themselves.

    Args:
        queries: `(S, R, Hq, D)`.
        arena: `(num_pages * H, 2, B, D)`, page-major.
        pages: `(S, N)`; `EMPTY` entries give meaningless logits.
        scale, softcap: as in `paged_attention`.

    Returns:
        `(S, R, Hq, N)` in float32: log of the sum over the block's tokens of `exp(logit)`.
    """
    sequences, rows, query_heads, head_dim = queries.shape
    num_blocks = pages.shape[1]
    block_size = arena.shape[2]
    by_page = arena.view(-1, kv_heads, 2, block_size, head_dim)
    keys = by_page[pages.clamp(min=0).to(arena.device), :, 0].to(queries.device).float()
    grouped = (
        queries.view(sequences, rows, kv_heads, query_heads // kv_heads, head_dim)
        .permute(0, 2, 1, 3, 4)
        .reshape(sequences, kv_heads, rows * (query_heads // kv_heads), head_dim)
    )
    flat = keys.permute(0, 2, 1, 3, 4).reshape(sequences, kv_heads, num_blocks * block_size, head_dim)
    logits = soft_capped((grouped.float() @ flat.transpose(2, 3)).mul_(scale), softcap)
    logits = logits.view(sequences, kv_heads, rows, query_heads // kv_heads, num_blocks, block_size).logsumexp(-1)
    return logits.permute(0, 2, 1, 3, 4).reshape(sequences, rows, query_heads, num_blocks).contiguous()


def block_mass(logits: Tensor, num_blocks: Tensor, kv_heads: int) -> Tensor:
    """Softmax over the first `num_blocks[s]` blocks per query head, summed over the heads of each group.

    `(S, R, Hq, N)` to `(S, R, H, N)`; blocks beyond `num_blocks[s]` get 0, and so does a sequence without blocks.
    """
    sequences, rows, query_heads, blocks = logits.shape
    beyond = torch.arange(blocks, device=logits.device) >= num_blocks[:, None]
    share = logits.masked_fill(beyond[:, None, None, :], float("-inf")).softmax(-1)
    share = share.view(sequences, rows, kv_heads, query_heads // kv_heads, blocks).sum(3)
    return share.masked_fill(beyond[:, None, None, :], 0.0)


def top_missing(mass: Tensor, resident: Tensor, low: Tensor, high: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best blocks of the candidate range that are not resident.

    Args:
        mass: `(S, H, N)`.
        resident: `(S, H, C)` block numbers, `EMPTY` where unused.
        low, high: `(S,)`, the candidates are `low <= block < high`.
        count: how many at most.

    Returns:
        Block numbers and their masses, `(S, H, min(count, N))`, best first; `EMPTY` and -1 where there are no more.
    """
    candidates = _candidates(mass, low, high)
    blocks = mass.shape[2]
    taken = torch.zeros((*mass.shape[:2], blocks + 1), dtype=torch.bool, device=mass.device)
    inside = (resident >= 0) & (resident < blocks)
    taken.scatter_(2, torch.where(inside, resident, blocks), True)
    ranked = mass.masked_fill(~candidates | taken[..., :blocks], -1.0)
    best, block = ranked.topk(min(count, blocks), dim=2)
    return torch.where(best < 0, EMPTY, block), best


def select(
    mass: Tensor,
    resident: Tensor,
    selected_at: Tensor,
    low: Tensor,
    high: Tensor,
    floor: Tensor,
    step: int,
    max_new: int,
    pooled: int,
    margin: float,
    keep: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Swap the best missing blocks for the worst resident ones.

    The i-th best missing block goes to the i-th worst place. A place is worth the mass of its block, or `floor` if it is empty,
    and -1 if its block is no candidate any more. The newcomer's mass must exceed 0 and the floor, and that of a block which it
    replaces by more than `margin`. Among places of equal worth the least recently selected goes first. A block whose mass is
    below `keep * floor` is given up even if nothing replaces it; with a floor of -1 none is.

    Args:
        mass, resident, low, high: as in `top_missing`.
        selected_at: `(S, H, C)`, the step at which each resident block last was among the wanted ones.
        floor: `(S,)` in float32, at least 0, or -1 for none.
        step: the present step, written to `selected_at`.
        max_new: most swaps per head.
        pooled: most swaps of all heads of a sequence together; those that gain most are kept.

    Returns:
        The places that change and their new blocks, `(S, H, K)` with K = min(max_new, N, C), `EMPTY` where there is no swap;
        `resident` with those places and the given up ones `EMPTY`, `(S, H, C)`; the new `selected_at`, `(S, H, C)`; and
        `(S, 2)`: how many of the wanted blocks (the best C above the floor) were resident, and how many were wanted.
    """
    places = resident.shape[2]
    least = floor[:, None, None]
    candidates = _candidates(mass, low, high)
    eligible = (resident >= low[:, None, None]) & (resident < high[:, None, None])
    held = mass.gather(2, resident.clamp(min=0, max=mass.shape[2] - 1)).masked_fill(~eligible, -1.0)
    ranked = mass.masked_fill(~candidates, -1.0)
    wanted = ranked.topk(min(places, mass.shape[2]), dim=2).values
    threshold = torch.maximum(wanted[..., -1:], least).clamp(min=0.0)
    hit = eligible & (held >= threshold)
    counts = torch.stack([hit.sum((1, 2)), ((wanted >= 0) & (wanted >= least)).sum((1, 2))], dim=1)
    stamps = torch.where(hit, step, selected_at)
    gone = (resident >= 0) & (least >= 0) & (held < keep * least)
    worth = torch.where(resident >= 0, held, least)

    block, gain = top_missing(mass, resident, low, high, min(max_new, places))
    oldest_first = stamps.argsort(dim=2, stable=True)
    worst_first = oldest_first.gather(2, worth.gather(2, oldest_first).argsort(dim=2, stable=True))
    paired = worst_first[..., : block.shape[2]]
    lost = worth.gather(2, paired)
    replaces = (resident.gather(2, paired) >= 0) & (lost >= 0)
    accept = (block >= 0) & (gain > least.clamp(min=0)) & (~replaces | (gain > lost + margin))
    accept = _best(accept, gain - lost.clamp(min=0), pooled)
    stamps = stamps.scatter(2, paired, torch.where(accept, step, stamps.gather(2, paired)))
    gone |= torch.zeros_like(gone).scatter(2, paired, accept)
    kept = resident.masked_fill(gone, EMPTY)
    return torch.where(accept, paired, EMPTY), torch.where(accept, block, EMPTY), kept, stamps, counts


def exchange_slots(slots: Tensor, free: Tensor, count: Tensor, rows: Tensor, kept: Tensor, places: Tensor) -> Tensor:
    """Put the slots of empty places on a stack, and take slots from it for places that are filled anew.

    Args:
        slots: `(T, H, C)`, the slot of each place, `EMPTY` where it has none; written.
        free: `(T, F)`, a stack of slots per row; written.
        count: `(T,)`, how many slots are on each stack; written.
        rows: `(S,)`, which rows of these tables are meant.
        kept: `(S, H, C)`, the blocks that stay, `EMPTY` elsewhere; see `select`.
        places: `(S, H, K)`, those that are filled, best first, `EMPTY` where there are no more. One that has a slot keeps it.

    Returns:
        `places` without those for which no slot was left; the best blocks of all heads are served first.
    """
    own, stack, depth = slots[rows], free[rows], count[rows]
    again = torch.zeros((*own.shape[:2], own.shape[2] + 1), dtype=torch.bool, device=own.device)
    again.scatter_(2, torch.where(places >= 0, places, own.shape[2]), True)
    given = ((kept < 0) & ~again[..., :-1] & (own >= 0)).flatten(1)
    top = torch.where(given, depth[:, None] + given.cumsum(1) - 1, stack.shape[1])
    stack = torch.nn.functional.pad(stack, (0, 1)).scatter(1, top, own.flatten(1))
    depth = depth + given.sum(1)
    own = own.masked_fill(given.view_as(own), EMPTY)

    place = places.clamp(min=0)
    needs = ((places >= 0) & (own.gather(2, place) < 0)).transpose(1, 2).flatten(1)
    order = needs.cumsum(1)
    served = needs & (order <= depth[:, None])
    taken = stack.gather(1, torch.where(served, depth[:, None] - order, stack.shape[1] - 1))
    by_place = (places.shape[0], places.shape[2], places.shape[1])
    served, taken, needs = (table.view(by_place).transpose(1, 2) for table in (served, taken, needs))
    padded = torch.nn.functional.pad(own, (0, 1))
    padded.scatter_(2, torch.where(served, place, own.shape[2]), taken)
    slots[rows], free[rows], count[rows] = padded[..., :-1], stack[:, :-1], depth - served.sum((1, 2))
    return places.masked_fill(needs & ~served, EMPTY)


def _best(accept: Tensor, gain: Tensor, count: int) -> Tensor:
    """Those of `(S, H, K)` accepted swaps that are among the `count` of their sequence that gain most."""
    sequences, heads, places = accept.shape
    if count >= heads * places:
        return accept
    ranked = gain.masked_fill(~accept, -1.0).flatten(1)
    best = torch.zeros_like(accept).flatten(1)
    best.scatter_(1, ranked.topk(count, dim=1).indices, True)
    return accept & best.view(sequences, heads, places)


def _candidates(mass: Tensor, low: Tensor, high: Tensor) -> Tensor:
    number = torch.arange(mass.shape[2], device=mass.device)
    return ((number >= low[:, None]) & (number < high[:, None]))[:, None, :]
