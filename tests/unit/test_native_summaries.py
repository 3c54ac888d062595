"""Summaries of bounds and of two bits in native code, on every code path, against the reference."""

import pytest
import torch

from oasiskv import ops
from oasiskv.errors import InputError
from oasiskv.ops import reference_summaries as reference

from .native import path, run  # noqa: F401 (a fixture)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAGES = torch.tensor([[3, 8, 1, 0, -1, 5, 7, 7, 2, 6, 4], [5, -1, 0, 8, -1, -1, 1, 2, 3, 4, 6]])
WRITTEN = torch.tensor([8, 0, -1, 3, 5, 1])
SHAPES = [(8, 4), (24, 6), (64, 16), (80, 10), (96, 64), (128, 16), (256, 33)]
QUERIES = [(1, 1), (3, 2), (4, 16), (16, 1), (16, 5)]


def blocks_of_keys(dtype, head_dim, block_size, count=6, heads=2):
    """Keys `(count, heads, block_size, head_dim)`, a view of slots, as the engine hands them over."""
    spread = 3 * torch.randn(count, heads, 2, block_size, head_dim) + 2 * torch.randn(head_dim)
    return spread.to(dtype)[:, :, 0]


def assert_close_where_real(logits, expected, pages, tolerance=2e-5):
    assert logits.dtype == torch.float32
    assert logits.shape == expected.shape
    assert logits.isfinite().all()
    real = (pages >= 0)[:, None, None].expand(expected.shape)
    torch.testing.assert_close(logits[real], expected[real], rtol=tolerance, atol=tolerance)


def both_written(op, outputs, pages, *arguments):
    """What native code and the reference write into tensors like `outputs`; the reference knows no `EMPTY` pages."""
    native, expected = [[output.clone() for output in outputs] for _ in range(2)]
    getattr(ops, op)(*native, pages, *arguments)
    real = pages >= 0
    kept = [argument[real] if isinstance(argument, torch.Tensor) else argument for argument in arguments]
    getattr(reference, op)(*expected, pages[real], *kept)
    return native, expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), SHAPES)
def test_bounds_are_written_as_by_the_reference(path, dtype, head_dim, block_size):  # noqa: F811
    keys = blocks_of_keys(dtype, head_dim, block_size)
    bounds = torch.randn(9, 2, 2, head_dim).to(dtype)
    (native,), (expected,) = both_written("minmax_write", [bounds], WRITTEN, keys)
    assert torch.equal(native, expected)


