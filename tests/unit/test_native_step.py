"""What a step does per layer in native code, on every code path, against the reference."""

import math

import pytest
import torch

from oasiskv import ops
from oasiskv.errors import InputError
from oasiskv.ops import reference_step as reference
from oasiskv.types import Rotary

from .native import library, path, run  # noqa: F401 (a fixture)
from .test_native_selection import number
from .test_ops_attention import TOLERANCE

DTYPES = list(TOLERANCE)


def by_page(pages, heads):
    """`(S, N)` pages to the slots of an arena in which those of a page are adjacent, `(S, H, N)`."""
    return torch.where(pages[:, None] >= 0, pages[:, None] * heads + torch.arange(heads)[:, None], -1)


def step_case(dtype=torch.float32, group=2, rows=1, seed=0, blocks=30, places=6, per_row=3, dense=1):
    """Three sequences, `dense` of them dense, of different lengths and row counts: sinks and tail in the base tables, selected
    blocks in table rows of any order, with `EMPTY` entries everywhere, and garbage in slots and pages that no table names."""
    torch.manual_seed(seed)
    count, heads, size, dim, base = 3, 2, 4, 16, 3
    sparse = count - dense
    pool = torch.randn(1 + count * heads * (base + places), 2, size, dim).to(dtype)
    arena = torch.randn((1 + sparse * blocks) * heads, 2, size, dim).to(dtype)
    pool[0], arena[:heads] = math.nan, math.nan
    order = 1 + torch.randperm(pool.shape[0] - 1)
    slots = order[: count * heads * base].view(count, heads, base).clone()
    listed = torch.full_like(slots, -1)
    table_rows = 5
    selected = torch.full((table_rows, heads, places), -1)
    there = torch.full_like(selected, -1)
    free = order[count * heads * base :].view(count, heads, places)
    members = torch.randperm(count)[:sparse].sort().values
    which = torch.randperm(table_rows)[:sparse]
    pages = torch.full((sparse, blocks), -1)
    all_pages = 1 + torch.randperm(sparse * blocks)
    num_blocks, low, high = (torch.zeros(sparse, dtype=torch.int64) for _ in range(3))
    positions, weights = torch.full((count, rows), -1), torch.zeros(sparse, rows)
    for s in range(count):
        own = max(1, rows - s)
        sealed = blocks - 4 * s
        start = sealed * size + 1
        positions[s, :own] = torch.arange(start, start + own)
        listed[s, :, 0], listed[s, :, 2] = 0, sealed
    for m, s in enumerate(members.tolist()):
        own = max(1, rows - s)
        num_blocks[m], low[m], high[m] = blocks - 4 * s, 1, blocks - 4 * s
        pages[m, : num_blocks[m]] = all_pages[m * blocks : m * blocks + int(num_blocks[m])]
        weights[m, :own] = 0.8 ** torch.arange(own)
        for h in range(heads):
            some = 1 + torch.randperm(int(num_blocks[m]) - 1)[: number(0, places + 1)]
            at = torch.randperm(places)[: len(some)]
            selected[which[m], h, at], there[which[m], h, at] = some, free[s, h, at]
    slots[listed < 0] = -1
    queries = torch.randn(count, heads * group, rows, dim).to(dtype).transpose(1, 2)
    logits = torch.randn(sparse, rows, heads * group, blocks) * 3
    return [
        queries, pool, slots, listed, arena, by_page(pages, heads), logits, num_blocks, members, which, selected, there, low,
        high, weights, positions, per_row, 0.05 * group, dim**-0.5,
    ]  # fmt: skip


def assert_step(case, dtype=torch.float32):
    output, counts = run(ops.corrected_attention, *case)
    expected, expected_counts = reference.corrected_attention(*case)
    assert output.dtype == dtype
    assert output.is_contiguous()
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(counts[:2], expected_counts[:2])
    torch.testing.assert_close(counts[2], expected_counts[2], rtol=1e-4, atol=1e-5, equal_nan=True)
    return counts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "rows"), [(1, 1), (3, 1), (16, 1), (1, 2), (4, 5), (2, 16)])
