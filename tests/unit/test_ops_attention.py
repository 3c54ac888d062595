import math

import pytest
import torch

from oasiskv import ops

from . import naive

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LENGTHS = (23, 9, 1)
PLACES, ARENA_PLACES, KV_HEADS = 5, 2, 2


def make_case(dtype=torch.float32, head_dim=8, block_size=4, group=2, rows=3, seed=0):
    """Three sequences of different lengths and row counts, tables in random order with `EMPTY` entries, and garbage wherever
    no row may look: in slot 0, which no table names, and in the tokens after the last row."""
    torch.manual_seed(seed)
    count = len(LENGTHS)
    pool = torch.randn(1 + count * KV_HEADS * PLACES, 2, block_size, head_dim).to(dtype)
    arena = torch.randn(1 + count * KV_HEADS * ARENA_PLACES, 2, block_size, head_dim).to(dtype)
    slots = 1 + torch.randperm(pool.shape[0] - 1).view(count, KV_HEADS, PLACES)
    arena_slots = 1 + torch.randperm(arena.shape[0] - 1).view(count, KV_HEADS, ARENA_PLACES)
    blocks = torch.full_like(slots, -1)
    arena_blocks = torch.full_like(arena_slots, -1)
    positions = torch.full((count, rows), -1)
    for memory in (pool, arena):
        memory[0, 0], memory[0, 1] = math.nan, math.inf
    for s, length in enumerate(LENGTHS):
        own = max(1, rows - s)
        start = length * block_size // 4
        positions[s, :own] = torch.arange(start, start + own)
        last = start + own - 1
        for h in range(KV_HEADS):
            listed = torch.randperm(last // block_size + 1)
            listed = listed[listed != last // block_size][: PLACES - 2 + ARENA_PLACES - 1].tolist()
            blocks[s, h, 1] = last // block_size
            for place, block in zip((0, 2, 3), listed, strict=False):
                blocks[s, h, place] = block
            for block in listed[3:]:
                arena_blocks[s, h, 1] = block
            pool[slots[s, h, 1], :, last % block_size + 1 :] = math.nan
    slots[blocks < 0], arena_slots[arena_blocks < 0] = -1, -1
    queries = torch.randn(count, rows, KV_HEADS * group, head_dim).to(dtype)
    return queries, pool, slots, blocks, arena, arena_slots, arena_blocks, positions, head_dim**-0.5


def check(case, dtype=torch.float32):
    output, lse = ops.paged_attention(*case)
    expected, expected_lse = naive.paged_attention(*case)
    assert output.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_equals_the_loop_over_visible_tokens(dtype, head_dim, block_size, group, rows):
    check(make_case(dtype, head_dim, block_size, group, rows), dtype)


def test_the_case_reads_the_arena_and_has_padding_rows_and_empty_places():
    _, _, slots, blocks, _, _, arena_blocks, positions, _ = make_case(rows=4)
    assert (arena_blocks >= 0).any()
    assert (arena_blocks < 0).any()
    assert (blocks < 0).any()
    assert (positions < 0).any()
    assert (slots != 0).all()


def test_without_an_arena():
    queries, pool, slots, blocks, _, _, _, positions, scale = make_case()
    check((queries, pool, slots, blocks, None, None, None, positions, scale))


def test_garbage_that_no_row_may_see_leaves_the_output_finite():
    case = make_case(rows=4)
    output, lse = ops.paged_attention(*case)
    seen = case[7] >= 0
    assert output.isfinite().all()
    assert lse[seen].isfinite().all()


def test_a_padding_row_is_zero_with_logsumexp_minus_infinity():
    case = make_case(rows=4)
    output, lse = ops.paged_attention(*case)
    padding = case[7] < 0
    assert (output[padding] == 0).all()
    assert (lse[padding] == -math.inf).all()


@pytest.mark.parametrize("places", [0, 3])
@pytest.mark.parametrize("with_arena", [False, True])
def test_an_empty_working_set_gives_zero_and_minus_infinity(places, with_arena):
    queries, pool, _, _, arena, _, _, positions, scale = make_case()
    nothing = torch.full((3, KV_HEADS, places), -1)
    tables = (arena, nothing, nothing) if with_arena else (None, None, None)
    output, lse = ops.paged_attention(queries, pool, nothing, nothing, *tables, positions, scale)
    assert (output == 0).all()
    assert (lse == -math.inf).all()


def test_rows_are_causal_among_themselves():
    queries, pool, slots, blocks, *arena, positions, scale = make_case(rows=4)
    before, _ = ops.paged_attention(queries, pool, slots, blocks, *arena, positions, scale)
    last = int(positions[0].max())
    pool[slots[0, :, 1], :, last % 4] = 100.0
    after, _ = ops.paged_attention(queries, pool, slots, blocks, *arena, positions, scale)
    assert torch.equal(after[0, :3], before[0, :3])
    assert not torch.equal(after[0, 3], before[0, 3])


def test_the_order_of_the_places_does_not_matter():
    queries, pool, slots, blocks, *arena, positions, scale = make_case()
    turned = torch.tensor([3, 1, 4, 0, 2])
    first, _ = ops.paged_attention(queries, pool, slots, blocks, *arena, positions, scale)
    second, _ = ops.paged_attention(queries, pool, slots[..., turned], blocks[..., turned], *arena, positions, scale)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_large_logits_do_not_overflow():
    queries, *rest = make_case()
    output, lse = ops.paged_attention(queries * 1e4, *rest)
    assert output.isfinite().all()
    assert not lse.isnan().any()


def test_nothing_is_written():
    case = make_case()
    before = [value.clone() for value in case if isinstance(value, torch.Tensor)]
    ops.paged_attention(*case)
    after = [value for value in case if isinstance(value, torch.Tensor)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("softcap", [0.3, 5.0, 50.0])
def test_a_soft_cap_of_the_logits(dtype, softcap):
    queries, *rest = make_case(dtype, 64, 4, 2, 3)
    check((queries * 4, *rest, softcap), dtype)
