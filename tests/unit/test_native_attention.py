"""Attention and exact logits in native code, on every code path, against the reference."""

import math

import pytest
import torch

from oasiskv import ops
from oasiskv.errors import InputError
from oasiskv.ops import reference

from .native import library, path, run  # noqa: F401 (a fixture)
from .test_ops_attention import TOLERANCE, make_case

DTYPES = list(TOLERANCE)


def assert_attention(case, dtype=torch.float32):
    expected, expected_lse = reference.paged_attention(*case)
    output, lse = run(ops.paged_attention, *case)
    assert output.dtype == dtype
    assert output.is_contiguous()
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize(("block_size", "group", "rows"), [(16, 4, 1), (4, 1, 3), (64, 3, 16), (33, 16, 2)])
def test_attention_equals_the_reference(path, dtype, head_dim, block_size, group, rows):  # noqa: F811
    assert_attention(make_case(dtype, head_dim, block_size, group, rows), dtype)


@pytest.mark.parametrize("group", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_queries(path, dtype, group, rows):  # noqa: F811
    assert_attention(make_case(dtype, 64, 8, group, rows, seed=group * rows), dtype)


def long_case(dtype, places=40, head_dim=128, rows=2, group=4, block_size=16):
    """Many blocks in random order, half of the table `EMPTY`, logits that grow so that the softmax must be corrected."""
    torch.manual_seed(places)
    heads = 2
    pool = torch.randn(heads * places, 2, block_size, head_dim)
    pool[:, 0] *= torch.linspace(0.1, 3.0, heads * places)[:, None, None]
    slots = torch.arange(heads * places).view(1, heads, places).clone()
    blocks = torch.stack([torch.randperm(places), torch.randperm(places)])[None]
    gone = torch.rand(1, heads, places) < 0.5
    slots[gone], blocks[gone] = -1, -1
    positions = torch.tensor([[places * block_size - rows + row for row in range(rows)]])
    queries = torch.randn(1, rows, heads * group, head_dim)
    return queries.to(dtype), pool.to(dtype), slots, blocks, None, None, None, positions, head_dim**-0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("places", [1, 3, 40, 130])
def test_long_tables(path, dtype, places):  # noqa: F811
    assert_attention(long_case(dtype, places), dtype)


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_nothing(threads):
    library()
    case = long_case(torch.bfloat16, places=600)
    alone = run(ops.paged_attention, *case)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = run(ops.paged_attention, *case)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_views_of_queries_and_tables_are_read_where_they_lie(path):  # noqa: F811
    queries, pool, slots, blocks, _, _, _, positions, scale = long_case(torch.float32)
    turned = queries.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.stack([slots, slots], dim=3)[..., 0]
    assert not turned.is_contiguous()
    assert not wide.is_contiguous()
    expected = reference.paged_attention(queries, pool, slots, blocks, None, None, None, positions, scale)
    found = run(ops.paged_attention, turned, pool, wide, blocks, None, None, None, positions, scale)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)


