"""append_rows, copy_blocks and read_slots of the CUDA kernels, emulated."""

import pytest
import torch

from oasiskv.ops import _abi, reference

from .calls import Calls
from .emulator import Finding


def rows_case(dtype, head_dim, heads=3, tokens=5, block_size=4):
    torch.manual_seed(0)
    pool = torch.randn(tokens * heads + 2, 2, block_size, head_dim).to(dtype)
    slots = torch.randperm(pool.shape[0])[: tokens * heads].view(tokens, heads)
    keys, values = (torch.randn(tokens, heads, head_dim).to(dtype) for _ in range(2))
    return pool, keys, values, slots, torch.randint(block_size, (tokens,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("head_dim", [1, 6, 64])
def test_rows_are_appended(emulator, dtype, head_dim):
    pool, *rest = rows_case(dtype, head_dim)
    expected = pool.clone()
    reference.append_rows(expected, *rest)
    Calls(emulator).append_rows(pool, *rest)
    assert torch.equal(pool, expected)


def test_rows_may_be_views(emulator):
    pool, keys, values, slots, offsets = rows_case(torch.bfloat16, 8)
    packed = torch.randn(5, 2, 3, 9).bfloat16()
    keys, values = packed[:, 0, :, :8], packed[:, 1, :, 1:]
    expected = pool.clone()
    reference.append_rows(expected, keys, values, slots, offsets)
    Calls(emulator).append_rows(pool, keys, values, slots, offsets)
    assert torch.equal(pool, expected)


def test_rows_that_go_nowhere_are_left_out(emulator):
    pool, keys, values, slots, offsets = rows_case(torch.float32, 8)
    slots[0, 0], slots[1, 1], slots[2, 2], offsets[3], offsets[4] = -1, pool.shape[0], -(2**50), 4, -1
    expected = pool.clone()
    for token in range(3):
        for head in range(3):
            if token != head:
                expected[slots[token, head], 0, offsets[token]] = keys[token, head]
                expected[slots[token, head], 1, offsets[token]] = values[token, head]
    Calls(emulator).append_rows(pool, keys, values, slots, offsets)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(
    ("dtype", "slot"), [(torch.uint8, (2, 3, 5)), (torch.bfloat16, (2, 16, 128)), (torch.float32, (2, 4, 6))]
)
def test_blocks_are_copied(emulator, dtype, slot):
    torch.manual_seed(0)
    source, target = (torch.randint(100, (9, *slot)).to(dtype) for _ in range(2))
    source_slots, target_slots = torch.tensor([3, -1, 8, 0, 4]), torch.tensor([5, 2, -1, 6, 0])
    expected = target.clone()
    reference.copy_blocks(source, expected, source_slots, target_slots)
    Calls(emulator).copy_blocks(source, target, source_slots, target_slots)
    assert torch.equal(target, expected)


def test_more_blocks_than_threads_are_copied(emulator):
    source, target = torch.randn(70, 2, 16, 64), torch.zeros(70, 2, 16, 64)
    order = torch.randperm(70)
    Calls(emulator).copy_blocks(source, target, order, torch.arange(70))
    assert torch.equal(target, source[order])


def test_pairs_that_point_nowhere_are_left_out(emulator):
    source, target = torch.randn(3, 2, 4, 8), torch.zeros(4, 2, 4, 8)
    Calls(emulator).copy_blocks(source, target, torch.tensor([3, 1, 2]), torch.tensor([0, 4, 3]))
    assert torch.equal(target[3], source[2])
    assert (target[:3] == 0).all()


def test_two_pairs_with_one_target_are_found(emulator):
    with pytest.raises(Finding, match="two threads write"):
        Calls(emulator).copy_blocks(
            torch.randn(3, 2, 4, 8), torch.zeros(3, 2, 4, 8), torch.tensor([0, 1]), torch.tensor([2, 2])
        )


def test_nothing_is_moved(emulator):
    pool, nothing = torch.randn(3, 2, 4, 8), torch.empty(0, dtype=torch.int64)
    Calls(emulator).copy_blocks(pool, pool.clone(), nothing, nothing)
    Calls(emulator).append_rows(pool, torch.empty(0, 3, 8), torch.empty(0, 3, 8), nothing.view(0, 3), nothing)


def test_slots_are_read_in_the_order_of_a_table(emulator):
    pool, total = torch.randint(9, (6, 2, 4, 8)).float(), torch.full((1,), torch.nan)
    slots = torch.tensor([5, 0, -1, 3, 9])
    emulator.run("read_slots", pool=pool, slots=slots, sum=total, count=5, num_slots=6, slot_bytes=256)
    assert total.item() == pool[[5, 0, 3]].sum()


def test_a_slot_that_is_no_multiple_of_64_bytes_is_refused(emulator):
    fields = {"pool": torch.zeros(4), "slots": torch.zeros(1, dtype=torch.int64), "sum": torch.zeros(1)}
    assert emulator.status("read_slots", **fields, count=1, num_slots=1, slot_bytes=16) == _abi.INVALID
    assert "slot_bytes is 16" in emulator.error()
