"""Moving rows and blocks in native code."""

import pytest
import torch

from oasiskv import ops
from oasiskv.errors import InputError
from oasiskv.ops import reference

from .native import library

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _native():
    library()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("pairs", "head_dim", "block_size"), [(1, 8, 4), (300, 128, 16), (97, 80, 5)])
def test_blocks_arrive_bit_for_bit(dtype, threads, pairs, head_dim, block_size):
    source = torch.randn(400, 2, block_size, head_dim).to(dtype)
    target, expected = (torch.zeros(500, 2, block_size, head_dim, dtype=dtype) for _ in range(2))
    sources, targets = torch.randint(-1, 400, (pairs,)), torch.randperm(500)[:pairs]
    targets[::7] = -1
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ops.copy_blocks(source, target, sources, targets)
    finally:
        torch.set_num_threads(before)
    reference.copy_blocks(source, expected, sources, targets)
    assert torch.equal(target, expected)


def test_within_one_pool_and_between_overlapping_views():
    whole = torch.arange(10.0)[:, None, None, None].expand(10, 2, 4, 8).clone()
    expected = whole.clone()
    ops.copy_blocks(whole[:6], whole[4:], torch.tensor([0, 5]), torch.tensor([5, 2]))  # slot 5 of both is apart from 6 and 9
    expected[9], expected[6] = expected[0], expected[5]
    assert torch.equal(whole, expected)
    ops.copy_blocks(whole[:6], whole[4:], torch.tensor([3, 4]), torch.tensor([0, 1]))  # reads 3 and 4, writes 4 and 5
    expected[4], expected[5] = expected[3].clone(), expected[4].clone()
    assert torch.equal(whole, expected)


def test_a_target_that_is_a_view_and_another_dtype():
    source, target = torch.randn(4, 2, 4, 8), torch.zeros(4, 2, 4, 16)[..., ::2]
    ops.copy_blocks(source, target, torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(target[2], source[1])
    half = torch.zeros(4, 2, 4, 8, dtype=torch.bfloat16)
    ops.copy_blocks(source, half, torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(half[2], source[1].bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_views(dtype):
    torch.manual_seed(0)
    pool, expected = (torch.zeros(50, 2, 16, 72, dtype=dtype) for _ in range(2))
    keys, values = torch.randn(2, 3, 7, 72).to(dtype).transpose(1, 2)  # (heads, tokens, D) as models give them
    slots, offsets = torch.randperm(50)[:21].view(7, 3), torch.randint(0, 16, (7,))
    ops.append_rows(pool, keys, values, slots, offsets)
    reference.append_rows(expected, keys, values, slots, offsets)
    assert torch.equal(pool, expected)
    other = torch.randn(7, 3, 144).to(dtype)[..., ::2]
    ops.append_rows(pool, other, values, slots, offsets)
    reference.append_rows(expected, other, values, slots, offsets)
    assert torch.equal(pool, expected)


def test_a_bad_slot_is_refused_before_anything_is_written():
    pool, keys = torch.zeros(4, 2, 4, 8), torch.ones(2, 1, 8)
    with pytest.raises(InputError, match="append_rows: slots holds 4 at entry 1"):
        ops.append_rows(pool, keys, keys, torch.tensor([[0], [4]]), torch.tensor([0, 0]))
    with pytest.raises(InputError, match="append_rows: offsets holds 9 at entry 0"):
        ops.append_rows(pool, keys, keys, torch.tensor([[0], [1]]), torch.tensor([9, 0]))
    with pytest.raises(InputError, match="copy_blocks: source_slots holds -7 at entry 1"):
        ops.copy_blocks(torch.ones(4, 2, 4, 8), pool, torch.tensor([0, -7]), torch.tensor([0, 1]))
    with pytest.raises(InputError, match="copy_blocks: target_slots holds 4 at entry 0"):
        ops.copy_blocks(torch.ones(4, 2, 4, 8), pool, torch.tensor([0, 0]), torch.tensor([4, 1]))
    assert (pool == 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 4, 8),), "source.shape is"),
        ((torch.zeros(3, 2, 4, 16),), "a slot of source is"),
        ((torch.zeros(3, 2, 4, 8), torch.tensor([0, 1])), "they must be the same"),
        ((torch.zeros(3, 2, 4, 8), torch.tensor([0.5])), "source_slots.dtype is torch.float32; tables hold int64"),
    ],
)
def test_what_cannot_be_right_is_refused(arguments, message):
    source, slots = (*arguments, torch.tensor([0]))[:2]
    with pytest.raises(InputError, match=message):
        ops.copy_blocks(source, torch.zeros(3, 2, 4, 8), slots, torch.tensor([0]))


def test_rows_of_another_dtype_are_refused():
    keys = torch.zeros(1, 1, 8)
    with pytest.raises(InputError, match=r"keys and values are torch.float32.*must be torch.bfloat16"):
        ops.append_rows(torch.zeros(2, 2, 4, 8).bfloat16(), keys, keys, torch.tensor([[0]]), torch.tensor([0]))
