import pytest
import torch

from oasiskv import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize("block_size", [4, 16])
def test_append_rows_writes_the_named_rows_and_nothing_else(dtype, head_dim, block_size):
    torch.manual_seed(0)
    pool = torch.randn(12, 2, block_size, head_dim).to(dtype)
    keys, values = torch.randn(2, 5, 2, head_dim).to(dtype)
    slots = torch.tensor([[0, 1], [0, 1], [11, 3], [7, 3], [2, 9]])
    offsets = torch.tensor([0, block_size - 1, 2, 1, 3])
    expected = pool.clone()
    for token in range(5):
        for head in range(2):
            expected[slots[token, head], 0, offsets[token]] = keys[token, head]
            expected[slots[token, head], 1, offsets[token]] = values[token, head]
    ops.append_rows(pool, keys, values, slots, offsets)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks_copies_pairs_and_leaves_out_those_with_an_empty_side(dtype):
    torch.manual_seed(1)
    source, target = torch.randn(6, 2, 4, 8).to(dtype), torch.randn(9, 2, 4, 8).to(dtype)
    source_slots = torch.tensor([[0, -1, 5], [2, 2, -1]])
    target_slots = torch.tensor([[8, 1, -1], [0, 4, -1]])
    expected = target.clone()
    expected[8], expected[0], expected[4] = source[0], source[2], source[2]
    ops.copy_blocks(source, target, source_slots, target_slots)
    assert torch.equal(target, expected)


def test_copy_blocks_within_one_tensor_reads_before_it_writes():
    pool = torch.arange(4.0)[:, None, None, None].expand(4, 2, 4, 8).clone()
    ops.copy_blocks(pool, pool, torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]))
    assert pool[:, 0, 0, 0].tolist() == [2, 0, 1, 3]


def test_copy_blocks_with_nothing_to_copy():
    pool = torch.randn(3, 2, 4, 8)
    before = pool.clone()
    ops.copy_blocks(pool, pool, torch.empty((2, 0), dtype=torch.int64), torch.empty((2, 0), dtype=torch.int64))
    ops.copy_blocks(pool, pool, torch.tensor([-1, 0]), torch.tensor([0, -1]))
    assert torch.equal(pool, before)
