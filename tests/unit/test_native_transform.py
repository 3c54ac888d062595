"""Transform codes in native code, on every code path, against the reference."""

import pytest
import torch

from oasiskv import ops
from oasiskv.errors import InputError
from oasiskv.ops import reference_summaries as reference

from .codebooks import make_book, table_error
from .native import path, run  # noqa: F401 (a fixture)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COMPONENTS = 24


def falling(heads, components=COMPONENTS, seed=0):
    """Component variances that fall as they do in models, by another factor in each head."""
    generator = torch.Generator().manual_seed(seed)
    rate = 0.6 + 0.3 * torch.rand(heads, 1, generator=generator)
    return 20 * torch.rand(heads, 1, generator=generator) * rate ** torch.arange(components)


def scoring_case(dtype=torch.float32, head_dim=64, block_size=16, group=4, rows=1, nibbles=16, heads=3, blocks=37):
    """A book of `nibbles` on average per head, random codes, and pages of two sequences, some of them `EMPTY`."""
    torch.manual_seed(head_dim + rows)
    book = make_book(falling(heads, min(COMPONENTS, head_dim)), nibbles * heads, head_dim)
    codes = torch.randint(256, (11, book.layout.num_nibbles, block_size // 2), dtype=torch.uint8)
    queries = torch.randn(2, rows, heads * group, head_dim).to(dtype)
    pages = torch.randint(-1, 11, (2, blocks))
    return book, (codes, pages, queries, *book.score_arguments(), head_dim**-0.5)


def assert_scores(book, arguments):
    expected = reference.transform_score(*arguments)
    logits = run(ops.transform_score, *arguments)
    assert logits.shape == expected.shape
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()
    real = (arguments[1] >= 0)[:, None, None].expand(expected.shape)
    error = table_error(book, arguments[2], arguments[-1])[..., None].expand(expected.shape)
    assert ((logits - expected).abs() <= error + 1e-3)[real].all()
    return (logits - expected)[real]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_scores_are_within_the_error_of_the_tables(path, dtype, head_dim):  # noqa: F811
    assert_scores(*scoring_case(dtype, head_dim))


@pytest.mark.parametrize("block_size", [4, 6, 8, 10, 16, 20, 32, 34, 48, 64])
def test_any_block_size(path, block_size):  # noqa: F811
    assert_scores(*scoring_case(block_size=block_size))


@pytest.mark.parametrize("nibbles", [2, 3, 5, 8, 11, 16, 24])
@pytest.mark.parametrize("heads", [1, 3])
def test_any_number_of_nibbles(path, nibbles, heads):  # noqa: F811
    book, arguments = scoring_case(nibbles=nibbles, heads=heads, head_dim=128)
    assert_scores(book, arguments)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_any_number_of_queries(path, group, rows):  # noqa: F811
    assert_scores(*scoring_case(torch.bfloat16, group=group, rows=rows, nibbles=8))


@pytest.mark.parametrize("blocks", [1, 8, 63, 64, 65, 300])
def test_any_number_of_blocks(path, blocks):  # noqa: F811
    assert_scores(*scoring_case(blocks=blocks, nibbles=8))


def test_typical_errors_are_a_tenth_of_a_nat(path):  # noqa: F811
    torch.manual_seed(0)
    book, arguments = scoring_case(head_dim=128, nibbles=16, group=8, blocks=200)
    queries = torch.randn_like(arguments[2])
    deviation = (queries @ book.decode.flatten(0, 1).T * arguments[-1]).square().sum(-1).sqrt().mean()
    scaled = queries * (3 / deviation)  # so that logits spread by some 3 nats
    error = assert_scores(book, (*arguments[:2], scaled, *arguments[3:]))
    assert error.square().mean().sqrt() < 0.1
    assert error.mean().abs() < 0.03


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 10.0, 1e3, 1e6])
def test_logits_of_any_size_keep_their_accuracy(path, scale):  # noqa: F811
    book, arguments = scoring_case(head_dim=64, blocks=80)
    assert_scores(book, (*arguments[:-1], scale))


