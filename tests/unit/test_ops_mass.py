import math

import pytest
import torch

from oasiskv import ops

from . import naive


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize(("block_size", "group", "rows"), [(4, 1, 1), (4, 3, 4), (16, 8, 16)])
def test_exact_logits_are_the_logsumexp_of_each_block(dtype, head_dim, block_size, group, rows):
    torch.manual_seed(0)
    kv_heads, scale = 2, head_dim**-0.5
    arena = torch.randn(7 * kv_heads, 2, block_size, head_dim).to(dtype)
    queries = torch.randn(2, rows, kv_heads * group, head_dim).to(dtype)
    pages = torch.tensor([[6, 0, 3, 1], [2, 6, -1, -1]])
    by_page = arena.view(7, kv_heads, 2, block_size, head_dim)[:, :, 0]
    keys = [[by_page[page] if page >= 0 else None for page in row] for row in pages.tolist()]
    expected = naive.block_logits(queries, keys, scale)
    logits = ops.exact_logits(queries, arena, pages, kv_heads, scale)
    assert logits.dtype == torch.float32
    real = (pages >= 0)[:, None, None].expand(expected.shape)
    torch.testing.assert_close(logits[real].double(), expected[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("softcap", [0.3, 5.0])
def test_exact_logits_with_a_soft_cap_of_the_tokens_logits(softcap):
    torch.manual_seed(0)
    arena, queries = torch.randn(7 * 2, 2, 4, 8), torch.randn(1, 3, 4, 8) * 4
    keys = list(arena.view(7, 2, 2, 4, 8)[:, :, 0])
    expected = naive.block_logits(queries, [keys], 1.0, softcap)
    logits = ops.exact_logits(queries, arena, torch.arange(7)[None], 2, 1.0, softcap)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_block_mass_is_the_softmax_summed_over_a_group(group, rows):
    torch.manual_seed(1)
    logits = torch.randn(3, rows, 2 * group, 6) * 3
    num_blocks = torch.tensor([6, 1, 4])
    mass = ops.block_mass(logits, num_blocks, 2)
    torch.testing.assert_close(mass.double(), naive.block_mass(logits, num_blocks, 2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mass.sum(3), torch.full((3, rows, 2), float(group)), rtol=1e-5, atol=1e-5)


def test_block_mass_ignores_garbage_beyond_the_blocks_and_gives_zero_there():
    logits = torch.randn(2, 1, 2, 4)
    logits[0, ..., 2:] = math.nan
    logits[1, ..., 2:] = math.inf
    mass = ops.block_mass(logits, torch.tensor([2, 2]), 2)
    assert mass.isfinite().all()
    assert (mass[..., 2:] == 0).all()


def test_block_mass_of_a_sequence_without_blocks_is_zero():
    mass = ops.block_mass(torch.randn(2, 3, 4, 5), torch.tensor([0, 5]), 2)
    assert (mass[0] == 0).all()
    assert (mass[1] > 0).all()


def test_block_mass_of_no_blocks_at_all():
    assert ops.block_mass(torch.empty(2, 3, 4, 0), torch.tensor([0, 0]), 2).shape == (2, 3, 2, 0)


def test_block_mass_does_not_overflow():
    mass = ops.block_mass(torch.tensor([[[[1e30, -1e30, 0.0]]]]), torch.tensor([3]), 1)
    assert mass.flatten().tolist() == [1.0, 0.0, 0.0]
