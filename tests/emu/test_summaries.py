"""The kernels of key summaries, emulated, against the reference."""

import pytest
import torch

from oasiskv.ops import reference, reference_summaries

from ..unit.codebooks import make_book
from .calls import Calls

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GROUPS = [(1, 1, 1), (2, 3, 2), (2, 4, 9)]  # kv heads, heads of a group, rows


def scored(sequences, blocks, pages, seed=0):
    """A table of pages with EMPTY entries and entries that point nowhere; and which of them count."""
    torch.manual_seed(seed)
    table = torch.randint(0, pages, (sequences, blocks))
    odd = torch.rand(table.shape)
    table = torch.where(odd < 0.1, -1, torch.where(odd > 0.9, pages + 5, table))
    return table, (table >= 0) & (table < pages)


def assert_logits(ours, expected, counts, tolerance=1e-4):
    assert ours.shape == expected.shape
    mask = counts[:, None, None].expand_as(ours) if counts.dim() == 2 else counts
    torch.testing.assert_close(ours[mask], expected[mask], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "rows"), GROUPS)
def test_exact_logits(emulator, dtype, kv_heads, group, rows):
    pages, counts = scored(2, 11, 6)
    arena = torch.randn(6 * kv_heads, 2, 4, 8).to(dtype)
    queries = torch.randn(2, rows, kv_heads * group, 8).to(dtype)
    logits = Calls(emulator).exact_logits(queries, arena, pages, kv_heads, 0.5)
    expected = reference.exact_logits(queries, arena, torch.where(counts, pages, -1), kv_heads, 0.5)
    assert_logits(logits, expected, counts)
    assert (logits[~counts[:, None, None].expand_as(logits)] == -torch.inf).all()


@pytest.mark.parametrize("block_size", [5, 64])
def test_exact_logits_of_large_blocks(emulator, block_size):
    pages, counts = torch.tensor([[1, 0]]), torch.ones(1, 2, dtype=torch.bool)
    arena, queries = torch.randn(2, 2, block_size, 128), torch.randn(1, 1, 2, 128)
    assert_logits(
        Calls(emulator).exact_logits(queries, arena, pages, 1, 0.1),
        reference.exact_logits(queries, arena, pages, 1, 0.1),
        counts,
    )


def test_exact_logits_with_a_soft_cap(emulator):
    pages, counts = torch.tensor([[1, 0]]), torch.ones(1, 2, dtype=torch.bool)
    arena, queries = torch.randn(2, 2, 5, 64), torch.randn(1, 3, 2, 64)
    assert_logits(
        Calls(emulator).exact_logits(queries, arena, pages, 1, 0.5, 2.0),
        reference.exact_logits(queries, arena, pages, 1, 0.5, 2.0),
        counts,
    )


def keys_of(dtype, count=3, heads=2, block_size=4, head_dim=8, seed=0):
    torch.manual_seed(seed)
    return torch.randn(count, heads, block_size, head_dim).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_minmax(emulator, dtype):
    keys, pages = keys_of(dtype, head_dim=132), torch.tensor([4, 0, 2])
    keys[0, 0, 1, 3] = torch.nan
    bounds = torch.zeros(6, 2, 2, 132, dtype=dtype)
    expected = bounds.clone()
    Calls(emulator).minmax_write(bounds, pages, keys)
    reference_summaries.minmax_write(expected, pages, keys)
    assert torch.equal(bounds.nan_to_num(9.0), expected.nan_to_num(9.0))


def test_keys_may_be_views_and_pages_may_point_nowhere(emulator):
    keys = torch.randn(3, 4, 2, 8).transpose(1, 2)
    bounds = torch.zeros(6, 2, 2, 8)
    expected = bounds.clone()
    Calls(emulator).minmax_write(bounds, torch.tensor([4, -1, 6]), keys)
    reference_summaries.minmax_write(expected, torch.tensor([4]), keys[:1])
    assert torch.equal(bounds, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "rows"), GROUPS)
