"""block_mass, top_missing, select and exchange_slots of the CUDA kernels, emulated, against the reference."""

import pytest
import torch

from oasiskv.ops import reference

from .calls import Calls


@pytest.mark.parametrize(("blocks", "kv_heads", "group", "rows"), [(1, 1, 1, 1), (37, 2, 3, 2), (5000, 1, 2, 1)])
def test_block_mass(emulator, blocks, kv_heads, group, rows):
    torch.manual_seed(0)
    logits = torch.randn(3, rows, kv_heads * group, blocks) * 5
    num_blocks = torch.tensor([blocks, 0, (blocks + 1) // 2])
    logits[0, 0, 0, 0] = -torch.inf if blocks > 1 else 1.0
    logits[2, ..., num_blocks[2] :] = torch.nan
    mass = Calls(emulator).block_mass(logits, num_blocks, kv_heads)
    torch.testing.assert_close(mass, reference.block_mass(logits, num_blocks, kv_heads), rtol=1e-5, atol=1e-6)


def test_block_mass_of_nothing(emulator):
    assert Calls(emulator).block_mass(torch.empty(2, 1, 4, 0), torch.tensor([0, 0]), 2).shape == (2, 1, 2, 0)


def distinct(*shape):
    """Masses that differ, so that there is one right order."""
    count = torch.Size(shape).numel()
    return (torch.randperm(count).float().view(shape) + 1) / count


def tables(sequences, heads, blocks, places, seed):
    torch.manual_seed(seed)
    mass = distinct(sequences, heads, blocks)
    resident = torch.stack([torch.randperm(max(blocks, places))[:places] for _ in range(sequences * heads)]).view(
        sequences, heads, places
    )
    resident[torch.rand(resident.shape) < 0.3] = -1
    low, high = torch.randint(0, blocks // 4 + 1, (sequences,)), torch.randint(blocks // 2, blocks + 1, (sequences,))
    return mass, resident, low, high


SHAPES = [(2, 3, 40, 8), (1, 1, 1, 1), (1, 2, 5, 12), (2, 1, 1500, 130)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [0, 1, 7, 2000])
def test_top_missing(emulator, shape, count):
    mass, resident, low, high = tables(*shape, seed=count)
    best, best_mass = Calls(emulator).top_missing(mass, resident, low, high, count)
    expected, expected_mass = reference.top_missing(mass, resident, low, high, count)
    assert torch.equal(best, expected)
    assert torch.equal(best_mass, expected_mass)


def test_of_equal_masses_the_first_blocks_win(emulator):
    mass = torch.tensor([[[0.5, 0.25, 0.5, 0.0, 0.5, -0.0, 0.25]]])
    resident, low, high = torch.tensor([[[4]]]), torch.tensor([0]), torch.tensor([7])
    best, _ = Calls(emulator).top_missing(mass, resident, low, high, 5)
    assert best.flatten().tolist() == [0, 2, 1, 6, 3]


def test_residents_outside_of_the_blocks_are_ignored(emulator):
    mass, _, low, high = tables(1, 2, 9, 3, seed=0)
    resident = torch.tensor([[[100, -7, 2**40], [9, -1, 3]]])
    best, _ = Calls(emulator).top_missing(mass, resident, low, high, 9)
    expected, _ = reference.top_missing(mass, resident, low, high, 9)
    assert torch.equal(best, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("max_new", "pooled"), [(0, 5), (3, 0), (4, 5), (1000, 3), (1000, 10**6)])
@pytest.mark.parametrize("floor", [-1.0, 0.3])
def test_select(emulator, shape, max_new, pooled, floor):
    mass, resident, low, high = tables(*shape, seed=max_new)
    stamps = torch.randint(0, 5, resident.shape)
    arguments = (mass, resident, stamps, low, high, torch.full((shape[0],), floor), 7, max_new, pooled, 0.05, 0.8)
    for ours, expected in zip(Calls(emulator).select(*arguments), reference.select(*arguments), strict=True):
        assert torch.equal(ours, expected)


def test_select_in_any_order_of_threads(checked, order):
    checked.order = order
    mass, resident, low, high = tables(2, 3, 40, 8, seed=1)
    arguments = (mass, resident, torch.zeros_like(resident), low, high, torch.full((2,), -1.0), 7, 4, 5, 0.0, 1.0)
    for ours, expected in zip(Calls(checked).select(*arguments), reference.select(*arguments), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(("heads", "places", "swaps", "depth"), [(3, 8, 4, 9), (1, 1, 1, 0), (2, 200, 64, 400), (2, 5, 0, 3)])
def test_exchange_slots(emulator, heads, places, swaps, depth):
    torch.manual_seed(places)
    rows, capacity = torch.tensor([2, 0]), heads * places + depth
    numbers = torch.randperm(3 * heads * places)
    slots = numbers.view(3, heads, places).clone()
    slots[torch.rand(slots.shape) < 0.4] = -1
    free = torch.randint(1000, 2000, (3, capacity))
    count = torch.tensor([depth, 1, depth // 2])
    kept = torch.randint(-1, 3, (2, heads, places))
    wanted = torch.stack([torch.randperm(places)[:swaps] for _ in range(2 * heads)]).view(2, heads, swaps)
    wanted = wanted.sort(2).values
    kept.scatter_(2, wanted, -1)
    wanted[torch.rand(wanted.shape) < 0.2] = -1
    expected = [slots.clone(), free.clone(), count.clone()]
    expected_places = reference.exchange_slots(*expected, rows, kept, wanted)
    granted = Calls(emulator).exchange_slots(slots, free, count, rows, kept, wanted)
    assert torch.equal(granted, expected_places)
    for ours, theirs, table in zip((slots, free, count), expected, ("slots", "free", "count"), strict=True):
        if table == "free":  # what lies above the stack means nothing
            for row in range(3):
                assert torch.equal(ours[row, : count[row]], theirs[row, : count[row]])
        else:
            assert torch.equal(ours, theirs), table


def test_a_row_outside_of_the_tables_gets_nothing(emulator):
    slots, free, count = torch.full((1, 1, 2), -1), torch.tensor([[5, 6]]), torch.tensor([2])
    kept, wanted = torch.full((1, 1, 2), -1), torch.tensor([[[0, 1]]])
    granted = Calls(emulator).exchange_slots(slots, free, count, torch.tensor([4]), kept, wanted)
    assert (granted == -1).all()
    assert count.item() == 2
