"""paged_attention of the CUDA kernels, emulated, against the reference."""

import inspect
import math

import pytest
import torch

from oasiskv.ops import _abi, reference

from ..unit.test_ops_attention import make_case
from .calls import Calls

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def check(emulator, case):
    dtype = case[0].dtype
    output, lse = Calls(emulator).paged_attention(*case)
    expected, expected_lse = reference.paged_attention(*case)
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_dim(emulator, dtype, head_dim):
    check(emulator, make_case(dtype, head_dim, 4, 2, 3))


@pytest.mark.parametrize("block_size", [4, 5, 16, 32, 64])
def test_every_block_size(emulator, block_size):
    check(emulator, make_case(torch.bfloat16, 64, block_size, 2, 3))


@pytest.mark.parametrize(("group", "rows"), [(1, 1), (3, 1), (4, 4), (8, 3), (4, 12), (5, 16), (7, 16)])
def test_every_number_of_query_rows(emulator, group, rows):
    check(emulator, make_case(torch.float16, 64, 8, group, rows))


@pytest.mark.parametrize(
    ("head_dim", "block_size", "group", "rows"), [(8, 4, 2, 3), (128, 16, 4, 1), (256, 16, 3, 7), (80, 5, 1, 2)]
)
def test_float32(emulator, head_dim, block_size, group, rows):
    check(emulator, make_case(torch.float32, head_dim, block_size, group, rows))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("softcap", [0.3, 5.0, 50.0])
def test_a_soft_cap(emulator, dtype, softcap):
    queries, *rest = make_case(dtype, 64, 4, 2, 3)
    check(emulator, (queries * 4, *rest, softcap))


def long_case(dtype, places, arena_places, block_size=4, head_dim=64, rows=2, heads=2):
    """One sequence with more places than one split takes."""
    torch.manual_seed(1)
    pool = torch.randn(heads * places + 3, 2, block_size, head_dim).to(dtype)
    arena = torch.randn(heads * arena_places + 2, 2, block_size, head_dim).to(dtype)
    slots = torch.randperm(pool.shape[0])[: heads * places].view(1, heads, places)
    arena_slots = torch.randperm(arena.shape[0])[: heads * arena_places].view(1, heads, arena_places)
    listed = torch.stack([torch.randperm(places + arena_places) for _ in range(heads)])[None]
    last = (places + arena_places) * block_size
    positions = torch.arange(last - rows - 1, last - 1)[None]
    queries = torch.randn(1, rows, heads * 2, head_dim).to(dtype)
    tables = slots, listed[..., :places].contiguous(), arena, arena_slots, listed[..., places:].contiguous()
    return queries, pool, *tables, positions, head_dim**-0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("places", "arena_places"), [(70, 40), (33, 0), (5, 100)])
def test_splits_are_merged(emulator, dtype, places, arena_places):
    case = long_case(dtype, places, arena_places)
    check(emulator, case if arena_places else (*case[:4], None, None, None, *case[7:]))


def test_the_case_needs_several_splits(emulator):
    fields = {"sequences": 1, "rows": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 64, "block_size": 4, "places": 70}
    signature = inspect.signature(_abi.PACK["paged_attention"]).parameters
    numbers = dict.fromkeys(signature, 0) | fields | {"arena_places": 40, "dtype": _abi.FLOAT16, "scale": 1.0}
    needed = emulator.library.oasis_scratch_bytes(_abi.NUMBERS["paged_attention"], _abi.PACK["paged_attention"](**numbers))
    assert needed > 2 * 4 * 4 * 64 * 3


def test_threads_may_run_in_any_order(checked, order):
    checked.order = order
    check(checked, make_case(torch.bfloat16, 64, 16, 4, 5))
    check(checked, make_case(torch.float32, 64, 16, 4, 5))


def test_without_an_arena(emulator):
    queries, pool, slots, blocks, _, _, _, positions, scale = make_case(torch.bfloat16, 64)
    check(emulator, (queries, pool, slots, blocks, None, None, None, positions, scale))


@pytest.mark.parametrize("places", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_empty_working_set_gives_zero_and_minus_infinity(emulator, places, dtype):
    queries, pool, _, _, _, _, _, positions, scale = make_case(dtype, 64)
    nothing = torch.full((3, 2, places), -1)
    output, lse = Calls(emulator).paged_attention(queries, pool, nothing, nothing, None, None, None, positions, scale)
    assert (output == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_entries_that_point_nowhere_are_empty(emulator, dtype):
    queries, pool, slots, blocks, arena, arena_slots, arena_blocks, positions, scale = make_case(dtype, 64)
    wild = slots.clone()
    wild[:, :, 0], wild[:, :, 2] = pool.shape[0], -(2**40)
    tame = torch.where((wild < 0) | (wild >= pool.shape[0]), -1, wild)
    tame_blocks = torch.where(tame < 0, -1, blocks)
    output, lse = Calls(emulator).paged_attention(
        queries, pool, wild, blocks, arena, arena_slots, arena_blocks, positions, scale
    )
    expected, expected_lse = reference.paged_attention(
        queries, pool, tame, tame_blocks, arena, arena_slots, arena_blocks, positions, scale
    )
    torch.testing.assert_close(output.float(), expected.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


def test_queries_may_be_a_view(emulator):
    queries, *rest = make_case(torch.bfloat16, 64)
    wide = torch.randn(3, 2, 5, 64, dtype=torch.bfloat16).repeat(1, 2, 1, 1)
    view = wide[:, :3, :4].transpose(1, 2).contiguous().transpose(1, 2)
    view.copy_(queries)
    check(emulator, (view, *rest))


def test_large_logits_do_not_overflow(emulator):
    queries, *rest = make_case(torch.bfloat16, 64)
    output, lse = Calls(emulator).paged_attention(queries * 1e4, *rest)
    assert output.isfinite().all()
    assert not lse.isnan().any()


@pytest.mark.parametrize(("head_dim", "block_size"), [(72, 16), (64, 2), (64, 128)])
def test_what_has_no_code_is_said_to_be_unsupported(emulator, head_dim, block_size):
    queries, pool, slots, blocks, *_, positions, scale = make_case(torch.bfloat16, head_dim, block_size)
    with pytest.raises(AssertionError, match=f"status {_abi.UNSUPPORTED}"):
        Calls(emulator).paged_attention(queries, pool, slots, blocks, None, None, None, positions, scale)
