import pytest
import torch

from oasiskv import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize(("block_size", "group", "rows"), [(4, 1, 1), (4, 3, 4), (16, 8, 16)])
def test_a_score_is_the_sum_of_the_larger_products_with_the_bounds(dtype, head_dim, block_size, group, rows):
    torch.manual_seed(0)
    bounds = torch.full((9, 2, 2, head_dim), 50.0, dtype=dtype)
    keys = torch.randn(5, 2, block_size, head_dim).to(dtype)
    written = torch.tensor([8, 0, 3, 5, 1])
    ops.minmax_write(bounds, written, keys)
    queries = torch.randn(2, rows, 2 * group, head_dim).to(dtype)
    pages = torch.tensor([[3, 8, 1], [5, -1, 0]])
    scores = ops.minmax_score(bounds, pages, queries, 0.25)
    assert scores.dtype == torch.float32
    where = {page: block for block, page in enumerate(written.tolist())}
    for s in range(2):
        for n, page in enumerate(pages[s].tolist()):
            if page < 0:
                continue
            for q in range(2 * group):
                block = keys[where[page], q // group].double()
                row = queries[s, :, q].double()
                most = torch.maximum(row * block.amin(0), row * block.amax(0)).sum(1) * 0.25
                torch.testing.assert_close(scores[s, :, q, n].double(), most, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_score_is_an_upper_bound_of_every_logit_in_the_block(dtype):
    torch.manual_seed(1)
    bounds = torch.zeros((6, 2, 2, 16), dtype=dtype)
    keys = (3 * torch.randn(6, 2, 8, 16)).to(dtype)
    ops.minmax_write(bounds, torch.arange(6), keys)
    queries = torch.randn(1, 4, 6, 16).to(dtype)
    scores = ops.minmax_score(bounds, torch.arange(6)[None], queries, 0.5)
    for q in range(6):
        exact = torch.einsum("rd,nbd->rnb", queries[0, :, q].double(), keys[:, q // 3].double()) * 0.5
        assert (scores[0, :, q].double() >= exact.amax(2) - 1e-4).all()


def test_writing_leaves_other_pages_alone():
    bounds = torch.full((4, 1, 2, 8), 5.0)
    ops.minmax_write(bounds, torch.tensor([2]), torch.randn(1, 1, 4, 8))
    assert (bounds[[0, 1, 3]] == 5.0).all()
    assert (bounds[2] != 5.0).all()
