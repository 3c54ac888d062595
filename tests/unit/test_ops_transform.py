import pytest
import torch

from oasiskv import ops

from . import naive
from .codebooks import make_book, table_error

SKEWED = torch.tensor([[9.0, 4.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.05], [3.0, 1.0, 0.3, 0.1, 0.02, 0.01, 0.005, 0.001]])
WITHOUT_FIRST = torch.tensor([[1e-9] * 8, [3.0, 1.0, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05]])
WITHOUT_LAST = WITHOUT_FIRST.flip(0)
PAGES = 9


def write_and_score(book, keys, queries, pages, scale):
    codes = book.codes(PAGES, keys.shape[2])
    order = torch.randperm(PAGES)[: keys.shape[0]]
    ops.transform_write(codes, order, keys, *book.write_arguments())
    where = torch.where(pages >= 0, order[pages.clamp(min=0)], -1)
    return ops.transform_score(codes, where, queries, *book.score_arguments(), scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize(("block_size", "group", "rows"), [(4, 1, 1), (4, 3, 4), (16, 8, 16), (16, 1, 4)])
@pytest.mark.parametrize("variances", [SKEWED, WITHOUT_FIRST, WITHOUT_LAST], ids=["skewed", "first-empty", "last-empty"])
def test_written_blocks_score_as_their_dequantised_keys(backend, dtype, head_dim, block_size, group, rows, variances):
    torch.manual_seed(head_dim + rows)
    book = make_book(variances, 5, head_dim)
    scale = head_dim**-0.5
    spread = torch.randn(6, 2, block_size, book.decode.shape[1])
    keys = (book.mean[:, None] + spread @ book.decode + 0.1 * torch.randn(6, 2, block_size, head_dim)).to(dtype)
    queries = torch.randn(2, rows, 2 * group, head_dim).to(dtype)
    # a fork reads the same pages in another order than they were written, and shares some
    pages = torch.tensor([[3, 0, 5, 1], [0, 3, 4, -1]])
    blocks = [book.dequantised(block) for block in keys]
    expected = naive.block_logits(queries, [[blocks[p] if p >= 0 else None for p in row] for row in pages.tolist()], scale)
    logits = write_and_score(book, keys, queries, pages, scale)
    assert logits.dtype == torch.float32
    real = (pages >= 0)[:, None, None].expand(expected.shape)
    error = 2e-3 * (1 + expected.abs())
    if backend == "native":
        error += table_error(book, queries, scale)[..., None]
    assert ((logits - expected).abs() <= error)[real].all()


def test_the_books_of_these_cases_are_as_they_are_called():
    torch.manual_seed(0)
    first, last, skewed = (make_book(variances, 5, 8).layout for variances in (WITHOUT_FIRST, WITHOUT_LAST, SKEWED))
    assert first.bits[0].sum() == 0
    assert last.bits[1].sum() == 0
    counts = (skewed.bits > 0).sum(1)
    assert counts[0] != counts[1]
    assert len({int(n) for n in skewed.bits[skewed.bits > 0]}) > 1


def test_writing_leaves_other_pages_alone_and_is_repeatable():
    torch.manual_seed(3)
    book = make_book(SKEWED, 5, 8)
    keys = torch.randn(2, 2, 4, 8)
    codes = book.codes(PAGES, 4)
    codes.fill_(77)
    ops.transform_write(codes, torch.tensor([4, 1]), keys, *book.write_arguments())
    first = codes.clone()
    untouched = [page for page in range(PAGES) if page not in (1, 4)]
    assert (codes[untouched] == 77).all()
    assert (codes[[1, 4]] != 77).any()
    ops.transform_write(codes, torch.tensor([4, 1]), keys, *book.write_arguments())
    assert torch.equal(codes, first)


def test_a_key_that_is_not_finite_gives_finite_scores():
    torch.manual_seed(4)
    book = make_book(SKEWED, 5, 8)
    keys = torch.randn(1, 2, 4, 8)
    keys[0, 0, 0, 0], keys[0, 1, 1, 1], keys[0, 1, 2, 2] = float("nan"), float("inf"), float("-inf")
    scores = write_and_score(book, keys, torch.randn(1, 1, 2, 8), torch.tensor([[0]]), 1.0)
    assert scores.isfinite().all()


@pytest.mark.parametrize("kind", ["sequences", "rows"])
def test_each_sequence_and_row_is_scored_on_its_own(kind):
    torch.manual_seed(5)
    book = make_book(SKEWED, 5, 8)
    codes = book.codes(PAGES, 4)
    ops.transform_write(codes, torch.arange(PAGES), torch.randn(PAGES, 2, 4, 8), *book.write_arguments())
    queries, pages = torch.randn(3, 4, 4, 8), torch.randint(0, PAGES, (3, 5))
    together = ops.transform_score(codes, pages, queries, *book.score_arguments(), 0.5)
    for number in range(3):
        if kind == "sequences":
            part, own, expected = queries[number : number + 1], pages[number : number + 1], together[number : number + 1]
        else:
            part, own, expected = queries[:, number : number + 1], pages, together[:, number : number + 1]
        alone = ops.transform_score(codes, own, part.contiguous(), *book.score_arguments(), 0.5)
        torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-5)