@pytest.mark.parametrize("dense", [0, 1, 2])
def test_a_layer_of_a_step_equals_the_reference(path, dtype, group, rows, dense):  # noqa: F811
    counts = assert_step(step_case(dtype, group, rows, seed=group + rows, dense=dense), dtype)
    assert counts[0] > 0
    assert 0 < counts[2] < 1


@pytest.mark.parametrize("seed", range(20))
def test_any_step_equals_the_reference(path, seed):  # noqa: F811
    torch.manual_seed(seed)
    case = step_case(
        rows=number(1, 5), seed=seed, blocks=number(15, 400), places=number(1, 40), per_row=number(0, 9), dense=number(0, 3)
    )
    assert_step(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5])
def test_a_step_with_a_soft_cap_equals_the_reference(path, dtype, rows):  # noqa: F811
    case = step_case(dtype, rows=rows, seed=8)
    case[0] = case[0] * 5
    without = reference.corrected_attention(*case)[0]
    assert_step([*case, 1.5], dtype)
    assert not torch.allclose(reference.corrected_attention(*case, 1.5)[0].float(), without.float(), atol=0.05)


def test_empty_working_sets(path):  # noqa: F811
    case = step_case(seed=3)
    case[10], case[11] = torch.full_like(case[10], -1), torch.full_like(case[11], -1)
    assert_step(case)
    case[2], case[3] = (torch.full_like(table, -1) for table in case[2:4])
    assert_step(case)
    case[10], case[11] = case[10][..., :0], case[11][..., :0]
    assert_step(case)


def test_without_sealed_blocks_nothing_is_missing(path):  # noqa: F811
    case = step_case(seed=4)
    case[5], case[6], case[10] = case[5][..., :0], case[6][..., :0], torch.full_like(case[10], -1)
    case[7], case[12], case[13] = (torch.zeros_like(bound) for bound in (case[7], case[12], case[13]))
    assert assert_step(case).tolist() == [0, 0, 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [1, 3])
def test_logits_that_are_no_numbers_give_what_torch_gives(path, rows, value):  # noqa: F811
    case = step_case(rows=rows, seed=5)
    case[6][0, 0, 0, ::3] = value
    assert_step(case)
    case[6][:] = value
    assert_step(case)


def test_padding_of_a_sequence_counts_for_nothing(path):  # noqa: F811
    case = step_case(rows=4, seed=6)
    case[15][case[8][1], 1:] = -1
    case[14][1, 1:] = 0
    first = assert_step(case)
    case[6][1, 1:] = 50 * torch.randn_like(case[6][1, 1:])
    assert_step(case)
    assert first[2] < 1


def test_what_the_library_has_no_code_for_goes_to_the_reference():
    library()
    case = step_case(torch.bfloat16, seed=7)
    case[0] = case[0].float()
    for found, expected in zip(ops.corrected_attention(*case), reference.corrected_attention(*case), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (1, lambda pool: pool[:, :1], r"pool.shape is .* must be \(num_slots, 2, block_size, head_dim\)"),
        (4, lambda arena: arena[..., :8], "a slot of arena is"),
        (3, lambda blocks: blocks[..., :-1], "blocks.shape is .* that of slots"),
        (5, lambda slots: slots[:1], "arena_slots.shape is"),
        (5, lambda slots: slots + 1000, r"corrected_attention: arena_slots holds \d+ at entry \d+; entries must be EMPTY"),
        (6, lambda logits: logits[..., :-1], "logits.shape is"),
        (7, lambda num_blocks: num_blocks[:1], "num_blocks.shape is .* that of members"),
        (8, lambda members: members * 0 + 3, "corrected_attention: members holds 3 at entry 0"),
        (8, lambda members: members * 0 - 1, "corrected_attention: members holds EMPTY at entry 0"),
        (9, lambda rows: rows * 0 + 5, "corrected_attention: rows holds 5 at entry 0"),
        (10, lambda selected: selected[:, :1], r"selected.shape is .* must be \(table_rows, 2, places\)"),
        (11, lambda slots: slots[..., :-1], "selected_slots.shape is .* that of selected"),
        (11, lambda slots: slots * 0 - 7, "corrected_attention: selected_slots holds -7 at entry 0"),
        (2, lambda slots: slots * 0 + 999, "slots holds 999 at entry 0"),
        (14, lambda weights: weights[:, :0], "weights.shape is"),
        (15, lambda positions: positions[:1], "positions.shape is"),
    ],
)
def test_a_step_that_cannot_be_right_is_refused(index, change, message):
    library()
    case = step_case(seed=8)
    case[index] = change(case[index])
    with pytest.raises(InputError, match=message):
        ops.corrected_attention(*case)


