"""Masses, selection and slots in native code, on every code path, against the reference."""

import math

import pytest
import torch

from oasiskv import ops
from oasiskv.errors import InputError
from oasiskv.ops import reference

from .native import library, path, run  # noqa: F401 (a fixture)


def number(low, high):
    return int(torch.randint(low, high, ()))


def selection_case(seed, blocks, places):
    """Masses that are all different, some resident blocks, ranges that may be empty."""
    torch.manual_seed(seed)
    sequences, heads, blocks, places = number(1, 4), number(1, 4), number(1, blocks), number(1, places)
    mass = torch.stack([torch.randperm(blocks) for _ in range(sequences * heads)]).view(sequences, heads, blocks)
    mass = (mass / blocks) ** number(1, 6)
    resident = torch.full((sequences, heads, places), -1)
    for table in resident.flatten(0, 1):
        some = torch.randperm(blocks)[: number(0, min(blocks, places) + 1)]
        table[torch.randperm(places)[: len(some)]] = some
    low, high = torch.randint(0, 3, (sequences,)), torch.randint(0, blocks + 1, (sequences,))
    if seed % 2:
        high[:] = blocks
    return mass, resident, low, high


SIZES = [(12, 7), (300, 60), (9000, 150)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("blocks", "places"), SIZES)
def test_select_equals_the_reference(path, seed, blocks, places):  # noqa: F811
    mass, resident, low, high = selection_case(seed, blocks, places)
    stamps = torch.randint(0, 5, resident.shape)
    floor = torch.tensor([-1.0, 0.0, 0.3])[torch.randint(0, 3, low.shape)]
    # All swaps, or so few that the heads of a sequence must share; then no two gains may be equal.
    pooled = 10**6 if seed % 3 else number(0, 9)
    if pooled < 10**6:
        mass = mass + torch.rand_like(mass) / 10
    arguments = mass, resident, stamps, low, high, floor, 7, number(0, 30), pooled, 0.1 * number(0, 3), 0.5
    expected = reference.select(*arguments)
    for found, wanted in zip(run(ops.select, *arguments), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("blocks", "places"), SIZES)
def test_top_missing_equals_the_reference(path, seed, blocks, places):  # noqa: F811
    mass, resident, low, high = selection_case(seed, blocks, places)
    count = number(0, 2 * places)
    expected = reference.top_missing(mass, resident, low, high, count)
    for found, wanted in zip(run(ops.top_missing, mass, resident, low, high, count), expected, strict=True):
        assert torch.equal(found, wanted)


def test_masses_below_zero_are_no_blocks(path):  # noqa: F811
    arguments = torch.tensor([[[-0.5, 0.2, -0.75, -0.0, -1.0]]]), torch.tensor([[[-1]]]), torch.tensor([0]), torch.tensor([5])
    for count in range(6):
        expected = reference.top_missing(*arguments, count)
        assert all(torch.equal(a, b) for a, b in zip(run(ops.top_missing, *arguments, count), expected, strict=True))


@pytest.mark.parametrize("blocks", [9, 3000])
def test_among_equals_the_lower_block_comes_first(path, blocks):  # noqa: F811
    mass = torch.full((1, 1, blocks), 0.5)
    mass[..., ::3] = 0.75
    best, gain = run(ops.top_missing, mass, torch.tensor([[[0]]]), torch.tensor([0]), torch.tensor([blocks]), 4)
    assert best.tolist() == [[[3, 6, 1, 2]]] if blocks == 9 else [[[3, 6, 9, 12]]]
    assert torch.equal(gain, mass.gather(2, best))


@pytest.mark.parametrize("blocks", [40, 3000])
def test_ties_keep_what_must_hold(path, blocks):  # noqa: F811
    torch.manual_seed(0)
    mass = torch.randint(0, 4, (2, 3, blocks)) / 4
    resident = torch.stack([torch.randperm(blocks)[:20] for _ in range(6)]).view(2, 3, 20)
    low, high, floor = torch.tensor([1, 0]), torch.tensor([blocks, blocks - 3]), torch.tensor([-1.0, 0.25])
    places, found, kept, stamps, counts = run(
        ops.select, mass, resident, torch.zeros_like(resident), low, high, floor, 9, 8, 11, 0.1, 0.5
    )
    assert torch.equal(counts[:, 1], reference.select(mass, resident, stamps, low, high, floor, 9, 8, 11, 0.1, 0.5)[4][:, 1])
    assert (found >= 0).sum((1, 2)).le(11).all()
    for s, h in ((s, h) for s in range(2) for h in range(3)):
        new = [(p, b) for p, b in zip(places[s, h].tolist(), found[s, h].tolist(), strict=True) if b >= 0]
        assert len({p for p, _ in new}) == len({b for _, b in new}) == len(new)
        assert not {b for _, b in new} & set(resident[s, h].tolist())
        assert all(low[s] <= b < high[s] and kept[s, h, p] == -1 and stamps[s, h, p] == 9 for p, b in new)