@pytest.mark.parametrize("bounds_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 128, 256])
def test_bounds_score_as_by_the_reference(path, bounds_dtype, dtype, head_dim):  # noqa: F811
    bounds, queries = torch.randn(9, 2, 2, head_dim).to(bounds_dtype), torch.randn(2, 3, 8, head_dim).to(dtype)
    logits = run(ops.minmax_score, bounds, PAGES, queries, 0.3)
    assert_close_where_real(logits, reference.minmax_score(bounds, PAGES, queries, 0.3), PAGES)


@pytest.mark.parametrize(("group", "rows"), QUERIES)
@pytest.mark.parametrize("blocks", [1, 2, 7, 33, 300])
def test_bounds_score_any_number_of_queries_and_blocks(path, group, rows, blocks):  # noqa: F811
    bounds, queries = torch.randn(9, 2, 2, 64).bfloat16(), torch.randn(2, rows, 2 * group, 64).bfloat16()
    pages = torch.randint(-1, 9, (2, blocks))
    logits = run(ops.minmax_score, bounds, pages, queries, 0.125)
    assert_close_where_real(logits, reference.minmax_score(bounds, pages, queries, 0.125), pages)


def test_queries_may_be_views(path):  # noqa: F811
    bounds, queries = torch.randn(9, 2, 2, 64), torch.randn(2, 4, 5, 128)[..., :64].transpose(1, 2)[:, 1:4]
    expected = reference.minmax_score(bounds, PAGES, queries.contiguous(), 1.0)
    assert_close_where_real(ops.minmax_score(bounds, PAGES, queries, 1.0), expected, PAGES)


def assert_codes_agree(native, expected, level, unpack, thresholds):
    """Codes are those of the reference but where the level is, up to rounding, on a threshold."""
    differs = unpack(native) != unpack(expected)
    distance = (level[..., None] - thresholds).abs().amin(-1)
    assert (distance[differs] <= 1e-4 * level[differs].abs().clamp(min=1)).all()


def nibbles(codes):
    return torch.cat([codes & 15, codes >> 4], dim=-1)


def crumbs(codes):
    return torch.cat([codes & 3, codes >> 2 & 3, codes >> 4 & 3, codes >> 6], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize("outward", [True, False])
def test_bounds_in_4_bits_are_written_as_by_the_reference(path, dtype, head_dim, block_size, outward):  # noqa: F811
    keys = blocks_of_keys(dtype, head_dim, block_size)
    codes = torch.randint(256, (9, 2, 2, head_dim // 2), dtype=torch.uint8)
    ranges = torch.randn(9, 2, 2, 2).half()
    native, expected = both_written("minmax4_write", [codes, ranges], WRITTEN, keys, outward)
    assert torch.equal(native[1], expected[1])
    bounds = torch.stack([keys.amin(2), keys.amax(2)], 2).double()
    level = torch.zeros(9, 2, 2, head_dim, dtype=torch.float64)
    real = WRITTEN >= 0
    zero, step = expected[1][WRITTEN[real]].double()[..., None].unbind(-2)
    level[WRITTEN[real]] = (bounds[real] - zero) / step
    thresholds = torch.arange(16.0) if outward else torch.arange(15) + 0.5
    assert_codes_agree(native[0], expected[0], level, nibbles, thresholds)


@pytest.mark.parametrize("inner", [(), (1,), (3,)])
@pytest.mark.parametrize("head_dim", [8, 26, 64, 80, 128, 256])
def test_bounds_in_4_bits_are_read_as_by_the_reference(path, head_dim, inner):  # noqa: F811
    codes = torch.randint(256, (9, *inner, 2, head_dim // 2), dtype=torch.uint8)
    ranges = torch.randn(9, *inner, 2, 2).half()
    rows = torch.stack([PAGES, PAGES.flip(0)])
    read, expected = run(ops.minmax4_read, codes, ranges, rows), reference.minmax4_read(codes, ranges, rows)
    assert read.shape == expected.shape
    assert read.isfinite().all()
    assert torch.equal(read[rows >= 0], expected[rows >= 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), SHAPES)
def test_two_bits_are_written_as_by_the_reference(path, dtype, head_dim, block_size):  # noqa: F811
    keys = blocks_of_keys(dtype, head_dim, block_size)
    bounds = torch.stack([keys.amin(2), keys.amax(2)], 2).half().float()
    bounds[0, 0, 1] = bounds[0, 0, 0]  # one level only
    codes = torch.randint(256, (9, 2, block_size, head_dim // 4), dtype=torch.uint8)
    (native,), (expected,) = both_written("bit2_write", [codes], WRITTEN, keys, bounds)
    level = torch.zeros(9, 2, block_size, head_dim, dtype=torch.float64)
    low, high = bounds.double()[:, :, :1], bounds.double()[:, :, 1:]
    real = WRITTEN >= 0
    level[WRITTEN[real]] = ((keys.double() - low) / ((high - low) / 3).clamp(min=2.0**-24))[real]
    assert_codes_agree(native, expected, level, crumbs, torch.arange(3) + 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize(("group", "rows"), QUERIES)
def test_two_bits_score_as_by_the_reference(path, dtype, head_dim, block_size, group, rows):  # noqa: F811
    codes = torch.randint(256, (18, block_size, head_dim // 4), dtype=torch.uint8)
    slots = torch.stack([PAGES, PAGES + 9], 1)
    slots[:, 1][PAGES < 0] = -1
    bounds = torch.randn(*slots.shape, 2, head_dim)
    queries = torch.randn(2, rows, 2 * group, head_dim).to(dtype)
    arguments = codes, slots, bounds, queries, head_dim**-0.5
    assert_close_where_real(run(ops.bit2_score, *arguments), reference.bit2_score(*arguments), PAGES)


def test_large_logits_of_two_bits_do_not_overflow(path):  # noqa: F811
    codes = torch.randint(256, (18, 16, 4), dtype=torch.uint8)
    slots, bounds = torch.arange(18).view(1, 2, 9), 100 * torch.randn(1, 2, 9, 2, 16)
    arguments = codes, slots, bounds, 10 * torch.randn(1, 1, 4, 16), 1.0
    torch.testing.assert_close(ops.bit2_score(*arguments), reference.bit2_score(*arguments), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_are_not_finite(path, dtype, value):  # noqa: F811
    keys = blocks_of_keys(dtype, 80, 16)
    keys[0, 0, 3, 7] = keys[1, 1, 0, 79] = keys[3, 0, 15, 64] = value
    (native,), (expected,) = both_written("minmax_write", [torch.zeros(9, 2, 2, 80, dtype=dtype)], WRITTEN, keys)
    torch.testing.assert_close(native, expected, rtol=0, atol=0, equal_nan=True)
    outputs = [torch.zeros(9, 2, 2, 40, dtype=torch.uint8), torch.zeros(9, 2, 2, 2).half()]
    native, expected = both_written("minmax4_write", outputs, WRITTEN, keys, True)
    torch.testing.assert_close(native[1], expected[1], rtol=0, atol=0, equal_nan=True)
    finite = expected[1].isfinite().all(-1)
    assert torch.equal(native[0][finite], expected[0][finite])
    bounds = torch.stack([keys.amin(2), keys.amax(2)], 2).float().nan_to_num(0.0, 6e4, -6e4)
    (native,), (expected,) = both_written("bit2_write", [torch.zeros(9, 2, 16, 20, dtype=torch.uint8)], WRITTEN, keys, bounds)
    assert torch.equal(native, expected)


def test_nothing_to_score_or_to_write(path):  # noqa: F811
    queries, none = torch.randn(2, 3, 4, 8), torch.empty(2, 0, dtype=torch.int64)
    assert ops.minmax_score(torch.randn(9, 2, 2, 8), none, queries, 1.0).shape == (2, 3, 4, 0)
    assert ops.minmax_score(torch.randn(9, 2, 2, 8), none[:0], queries[:0], 1.0).shape == (0, 3, 4, 0)
    assert ops.minmax_score(torch.randn(0, 2, 2, 8), torch.full((2, 3), -1), queries, 1.0).shape == (2, 3, 4, 3)
    slots, bounds = torch.empty(2, 2, 0, dtype=torch.int64), torch.empty(2, 2, 0, 2, 8)
    assert ops.bit2_score(torch.empty(0, 4, 2, dtype=torch.uint8), slots, bounds, queries, 1.0).shape == (2, 3, 4, 0)
    kept, keys = torch.ones(3, 2, 2, 8), torch.empty(0, 2, 4, 8)
    ops.minmax_write(kept, none[0], keys)
    assert (kept == 1).all()
    assert ops.minmax4_read(torch.empty(0, 2, 4, dtype=torch.uint8), torch.empty(0, 2, 2).half(), none).shape == (2, 0, 2, 8)


CODES4, RANGES = torch.zeros(4, 2, 2, 4, dtype=torch.uint8), torch.zeros(4, 2, 2, 2).half()
CODES2, BOUNDS = torch.zeros(4, 2, 4, 2, dtype=torch.uint8), torch.zeros(4, 2, 2, 8)
KEYS, QUERIES8, TWO = torch.zeros(2, 2, 4, 8), torch.zeros(1, 1, 4, 8), torch.tensor([3, 1])
SLOTS = torch.zeros(1, 2, 3, dtype=torch.int64)
WRONG = {
    "bounds": ("minmax_write", (BOUNDS[:, :, 0], TWO, KEYS)),
    "keys": ("minmax_write", (BOUNDS, TWO, KEYS[:, :1])),
    "pages": ("minmax_write", (BOUNDS, TWO[:1], KEYS)),
    "pages holds 4": ("minmax_write", (BOUNDS, torch.tensor([4, 1]), KEYS)),
    "queries": ("minmax_score", (BOUNDS, TWO[None], QUERIES8[..., :4], 1.0)),
    "query heads": ("minmax_score", (BOUNDS, TWO[None], QUERIES8[:, :, :3], 1.0)),
    "pages.shape": ("minmax_score", (BOUNDS, TWO, QUERIES8, 1.0)),
    "pages holds -2": ("minmax_score", (BOUNDS, torch.tensor([[-2]]), QUERIES8, 1.0)),
    "pages.dtype": ("minmax_score", (BOUNDS, torch.tensor([[1.0]]), QUERIES8, 1.0)),
    "codes": ("minmax4_write", (CODES4.int(), RANGES, TWO, KEYS, True)),
    "ranges": ("minmax4_write", (CODES4, RANGES[:3], TWO, KEYS, True)),
    "codes is": ("minmax4_read", (CODES4.int(), RANGES, TWO)),
    "rows holds 4": ("minmax4_read", (CODES4, RANGES, torch.tensor([4]))),
    "keys.shape": ("bit2_write", (CODES2, TWO, KEYS[:, :, :3], BOUNDS[:2])),
    "bounds.shape": ("bit2_write", (CODES2, TWO, KEYS, BOUNDS)),
    "slots": ("bit2_score", (CODES2.flatten(0, 1), SLOTS[0], torch.zeros(1, 2, 3, 2, 8), QUERIES8, 1.0)),
    "slots holds 8": ("bit2_score", (CODES2.flatten(0, 1), SLOTS + 8, torch.zeros(1, 2, 3, 2, 8), QUERIES8, 1.0)),
}


@pytest.mark.parametrize("field", WRONG)
def test_what_cannot_be_right_is_refused(path, field):  # noqa: F811
    op, arguments = WRONG[field]
    with pytest.raises(InputError, match=field):
        getattr(ops, op)(*arguments)


def test_what_the_library_does_not_serve_goes_to_the_reference(path):  # noqa: F811
    wide = torch.zeros(4, 2, 2, 16)
    ops.minmax_write(wide[..., :8], TWO, KEYS + 1)
    assert (wide[TWO][..., :8] == 1).all()
    bounds = torch.randn(4, 2, 2, 8).double()
    expected = reference.minmax_score(bounds, TWO[None], QUERIES8 + 1, 1.0)
    assert torch.equal(ops.minmax_score(bounds, TWO[None], QUERIES8 + 1, 1.0), expected)