def test_memory_that_starts_anywhere(path):  # noqa: F811
    queries, pool, *rest = long_case(torch.bfloat16)
    shifted = torch.empty(pool.numel() + 1, dtype=pool.dtype)[1:].view(pool.shape).copy_(pool)
    assert shifted.data_ptr() % 4
    same = ops.paged_attention(queries, pool, *rest)
    assert all(torch.equal(a, b) for a, b in zip(same, run(ops.paged_attention, queries, shifted, *rest), strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_that_is_no_number_spoils_the_rows_that_see_it_only(path, dtype, value):  # noqa: F811
    case = long_case(dtype, places=6, rows=3)
    _, pool, slots, blocks, *_, positions, _ = case
    slots[0, 1], blocks[0, 1] = torch.arange(6, 12), torch.arange(6)
    clean, _ = ops.paged_attention(*case)
    last = int(positions.max())  # the last row alone sees it
    pool[slots[0, 1, last // 16], 0, last % 16, 3] = value
    output, lse = run(ops.paged_attention, *case)
    assert torch.equal(output[:, :, :4], clean[:, :, :4])
    assert torch.equal(output[:, :2], clean[:, :2])
    if math.isnan(value):
        assert output[0, 2, 4:].isnan().all()
        assert lse[0, 2, 4:].isnan().all()


def test_slots_beyond_two_gigabytes(path):  # noqa: F811
    # Addresses only: untouched pages of the pool take no memory.
    pool = torch.empty(70000, 2, 64, 128, dtype=torch.bfloat16)
    assert pool.numel() > 2**30
    pool[69999] = torch.randn(2, 64, 128)
    queries = torch.randn(1, 1, 4, 128, dtype=torch.bfloat16)
    tables = torch.tensor([[[69999]]]), torch.tensor([[[0]]]), None, None, None, torch.tensor([[63]])
    small = torch.zeros(1, 1, 1, dtype=torch.int64), *tables[1:]
    expected, _ = reference.paged_attention(queries, pool[69999:].clone(), *small, 0.1)
    output, _ = run(ops.paged_attention, queries, pool, *tables, 0.1)
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128])
@pytest.mark.parametrize(("block_size", "group", "rows"), [(16, 4, 1), (4, 1, 3), (64, 3, 16), (5, 16, 2)])
def test_exact_logits_equal_the_reference(path, dtype, head_dim, block_size, group, rows):  # noqa: F811
    torch.manual_seed(0)
    arena = torch.randn(300 * 2, 2, block_size, head_dim).to(dtype)
    queries = torch.randn(2, rows, 2 * group, head_dim).to(dtype)
    pages = torch.stack([torch.randperm(300), torch.randperm(300)])
    pages[1, -40:] = -1
    found = run(ops.exact_logits, queries, arena, pages, 2, 0.3)
    real = (pages >= 0)[:, None, None].expand(found.shape)
    expected = reference.exact_logits(queries, arena, pages, 2, 0.3)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)


SOFTCAPS = [0.01, 0.7, 8.0, 50.0, 1e6]
"""From where nothing but the signs is left of the logits to where they are as without a cap."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize(("head_dim", "group", "rows"), [(64, 4, 1), (72, 8, 3), (256, 2, 16)])
def test_attention_with_a_soft_cap_equals_the_reference(path, dtype, softcap, head_dim, group, rows):  # noqa: F811
    queries, *rest = make_case(dtype, head_dim, 16, group, rows)
    assert_attention((queries * 6, *rest, softcap), dtype)


def test_a_soft_cap_is_exact_to_float32(path):  # noqa: F811
    # Values that tell the tokens apart, and logits from tiny ones to such that reach the cap.
    pool, size = torch.zeros(1, 2, 64, 64), torch.logspace(-6, 3, 32)
    pool[0, 0, :, 0] = torch.cat([size, -size])
    pool[0, 1] = torch.eye(64)
    queries, one = torch.ones(1, 1, 1, 64), torch.tensor([[[0]]])
    output, lse = run(ops.paged_attention, queries, pool, one, one, None, None, None, torch.tensor([[63]]), 1.0, 30.0)
    logits = 30 * torch.tanh(pool[0, 0, :, 0].double() / 30)
    torch.testing.assert_close(output[0, 0, 0].double(), logits.softmax(0), rtol=3e-5, atol=0)
    torch.testing.assert_close(lse.flatten().double(), logits.logsumexp(0)[None], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_exact_logits_with_a_soft_cap_equal_the_reference(path, dtype, softcap):  # noqa: F811
    torch.manual_seed(0)
    arena, queries = torch.randn(30 * 2, 2, 5, 24).to(dtype), (8 * torch.randn(2, 3, 6, 24)).to(dtype)
    pages = torch.stack([torch.randperm(30), torch.randperm(30)])
    found = run(ops.exact_logits, queries, arena, pages, 2, 0.3, softcap)
    torch.testing.assert_close(found, reference.exact_logits(queries, arena, pages, 2, 0.3, softcap), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_with_a_soft_cap_an_endless_key_is_a_large_one_and_nan_stays_nan(path, value):  # noqa: F811
    queries, pool, slots, blocks, *none, positions, scale = long_case(torch.float32, places=6, rows=3)
    slots[0, 1], blocks[0, 1] = torch.arange(6, 12), torch.arange(6)
    pool[slots[0, 1, 0], 0, 3, 3] = value
    case = queries, pool, slots, blocks, *none, positions, scale, 5.0
    for found, expected in zip(run(ops.paged_attention, *case), reference.paged_attention(*case), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("softcap", [0.0, -1.0, math.nan, math.inf])
def test_a_soft_cap_that_is_none_is_refused(softcap):
    library()
    with pytest.raises(InputError, match=r"softcap is .*; it must be a finite number above 0, or None for no cap"):
        ops.paged_attention(*make_case(), softcap)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: lambda pool: pool[:, :1]}, r"pool.shape is .* must be \(num_slots, 2, block_size, head_dim\)"),
        ({0: lambda queries: queries[..., :4]}, r"queries.shape is .* must be"),
        ({0: lambda queries: queries[:, :, :3]}, "multiple of the kv heads"),
        ({3: lambda blocks: blocks[..., :-1]}, "blocks.shape is .* that of slots"),
        ({7: lambda positions: positions[:, :1]}, "positions.shape is"),
        ({4: lambda _: None}, "all three or not at all"),
        ({5: lambda slots: slots + 1000}, r"arena_slots holds \d+ at entry .* must be EMPTY"),
        ({2: lambda slots: slots * 0 - 2}, "slots holds -2 at entry 0; entries must be EMPTY"),
        ({2: lambda slots: slots.double()}, "slots.dtype is torch.float64"),
    ],
)
def test_what_cannot_be_right_is_refused(change, message):
    library()
    case = list(make_case())
    for number, edit in change.items():
        case[number] = edit(case[number])
    with pytest.raises(InputError, match=message):
        ops.paged_attention(*case)


def test_mixed_dtypes_go_to_the_reference():
    library()
    queries, *rest = make_case(torch.bfloat16)
    found = ops.paged_attention(queries.float(), *rest)
    expected = reference.paged_attention(queries.float(), *rest)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_pages_of_the_arena_are_checked():
    library()
    with pytest.raises(InputError, match=r"exact_logits: pages holds 2 at entry 1; entries must be EMPTY \(-1\) or 0 to 1"):
        ops.exact_logits(torch.randn(1, 1, 2, 8), torch.randn(4, 2, 4, 8), torch.tensor([[0, 2]]), 2, 0.5)
    with pytest.raises(InputError, match="kv_heads is 3; it must divide"):
        ops.exact_logits(torch.randn(1, 1, 2, 8), torch.randn(4, 2, 4, 8), torch.tensor([[0]]), 3, 0.5)