@pytest.mark.parametrize("blocks", [50, 3000])
def test_masses_that_are_no_numbers_crash_nothing(path, blocks):  # noqa: F811
    mass = torch.rand(1, 2, blocks)
    mass[0, 0, ::2], mass[0, 1, 5] = math.nan, math.inf
    resident = torch.tensor([[[0, 1, -1], [5, 3, 2]]])
    arguments = mass, resident, torch.zeros_like(resident), torch.tensor([0]), torch.tensor([blocks])
    places, found, *_, counts = run(ops.select, *arguments, torch.tensor([-1.0]), 9, 2, 9, 0.0, 0.5)
    assert (places[0, 0] == -1).all()  # the best missing blocks of that head are NaN, which is no gain
    assert torch.equal(places < 0, found < 0)
    expected = reference.select(*arguments, torch.tensor([-1.0]), 9, 2, 9, 0.0, 0.5)
    assert torch.equal(counts, expected[4])


@pytest.mark.parametrize("blocks", [1, 7, 16, 33, 1000])
@pytest.mark.parametrize(("rows", "group", "heads"), [(1, 4, 2), (3, 1, 3), (16, 3, 1)])
def test_block_mass_equals_the_reference(path, blocks, rows, group, heads):  # noqa: F811
    torch.manual_seed(blocks)
    logits = torch.randn(3, rows, heads * group, blocks) * 8
    num_blocks = torch.tensor([blocks, blocks // 2, 0])
    logits[1, ..., blocks // 2 :] = math.nan
    found = run(ops.block_mass, logits, num_blocks, heads)
    torch.testing.assert_close(found, reference.block_mass(logits, num_blocks, heads), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_give_what_torch_gives(path, value):  # noqa: F811
    logits = torch.zeros(1, 2, 2, 20)
    logits[0, 0, 0, 3], logits[0, 1] = value, -math.inf
    found, expected = (f(logits, torch.tensor([20]), 1) for f in (ops.block_mass, reference.block_mass))
    torch.testing.assert_close(found, expected, equal_nan=True)


def exchange_case(seed):
    torch.manual_seed(seed)
    rows, heads, places, sequences, swaps = 5, number(1, 4), number(1, 9), number(1, 4), number(0, 5)
    slots = torch.full((rows, heads, places), -1)
    free = torch.full((rows, heads * places), -1)
    count = torch.zeros(rows, dtype=torch.int64)
    for row in range(rows):  # each row owns some slots, of which some are in places and the others on the stack
        owned = torch.randperm(1000)[: number(0, heads * places + 1)]
        used = number(0, len(owned) + 1)
        slots[row].view(-1)[torch.randperm(heads * places)[:used]] = owned[:used]
        count[row] = len(owned) - used
        free[row, : len(owned) - used] = owned[used:]
    which = torch.randperm(rows)[:sequences]
    held = slots[which] >= 0
    kept = torch.where(held & (torch.rand(held.shape) < 0.6), torch.randint(0, 50, held.shape), -1)
    swap = torch.full((sequences, heads, swaps), -1)
    for table, stays in zip(swap.flatten(0, 1), kept.flatten(0, 1), strict=True):
        open_places = (stays < 0).nonzero().flatten()
        some = open_places[torch.randperm(len(open_places))][: min(swaps, number(0, len(open_places) + 1))]
        table[: len(some)] = some
    return slots, free, count, which, kept, swap


@pytest.mark.parametrize("seed", range(40))
def test_exchange_slots_equals_the_reference(seed):
    library()
    case = exchange_case(seed)
    mine, theirs = ([table.clone() for table in case[:3]] for _ in range(2))
    granted = run(ops.exchange_slots, *mine, *case[3:])
    assert torch.equal(granted, reference.exchange_slots(*theirs, *case[3:]))
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[2], theirs[2])
    for row, depth in enumerate(mine[2].tolist()):
        assert torch.equal(mine[1][row, :depth], theirs[1][row, :depth])


def test_what_cannot_be_right_is_refused():
    library()
    mass, resident, low = torch.rand(1, 2, 5), torch.zeros(1, 2, 3, dtype=torch.int64), torch.tensor([0])
    with pytest.raises(InputError, match=r"mass.shape is"):
        ops.top_missing(mass[0], resident, low, low, 1)
    with pytest.raises(InputError, match=r"resident.shape is .* must be \(sequences, kv_heads, places\)"):
        ops.top_missing(mass, resident[:, :1], low, low, 1)
    with pytest.raises(InputError, match=r"floor.shape is"):
        ops.select(mass, resident, resident, low, low, torch.zeros(2), 1, 1, 1, 0.0, 0.5)
    with pytest.raises(InputError, match="kv_heads is 3; it must divide the 2 query heads"):
        ops.block_mass(torch.rand(1, 1, 2, 5), low, 3)
    slots, free, count, which, kept, swap = exchange_case(3)
    with pytest.raises(InputError, match="exchange_slots: rows holds 9 at entry 0"):
        ops.exchange_slots(slots, free, count, which * 0 + 9, kept, swap)
    with pytest.raises(InputError, match="exchange_slots: count holds 1000 for row"):
        ops.exchange_slots(slots, free, count + 1000, which, kept, swap)
