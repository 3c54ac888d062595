"""The pure-torch reference of what a step does per layer: operations that are made of others, and changes of tables.

What others serve is called through `pieces`: the reference by default, or the ops of a device that has no code for the whole.
Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..types import EMPTY, turn
from . import reference


def corrected_attention(
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
    pieces: Any = reference,  # noqa: ANN401 (a module or namespace of ops)
) -> tuple[Tensor, Tensor]:
    """Attention over the working sets of S sequences, M of them sparse, and over what their exact queries still miss.

    The blocks of a sparse sequence that its rows need most and that are not selected are read in place, at most `per_row` for
    each of its rows, where the need exceeds `least_gain`.

    Args:
        queries, pool, positions, scale, softcap: as in `paged_attention`.
        slots, blocks: `(S, H, P)`, the working sets without the selected blocks.
        arena: `(num_arena_slots, 2, B, D)`.
        arena_slots, num_blocks: `(M, H, N)` and `(M,)`, the sealed blocks of the sparse sequences, and where they lie in the
            arena; those with an `EMPTY` are not there, and are not read.
        logits: `(M, R, Hq, N)`, estimated block logits of their queries, of capped logits where there is a cap.
        members: `(M,)`, which of the S sequences they are, in ascending order.
        rows: `(M,)`, which rows of the next two are theirs.
        selected, selected_slots: `(T, H, C)`, the selected blocks and where each lies, `EMPTY` where there is none.
        low, high: `(M,)`, the candidates are `low <= block < high`.
        weights: `(M, R)`, how likely each row is to stay, 0 for padding.

    Returns:
        The output, as that of `paged_attention`. And `(3,)` in float32: how many blocks were read in place, the most of any
        head, and the share of attention that fell on what was seen, by the exact logsumexp against the estimate for the
        candidates that are not held; its mean over rows and query heads.
    """
    held = selected[rows]
    there = torch.where(held >= 0, selected_slots[rows], EMPTY)
    real = positions[members] >= 0
    read = missing_blocks(logits, num_blocks, held, low, high, weights, real, per_row, least_gain, pieces)
    in_arena = at_blocks(arena_slots, read)
    read = torch.where(in_arena >= 0, read, EMPTY)
    places = torch.cat([slots, _spread(there, members, slots)], dim=2)
    listed = torch.cat([blocks, _spread(held, members, slots)], dim=2)
    there_too, read_too = _spread(in_arena, members, slots), _spread(read, members, slots)
    output, lse = pieces.paged_attention(queries, pool, places, listed, arena, there_too, read_too, positions, scale, softcap)
    estimate = missing_logsumexp(logits, torch.cat([held, read], dim=2), low, high)
    share = torch.sigmoid(lse[members] - estimate).mean(2).masked_fill(~real, 0.0).sum() / real.sum()
    per_head = (read >= 0).sum(2).float()
    return output, torch.stack([per_head.sum(), per_head.max(), share])


def missing_blocks(
    logits: Tensor,
    num_blocks: Tensor,
    held: Tensor,
    low: Tensor,
    high: Tensor,
    weights: Tensor,
    real: Tensor,
    per_row: int,
    least_gain: float,
    pieces: Any = reference,  # noqa: ANN401 (a module or namespace of ops)
) -> Tensor:
    """The blocks that `corrected_attention` reads in place if they are in the arena, `(M, H, K)`, `EMPTY` behind them.

    Arguments are as there, but `held`, `(M, H, C)`, the selected blocks, and `real`, `(M, R)`, which rows are no padding.
    """
    need = need_over_rows(pieces.block_mass(logits, num_blocks, held.shape[1]), weights)
    found, gain = pieces.top_missing(need, held, low, high, per_row * logits.shape[1])
    wanted = gain > least_gain
    wanted &= torch.arange(gain.shape[2], device=gain.device) < per_row * real.sum(1)[:, None, None]
    return torch.where(wanted, found, EMPTY)


def need_over_rows(mass: Tensor, weights: Tensor) -> Tensor:
    """How much some row of a sequence needs each block, `(S, R, H, N)` to `(S, H, N)`: the largest mass, weighted by `(S, R)`.

    Times the square root of the expected number of tokens: a block read for several tokens costs each of them less, and a lower
    need is worth it. That it is the root was found by trying.
    """
    if mass.shape[1] == 1:
        return mass[:, 0]
    most = (mass * weights[:, :, None, None]).amax(1)
    return most * weights.sum(1).sqrt()[:, None, None]


def missing_logsumexp(logits: Tensor, held: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Logsumexp of the block logits `(S, R, Hq, N)` of candidates that are not among the blocks held, `(S, H, K)`.

    `(S, R, Hq)`, -inf where there are none.
    """
    blocks = logits.shape[3]
    number = torch.arange(blocks, device=logits.device)
    missing = (number >= low[:, None]) & (number < high[:, None])
    padded = torch.nn.functional.pad(missing, (0, 1))[:, None].repeat(1, held.shape[1], 1)
    padded.scatter_(2, torch.where(held >= 0, held, blocks), False)
    unseen = padded[..., :-1].repeat_interleave(logits.shape[2] // held.shape[1], 1)[:, None]
    return torch.logsumexp(logits.masked_fill(~unseen, float("-inf")), dim=3)


def at_blocks(table: Tensor, blocks: Tensor) -> Tensor:
    """What a table `(S, H, N)` says of blocks `(S, H, K)`; `EMPTY` stays `EMPTY`."""
    if not table.shape[2]:
        return torch.full_like(blocks, EMPTY)
    return torch.where(blocks >= 0, table.gather(2, blocks.clamp(min=0)), EMPTY)


def mark_places(blocks: Tensor, slots: Tensor, rows: Tensor, kept: Tensor, places: Tensor) -> Tensor:
    """Take blocks out of the table whose slots will be overwritten.

    Args:
        blocks: `(T, H, C)`, the selected blocks by table row; written.
        slots: `(T, H, C)`, where each place's block lies.
        rows: `(S,)`, which rows of these tables are meant.
        kept: `(S, H, C)`, the blocks that stay, `EMPTY` elsewhere; see `select`.
        places: `(S, H, K)`, those that are filled anew, `EMPTY` where there are no more.

    Returns:
        The slots of these places, `(S, H, K)`.
    """
    blocks[rows] = kept
    return torch.where(places >= 0, slots[rows].gather(2, places.clamp(min=0)), EMPTY)


def load_blocks(
    arena: Tensor,
    pool: Tensor,
    arena_slots: Tensor,
    blocks: Tensor,
    slots: Tensor,
    pieces: Any = reference,  # noqa: ANN401 (a module or namespace of ops)
) -> Tensor:
    """Copy sealed blocks from the arena.

    Args:
        arena: `(num_arena_slots, 2, B, D)`.
        pool: `(num_slots, 2, B, D)`, written.
        arena_slots: `(S, H, N)`, where each block lies in the arena, `EMPTY` for those that do not.
        blocks, slots: `(S, H, K)`, what is copied, and where to; `EMPTY` slots are left out.

    Returns:
        `(S, 2)`: how many blocks a sequence loads, and the most of any of its heads.
    """
    pieces.copy_blocks(arena, pool, at_blocks(arena_slots, blocks), slots)
    loaded = (slots >= 0).sum(2)
    return torch.stack([loaded.sum(1), loaded.amax(1)], dim=1)


def publish_blocks(
    blocks: Tensor, selected_at: Tensor, rows: Tensor, kept: Tensor, places: Tensor, new_blocks: Tensor, stamps: Tensor
) -> None:
    """List blocks that are in their slots now.

    Args:
        blocks, selected_at: `(T, H, C)`, by table row: the selected blocks, and when each last was wanted; written.
        rows: `(S,)`, which rows of these tables are meant.
        kept, stamps: `(S, H, C)`, see `select`.
        places, new_blocks: `(S, H, K)`, the blocks that go to these places; `EMPTY` places are left out.
    """
    blocks[rows] = replaced(kept, places, new_blocks)
    selected_at[rows] = stamps


def replaced(resident: Tensor, places: Tensor, blocks: Tensor) -> Tensor:
    """`resident` with `blocks` put into `places`; `EMPTY` places are left out."""
    count = resident.shape[2]
    padded = torch.nn.functional.pad(resident, (0, 1), value=EMPTY)
    padded.scatter_(2, torch.where(places < 0, count, places), blocks)
    return padded[..., :count]


def guess_queries(raw: Tensor, errors: Tensor, rows: Tensor, turns: Tensor) -> Tensor:
    """Queries that are expected, from a projection that something is missing of.

    Args:
        raw: `(S, R, Hq, D)`, the projection, before rotary embedding.
        errors: `(T, Hq, D)` in float32, what it has lacked on average.
        rows: `(S,)`, which rows of `errors` are meant.
        turns: `(S, R, 2, planes)` in float32, see `Rotary.turns`.

    Returns:
        `(S, R, Hq, D)` in float32, after rotary embedding.
    """
    cosine, sine = turns[:, :, None].unbind(3)
    return turn(raw.float() + errors[rows][:, None], cosine, sine)


def learn_errors(
    errors: Tensor,
    rows: Tensor,
    queries: Tensor,
    guessed: Tensor,
    turns: Tensor,
    positions: Tensor,
    guessed_positions: Tensor,
    scaling: float,
    keep: float,
) -> None:
    """Move the average errors of guesses towards that of the first row of each sequence, the only one that is sure to stay.

    Args:
        errors: `(T, Hq, D)` in float32, written.
        rows: `(S,)`, which rows of `errors` are meant.
        queries: `(S, R, Hq, D)`, the true ones, after rotary embedding.
        guessed: `(S, R, Hq, D)`, see `raw` of `guess_queries`.
        turns, scaling: of the true queries, see `Rotary`.
        positions, guessed_positions: `(S, R)`; where those of a first row differ, nothing is learnt.
        keep: weight of the old average.
    """
    cosine, sine = turns[:, :1, None].unbind(3)
    true = turn(queries[:, :1].float(), cosine / scaling**2, -sine / scaling**2)
    before = errors[rows]
    after = keep * before + (1 - keep) * (true - guessed[:, :1].float())[:, 0]
    same = guessed_positions[:, :1] == positions[:, :1]
    errors[rows] = torch.where(same[..., None], after, before)


def _spread(table: Tensor, members: Tensor, like: Tensor) -> Tensor:
    """A table of the members `(M, ...)` as one of all sequences, as many as `like` has, `EMPTY` for the others."""
    if len(members) == len(like):
        return table
    wide = table.new_full((len(like), *table.shape[1:]), EMPTY)
    wide[members] = table
    return wide