def table_case(seed):
    """Tables of a few rows, some of their places given up and filled anew from the arena."""
    torch.manual_seed(seed)
    rows, heads, places, sequences, swaps, sealed = 5, number(1, 4), number(1, 9), number(1, 5), number(0, 5), number(1, 30)
    blocks = torch.randint(-1, sealed, (rows, heads, places))
    slots = torch.randperm(rows * heads * places).view(rows, heads, places)
    stamps = torch.randint(0, 9, blocks.shape)
    which = torch.randperm(rows)[:sequences]
    kept = torch.where(torch.rand(sequences, heads, places) < 0.6, blocks[which], -1)
    swap, new = torch.full((sequences, heads, swaps), -1), torch.full((sequences, heads, swaps), -1)
    for table, block in zip(swap.flatten(0, 1), new.flatten(0, 1), strict=True):
        some = torch.randperm(places)[: number(0, min(swaps, places) + 1)]
        table[: len(some)], block[: len(some)] = some, torch.randint(0, sealed, (len(some),))
    pages = torch.stack([torch.randperm(sealed * 2)[:sealed] for _ in range(sequences)])
    pages[torch.rand(pages.shape) < 0.1] = -1
    pool = torch.randn(rows * heads * places, 2, 3, 5)
    arena = torch.randn(sealed * 2 * heads, 2, 3, 5)
    return blocks, slots, stamps, which, kept, swap, new, by_page(pages, heads), pool, arena


@pytest.mark.parametrize("seed", range(30))
def test_marking_loading_and_publishing_equal_the_reference(seed):
    library()
    blocks, slots, stamps, which, kept, swap, new, in_arena, pool, arena = table_case(seed)
    mine, theirs = ([table.clone() for table in (blocks, stamps, pool)] for _ in range(2))
    filled = run(ops.mark_places, mine[0], slots, which, kept, swap)
    assert torch.equal(filled, reference.mark_places(theirs[0], slots, which, kept, swap))
    assert torch.equal(mine[0], theirs[0])
    counts = run(ops.load_blocks, arena, mine[2], in_arena, new, filled)
    assert torch.equal(counts, reference.load_blocks(arena, theirs[2], in_arena, new, filled))
    assert torch.equal(mine[2], theirs[2])
    ops.publish_blocks(mine[0], mine[1], which, kept, swap, new, kept + 7)
    reference.publish_blocks(theirs[0], theirs[1], which, kept, swap, new, kept + 7)
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_any_dtype_are_loaded(dtype):
    library()
    *_, new, in_arena, pool, arena = table_case(2)
    pool, arena = pool.to(dtype), arena.to(dtype)
    slots = torch.arange(new.numel()).view_as(new)
    expected = pool.clone()
    reference.load_blocks(arena, expected, in_arena, new, slots)
    ops.load_blocks(arena, pool, in_arena, new, slots)
    assert torch.equal(pool, expected)