def test_each_query_has_its_own_scale(path):  # noqa: F811
    book, arguments = scoring_case(rows=3, blocks=20)
    queries = arguments[2] * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    assert_scores(book, (*arguments[:2], queries, *arguments[3:]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_query_that_is_not_finite_spoils_only_its_own_logits(path, value):  # noqa: F811
    _, arguments = scoring_case(rows=2, blocks=20)
    queries = arguments[2].clone()
    queries[0, 1, 5, 3] = value
    logits, sound = ops.transform_score(*arguments[:2], queries, *arguments[3:]), ops.transform_score(*arguments)
    others = torch.ones(2, 2, 12, dtype=torch.bool)
    others[0, 1, 5] = False
    assert torch.equal(logits[others], sound[others])
    assert not logits[0, 1, 5].isfinite().any()


def test_a_head_without_nibbles_scores_by_its_mean(path):  # noqa: F811
    variances = falling(3)
    variances[1] = 1e-9
    book = make_book(variances, 20, 64)
    _, arguments = scoring_case()
    codes = torch.randint(256, (11, book.layout.num_nibbles, 8), dtype=torch.uint8)
    assert_scores(book, (codes, *arguments[1:3], *book.score_arguments(), 0.125))


def test_pages_at_the_end_of_the_tensor_are_not_read_beyond(path):  # noqa: F811
    book, arguments = scoring_case(nibbles=3)
    assert_scores(book, (arguments[0][:1], torch.zeros(2, 5, dtype=torch.int64), *arguments[2:]))
    empty = torch.full((2, 5), -1)
    assert ops.transform_score(arguments[0][:0], empty, *arguments[2:]).shape == (2, 1, 12, 5)
    assert ops.transform_score(arguments[0], empty[:, :0], *arguments[2:]).shape == (2, 1, 12, 0)


def unpacked(codes, book):
    """Codes of each component, `(n, H, C, B)`."""
    nibble = torch.cat([codes & 15, codes >> 4], dim=-1)[:, book.layout.nibbles]
    return nibble >> book.layout.shifts[..., None] & (2 ** book.layout.bits[..., None] - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "block_size"), [(8, 4), (64, 16), (80, 6), (96, 64), (128, 16), (256, 10)])
def test_codes_are_those_of_the_reference(path, dtype, head_dim, block_size):  # noqa: F811
    torch.manual_seed(head_dim)
    book = make_book(falling(3, min(COMPONENTS, head_dim)), 30, head_dim)
    spread = torch.randn(5, 3, 2, block_size, book.decode.shape[1]) @ book.decode[:, None]
    keys = (spread + book.mean[:, None, None]).to(dtype)[:, :, 1]
    codes = torch.randint(256, (9, book.layout.num_nibbles, block_size // 2), dtype=torch.uint8)
    pages = torch.tensor([8, 0, -1, 3, 5])
    native, expected = codes.clone(), codes.clone()
    ops.transform_write(native, pages, keys, *book.write_arguments())
    real = pages >= 0
    reference.transform_write(expected, pages[real], keys[real], *book.write_arguments())
    assert torch.equal(native[[1, 2, 4, 6, 7]], codes[[1, 2, 4, 6, 7]])
    component = ((keys.double() - book.mean[:, None].double()) @ book.encode.double()).transpose(2, 3)[real]
    distance = (component[..., None] - book.thresholds[:, :, None].double()).abs().amin(-1)
    differs = unpacked(native[pages[real]], book) != unpacked(expected[pages[real]], book)
    assert (distance[differs] <= 1e-4 * component[differs].abs().clamp(min=1)).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_keys_that_are_not_finite_have_the_codes_of_the_reference(path, value):  # noqa: F811
    book = make_book(falling(2), 16, 64)
    keys = torch.randn(2, 2, 16, 64)
    keys[0, 0, 3, 7] = keys[1, 1, 0, 63] = value
    native, expected = book.codes(4, 16), book.codes(4, 16)
    ops.transform_write(native, torch.tensor([3, 1]), keys, *book.write_arguments())
    reference.transform_write(expected, torch.tensor([3, 1]), keys, *book.write_arguments())
    spoilt = torch.tensor([[3, 0, 3], [1, 1, 0]])
    for page, head, token in spoilt.tolist():
        assert torch.equal(unpacked(native, book)[page, head, :, token], unpacked(expected, book)[page, head, :, token])


def wrong_cases():
    torch.manual_seed(0)
    book = make_book(falling(2), 16, 64)
    codes, keys, queries = book.codes(4, 16), torch.randn(1, 2, 16, 64), torch.randn(1, 1, 4, 64)
    one, pages = torch.tensor([0]), torch.tensor([[0, 3]])
    mean, encode, thresholds, nibbles, shifts = book.write_arguments()
    _, decode, levels, components, offsets = book.score_arguments()
    many = book.layout.num_nibbles
    return {
        "codes": ("transform_write", (codes.int(), one, keys, *book.write_arguments())),
        "keys": ("transform_write", (codes, one, keys[:, :, :8], *book.write_arguments())),
        "encode": ("transform_write", (codes, one, keys, mean, encode[:1], thresholds, nibbles, shifts)),
        "thresholds": ("transform_write", (codes, one, keys, mean, encode, thresholds[..., :7], nibbles, shifts)),
        f"nibbles holds {many}": ("transform_write", (codes, one, keys, mean, encode, thresholds, nibbles * 0 + many, shifts)),
        "shifts holds 4": ("transform_write", (codes, one, keys, mean, encode, thresholds, nibbles, shifts * 0 + 4)),
        "pages holds 4": ("transform_score", (codes, pages + 1, queries, *book.score_arguments(), 1.0)),
        "queries": ("transform_score", (codes, pages, queries[..., :32], *book.score_arguments(), 1.0)),
        "mean": ("transform_score", (codes, pages, queries, mean[0], decode, levels, components, offsets, 1.0)),
        "levels": ("transform_score", (codes, pages, queries, mean, decode, levels[1:], components, offsets, 1.0)),
        "components holds -1": ("transform_score", (codes, pages, queries, mean, decode, levels, components - 1, offsets, 1.0)),
        "offsets": ("transform_score", (codes, pages, queries, mean, decode, levels, components, offsets[:1], 1.0)),
        "offsets do not ascend": (
            "transform_score",
            (codes, pages, queries, mean, decode, levels, components, torch.tensor([3, 0]), 1.0),
        ),
    }


@pytest.mark.parametrize("field", wrong_cases())
def test_what_cannot_be_right_is_refused(path, field):  # noqa: F811
    op, arguments = wrong_cases()[field]
    with pytest.raises(InputError, match=field):
        getattr(ops, op)(*arguments)


def test_larger_blocks_go_to_the_reference(path):  # noqa: F811
    _, arguments = scoring_case(block_size=66)
    assert torch.equal(ops.transform_score(*arguments), reference.transform_score(*arguments))