def test_minmax_score(emulator, dtype, kv_heads, group, rows):
    pages, counts = scored(2, 35, 6)
    bounds = torch.randn(6, kv_heads, 2, 8).to(dtype)
    queries = torch.randn(2, rows, kv_heads * group, 8)
    expected = reference_summaries.minmax_score(bounds, torch.where(counts, pages, -1), queries, 0.5)
    assert_logits(Calls(emulator).minmax_score(bounds, pages, queries, 0.5), expected, counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outward", [False, True])
def test_minmax4(emulator, dtype, outward):
    keys, pages = keys_of(dtype, head_dim=136) * 3, torch.tensor([4, 0, 2])
    keys[1] *= 1e-6
    keys[2, 0] = 3e4
    codes, ranges = torch.zeros(6, 2, 2, 68, dtype=torch.uint8), torch.zeros(6, 2, 2, 2).half()
    expected = codes.clone(), ranges.clone()
    Calls(emulator).minmax4_write(codes, ranges, pages, keys, outward)
    reference_summaries.minmax4_write(*expected, pages, keys, outward)
    assert torch.equal(ranges, expected[1])
    assert torch.equal(codes, expected[0])
    rows = torch.tensor([[4, 2], [-1, 0]])
    bounds, wanted = Calls(emulator).minmax4_read(codes, ranges, rows), reference_summaries.minmax4_read(codes, ranges, rows)
    assert torch.equal(bounds[rows >= 0], wanted[rows >= 0])
    by_slot = codes.flatten(0, 1), ranges.flatten(0, 1)
    assert torch.equal(Calls(emulator).minmax4_read(*by_slot, torch.tensor([9])), wanted[0, 0, 1:2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bit2_write(emulator, dtype):
    keys, pages = keys_of(dtype, head_dim=20), torch.tensor([4, 0, 2])
    bounds = torch.stack([keys.amin(2), keys.amax(2)], 2).float()
    bounds[0, 0, 1] = bounds[0, 0, 0]
    bounds[1, 0, 1] = bounds[1, 0, 0] - 1
    codes = torch.zeros(6, 2, 4, 5, dtype=torch.uint8)
    expected = codes.clone()
    Calls(emulator).bit2_write(codes, pages, keys, bounds)
    reference_summaries.bit2_write(expected, pages, keys, bounds)
    assert torch.equal(codes, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group", "rows"), GROUPS)
def test_bit2_score(emulator, dtype, kv_heads, group, rows):
    torch.manual_seed(0)
    codes = torch.randint(256, (10, 4, 2), dtype=torch.uint8)
    slots = torch.randint(-1, 11, (2, kv_heads, 7))
    counts = (slots >= 0) & (slots < 10)
    bounds = torch.randn(2, kv_heads, 7, 2, 8)
    queries = torch.randn(2, rows, kv_heads * group, 8).to(dtype)
    logits = Calls(emulator).bit2_score(codes, slots, bounds, queries, 0.5)
    expected = reference_summaries.bit2_score(codes, torch.where(counts, slots, -1), bounds, queries, 0.5)
    assert_logits(logits, expected, counts.repeat_interleave(group, 1)[:, None].expand_as(logits))


def book_of(kv_heads, head_dim=8, bits=20):
    torch.manual_seed(3)
    variances = torch.rand(kv_heads, head_dim).sort(descending=True).values ** 4 * 10 + 1e-4
    return make_book(variances, bits * kv_heads, head_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 16])
def test_transform_write(emulator, dtype, block_size):
    book, keys, pages = book_of(2), keys_of(dtype, block_size=block_size), torch.tensor([4, 0, 2])
    keys[0, 1, 2] = torch.nan
    codes = book.codes(6, block_size)
    codes.fill_(0)
    expected = codes.clone()
    Calls(emulator).transform_write(codes, pages, keys, *book.write_arguments())
    reference_summaries.transform_write(expected, pages, keys, *book.write_arguments())
    assert torch.equal(codes, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 16, 6])
@pytest.mark.parametrize(("kv_heads", "group", "rows"), GROUPS)
def test_transform_score(emulator, dtype, block_size, kv_heads, group, rows):
    book = book_of(kv_heads)
    codes = book.codes(6, block_size)
    codes.copy_(torch.randint(256, codes.shape, dtype=torch.uint8))
    pages, counts = scored(2, 83, 6)
    queries = torch.randn(2, rows, kv_heads * group, 8).to(dtype)
    logits = Calls(emulator).transform_score(codes, pages, queries, *book.score_arguments(), 0.5)
    expected = reference_summaries.transform_score(codes, torch.where(counts, pages, -1), queries, *book.score_arguments(), 0.5)
    assert_logits(logits, expected, counts)


def test_more_nibbles_than_fit_at_once(emulator):
    torch.manual_seed(0)
    nibbles, components = 150, 100
    codes = torch.randint(256, (5, nibbles, 8), dtype=torch.uint8)
    pages, counts = scored(1, 60, 5)
    queries, mean, decode = torch.randn(1, 2, 4, 8), torch.randn(2, 8), torch.randn(2, components, 8)
    levels, offsets = torch.randn(nibbles, 16, 4) * 0.1, torch.tensor([0, 90])
    of_head = torch.randint(components, (nibbles, 4)) + (torch.arange(nibbles)[:, None] >= 90) * components
    arguments = queries, mean, decode, levels, of_head, offsets, 0.5
    expected = reference_summaries.transform_score(codes, torch.where(counts, pages, -1), *arguments)
    assert_logits(Calls(emulator).transform_score(codes, pages, *arguments), expected, counts)