def test_tables_that_cannot_be_right_are_refused():
    library()
    blocks, slots, stamps, which, kept, swap, new, in_arena, pool, arena = table_case(2)
    with pytest.raises(InputError, match="mark_places: rows holds 9 at entry 0"):
        ops.mark_places(blocks, slots, which * 0 + 9, kept, swap)
    with pytest.raises(InputError, match="mark_places: rows holds EMPTY at entry 0"):
        ops.mark_places(blocks, slots, which * 0 - 1, kept, swap)
    with pytest.raises(InputError, match="mark_places: places holds 99 at entry 0"):
        ops.mark_places(blocks, slots, which, kept, swap * 0 + 99)
    with pytest.raises(InputError, match=r"kept.shape is"):
        ops.mark_places(blocks, slots, which, kept[..., :-1], swap)
    with pytest.raises(InputError, match=r"places.shape is .* must be \(sequences, kv_heads, swaps\)"):
        ops.mark_places(blocks, slots, which, kept, swap[0])
    with pytest.raises(InputError, match="load_blocks: blocks holds 999 at entry 0"):
        ops.load_blocks(arena, pool, in_arena, new * 0 + 999, new)
    with pytest.raises(InputError, match="load_blocks: slots holds 9999 at entry 0"):
        ops.load_blocks(arena, pool, in_arena, new, new * 0 + 9999)
    with pytest.raises(InputError, match=r"load_blocks: arena_slots holds 9999 at entry \d+"):
        ops.load_blocks(arena, pool, in_arena * 0 + 9999, new, new)
    with pytest.raises(InputError, match="a slot of arena is"):
        ops.load_blocks(arena[:, :, :2], pool, in_arena, new, new)
    with pytest.raises(InputError, match=r"new_blocks.shape is"):
        ops.publish_blocks(blocks, stamps, which, kept, swap, new[..., :-1], kept)
    with pytest.raises(InputError, match="publish_blocks: places holds 99 at entry 0"):
        ops.publish_blocks(blocks, stamps, which, kept, swap * 0 + 99, new, kept)


def guess_case(dtype, rows, planes, seed=0):
    torch.manual_seed(seed)
    raw = torch.randn(3, rows, 4, 10).to(dtype)
    queries = torch.randn(3, 4, rows, 10).to(dtype).transpose(1, 2)
    rotary = Rotary(tuple(0.5**plane for plane in range(planes)), scaling=1.2)
    positions = torch.randint(0, 9000, (3, rows))
    return rotary, raw, queries, torch.randn(6, 4, 10), torch.tensor([5, 0, 2]), positions


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("planes", [0, 3, 5])
@pytest.mark.parametrize("rows", [1, 4])
def test_guesses_and_what_is_learnt_equal_the_reference(dtype, rows, planes):
    library()
    rotary, raw, queries, errors, which, positions = guess_case(dtype, rows, planes)
    turns = rotary.turns(positions)
    found = run(ops.guess_queries, raw, errors, which, turns)
    torch.testing.assert_close(found, reference.guess_queries(raw, errors, which, turns))
    torch.testing.assert_close(found, rotary.rotate(raw.float() + errors[which][:, None], positions))
    before = positions.clone()
    before[1, 0] += 1  # was guessed for another position: teaches nothing
    mine, theirs = errors.clone(), errors.clone()
    ops.learn_errors(mine, which, queries, raw, turns, positions, before, rotary.scaling, 0.7)
    reference.learn_errors(theirs, which, queries, raw, turns, positions, before, rotary.scaling, 0.7)
    torch.testing.assert_close(mine, theirs)
    assert torch.equal(mine[[0, 1, 3, 4]], errors[[0, 1, 3, 4]])
    true = rotary.rotate(queries[:, :1], positions[:, :1], inverse=True)[2, 0]
    torch.testing.assert_close(mine[2], 0.7 * errors[2] + 0.3 * (true - raw[2, 0].float()))


def test_guesses_that_cannot_be_right_are_refused():
    library()
    rotary, raw, queries, errors, which, positions = guess_case(torch.float32, 2, 5)
    turns = rotary.turns(positions)
    with pytest.raises(InputError, match="guess_queries: rows holds 6 at entry 0"):
        ops.guess_queries(raw, errors, which * 0 + 6, turns)
    with pytest.raises(InputError, match="turns have 6 planes, and head_dim is 10"):
        ops.guess_queries(raw, errors, which, torch.zeros(3, 2, 2, 6))
    with pytest.raises(InputError, match=r"errors.shape is"):
        ops.guess_queries(raw, errors[:, :1], which, turns)
    with pytest.raises(InputError, match=r"turns.shape is"):
        ops.guess_queries(raw, errors, which, turns[:1])
    with pytest.raises(InputError, match=r"guessed.shape is"):
        ops.learn_errors(errors, which, queries, raw[:, :1], turns, positions, positions, 1.0, 0.7)
    with pytest.raises(InputError, match="learn_errors: rows holds EMPTY at entry 1"):
        ops.learn_errors(errors, torch.tensor([0, -1, 2]), queries, raw, turns, positions, positions, 1.0, 0.7)
