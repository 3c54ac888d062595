import pytest
import torch

from oasiskv import ops

from . import naive


def run(mass, resident, selected_at=None, low=0, high=None, step=9, max_new=8, margin=0.0, pooled=99, floor=-1.0, keep=0.5):
    """One sequence, one head: lists in, `(resident, stamps, counts)` lists out, with the swaps applied."""
    mass = torch.tensor(mass)[None, None]
    resident = torch.tensor(resident)[None, None]
    stamps = torch.zeros_like(resident) if selected_at is None else torch.tensor(selected_at)[None, None]
    bounds = torch.tensor([low]), torch.tensor([mass.shape[2] if high is None else high])
    least = torch.tensor([floor])
    limits = step, max_new, pooled, margin, keep
    places, blocks, kept, stamps, counts = ops.select(mass, resident, stamps, *bounds, least, *limits)
    return apply(kept, places, blocks)[0, 0].tolist(), stamps[0, 0].tolist(), counts[0].tolist()


def apply(kept, places, blocks):
    after = kept.clone()
    assert torch.equal(places < 0, blocks < 0)
    assert (kept.gather(2, places.clamp(min=0))[places >= 0] < 0).all()
    for s, h, k in (places >= 0).nonzero().tolist():
        after[s, h, places[s, h, k]] = blocks[s, h, k]
    return after


@pytest.mark.parametrize("seed", range(30))
def test_select_equals_the_loop(seed):
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    blocks, places, max_new = number(1, 12), number(1, 7), number(0, 5)
    mass = torch.rand(3, 2, blocks, generator=generator)
    resident = torch.full((3, 2, places), -1)
    for s in range(3):
        for h in range(2):
            some = torch.randperm(blocks, generator=generator)[: number(0, places + 1)]
            resident[s, h, torch.randperm(places, generator=generator)[: len(some)]] = some
    stamps = torch.randint(0, 5, resident.shape, generator=generator)
    low = torch.randint(0, 3, (3,), generator=generator)
    high = torch.randint(0, blocks + 1, (3,), generator=generator)
    margin, pooled = 0.25 * number(0, 2), number(0, 7)
    floor = torch.tensor([-1.0, 0.0, 0.5])[torch.randperm(3, generator=generator)]
    arguments = mass, resident, stamps, low, high, floor, 7, max_new, pooled, margin, 0.5
    found_places, found_blocks, kept, found_stamps, counts = ops.select(*arguments)
    assert found_places.shape == found_blocks.shape == (3, 2, min(max_new, blocks, places))
    after, expected_kept, expected_stamps, expected_counts = naive.select(*arguments)
    assert torch.equal(kept, expected_kept)
    assert torch.equal(apply(kept, found_places, found_blocks), after)
    assert torch.equal(found_stamps, expected_stamps)
    assert torch.equal(counts, expected_counts)


def test_the_best_missing_block_replaces_the_worst_resident_one():
    assert run([0.1, 0.2, 0.3, 0.4], [0, 3])[0] == [2, 3]


def test_heads_share_what_may_be_loaded_and_the_largest_gains_come_first():
    mass = torch.tensor([[[0.1, 0.2, 0.9, 0.8], [0.1, 0.2, 0.6, 0.3]]])
    resident = torch.tensor([[[0, 1], [0, 1]]])
    bounds = torch.tensor([0]), torch.tensor([4]), torch.tensor([-1.0])
    for pooled, expected in ((0, [[0, 1], [0, 1]]), (1, [[2, 1], [0, 1]]), (2, [[2, 3], [0, 1]]), (3, [[2, 3], [2, 1]])):
        limits = 5, 2, pooled, 0.0, 0.5
        places, blocks, kept, stamps, _ = ops.select(mass, resident, torch.zeros_like(resident), *bounds, *limits)
        after = apply(kept, places, blocks)
        assert after[0].tolist() == expected
        assert ((stamps == 5) >= (after != resident)).all()
    # Sequences have budgets of their own: a batch gives what its parts give.
    both = [table.repeat(2, 1, 1) for table in (mass, resident)]
    bounds = (bound.repeat(2) for bound in bounds)
    places, blocks, kept, _, _ = ops.select(*both, torch.zeros_like(both[1]), *bounds, 5, 2, 1, 0.0, 0.5)
    assert apply(kept, places, blocks).tolist() == [[[2, 1], [0, 1]]] * 2


def test_a_swap_needs_more_gain_than_the_margin():
    assert run([0.25, 0.5], [0], margin=0.25)[0] == [0]
    assert run([0.25, 0.5], [0], margin=0.125)[0] == [1]


def test_the_margin_counts_for_each_pair_on_its_own():
    # best missing 0.5 against worst 0.0 is a gain; second best 0.25 against 0.125 is not
    assert run([0.0, 0.125, 0.5, 0.25], [0, 1], margin=0.25)[0] == [2, 1]


def test_at_most_max_new_blocks_are_taken():
    assert sorted(run([0.0, 0.0, 0.3, 0.2, 0.1], [0, 1], max_new=1)[0]) == [1, 2]
    assert run([0.0, 0.0, 0.3, 0.2, 0.1], [0, 1], max_new=0)[0] == [0, 1]


def test_among_equals_the_least_recently_selected_goes_first():
    assert run([0.0, 0.0, 0.0, 0.5, 0.4, 0.3], [0, 1, 2], selected_at=[5, 3, 4], max_new=1)[0] == [0, 3, 2]


def test_a_block_of_less_mass_goes_before_an_older_one():
    assert run([0.2, 0.1, 0.5], [0, 1], selected_at=[1, 8], max_new=1)[0] == [0, 2]


def test_empty_places_are_filled_first_and_need_no_margin():
    assert run([0.0, 0.01], [0, -1], margin=0.5)[0] == [0, 1]


def test_an_empty_place_is_not_filled_by_a_block_without_mass():
    assert run([0.5, 0.0], [0, -1])[0] == [0, -1]


def test_residents_that_are_no_candidates_are_replaced_first_and_need_no_margin():
    # block 5 lies beyond `high`, block 0 below `low`: both are worth nothing, whatever their mass
    mass = [0.9, 0.1, 0.2, 0.3, 0.05, 0.9]
    assert sorted(run(mass, [0, 1, 5], low=1, high=5, margin=0.5)[0]) == [1, 2, 3]


def test_no_block_is_taken_from_outside_the_range():
    assert run([0.9, 0.1, 0.9, 0.9], [1, -1], low=1, high=2)[0] == [1, -1]


def test_resident_blocks_are_not_taken_twice():
    assert run([0.9, 0.1], [0, -1])[0] == [0, 1]


def test_counts_say_how_many_wanted_blocks_were_resident():
    assert run([0.4, 0.3, 0.2, 0.1], [0, 3, -1])[2] == [1, 3]
    assert run([0.4, 0.3, 0.2, 0.1], [0, 3, -1], high=2)[2] == [1, 2]


def test_stamps_of_wanted_and_new_blocks_are_renewed_and_others_stay():
    resident, stamps, _ = run([0.4, 0.3, 0.2, 0.1], [0, 3, 2], selected_at=[1, 2, 3], step=9, max_new=1)
    assert resident == [0, 1, 2]
    assert stamps == [9, 9, 9]
    resident, stamps, _ = run([0.4, 0.3, 0.2, 0.1], [0, 3], selected_at=[1, 2], step=9, max_new=0)
    assert resident == [0, 3]
    assert stamps == [9, 2]


def test_an_empty_place_is_worth_the_floor():
    assert run([0.1, 0.2, 0.4], [-1, -1], floor=0.25, margin=0.9)[0] == [2, -1]
    assert run([0.1, 0.2, 0.4], [-1, -1], floor=0.5)[0] == [-1, -1]


def test_a_newcomer_exceeds_the_floor_even_where_it_replaces_a_block_below():
    assert run([0.2, 0.3], [0], floor=0.35, keep=0.1)[0] == [0]
    assert run([0.2, 0.4], [0], floor=0.35, keep=0.1)[0] == [1]


def test_a_block_below_the_floor_is_replaced_before_an_empty_place_is_filled():
    assert run([0.2, 0.5], [-1, 0], floor=0.25, keep=0.1)[0] == [-1, 1]


def test_a_block_far_below_the_floor_is_given_up_and_one_near_it_stays():
    assert run([0.1, 0.2], [0, 1], floor=0.25, keep=0.6)[0] == [-1, 1]
    assert run([0.1, 0.2, 0.4], [0, 1], floor=0.25, keep=0.6)[0] == [2, 1]
    assert run([0.1, 0.2, 0.3, 0.4], [0, 1, 2], floor=0.25, keep=0.6, max_new=1)[0] == [3, 1, 2]
    assert run([0.4, 0.2, 0.4], [0, 2], floor=0.25, low=1)[0] == [-1, 2]  # no candidate any more


def test_only_blocks_above_the_floor_are_wanted():
    assert run([0.4, 0.3, 0.2, 0.1], [0, 3, -1], floor=0.25, margin=1.0)[2] == [1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_slots_are_exchanged_as_by_the_loop(seed):
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    heads, places, most = number(1, 4), number(1, 6), number(1, 5)
    order = torch.randperm(3 * heads * places, generator=generator)
    slots = torch.where(torch.rand(3, heads, places, generator=generator) < 0.6, order.view(3, heads, places), -1)
    depth = torch.tensor([number(0, 4) for _ in range(3)])
    free = torch.full((3, heads * places + 4), -1)
    for row, count in enumerate(depth.tolist()):
        free[row, :count] = 1000 + 10 * row + torch.arange(count)
    rows = torch.tensor([2, 0])
    kept = torch.where(torch.rand(2, heads, places, generator=generator) < 0.5, 5, -1)
    filled = torch.full((2, heads, most), -1)
    for s in range(2):
        for h in range(heads):
            empty = (kept[s, h] < 0).nonzero().flatten()
            some = empty[torch.randperm(len(empty), generator=generator)][: number(0, most + 1)]
            filled[s, h, : len(some)] = some
    stacks = [free[row, :count].tolist() for row, count in enumerate(depth.tolist())]
    after, left, expected = naive.exchange_slots(slots, stacks, rows, kept, filled)
    assert torch.equal(ops.exchange_slots(slots, free, depth, rows, kept, filled), expected)
    assert torch.equal(slots, after)
    assert [free[row, :count].tolist() for row, count in enumerate(depth.tolist())] == left


def test_fewer_blocks_than_places():
    assert run([0.5], [-1, -1, -1])[0].count(0) == 1


@pytest.mark.parametrize("seed", range(10))
def test_top_missing_equals_the_loop(seed):
    torch.manual_seed(seed)
    blocks, places, count = 9, 4, 1 + seed
    mass = torch.rand(2, 3, blocks)
    resident = torch.randint(-1, blocks, (2, 3, places))
    low, high = torch.tensor([0, 2]), torch.tensor([blocks, seed])
    found, gain = ops.top_missing(mass, resident, low, high, count)
    assert found.shape == gain.shape == (2, 3, min(count, blocks))
    expected = naive.top_missing(mass, resident, low, high, count)
    for number, (row, values) in enumerate(zip(found.flatten(0, 1).tolist(), gain.flatten(0, 1).tolist(), strict=True)):
        pairs = expected[number]
        assert row == [block for block, _ in pairs] + [-1] * (len(row) - len(pairs))
        assert values == [value for _, value in pairs] + [-1.0] * (len(row) - len(pairs))


def test_top_missing_takes_a_block_without_mass_before_none():
    blocks, gain = ops.top_missing(torch.zeros(1, 1, 2), torch.tensor([[[0]]]), torch.tensor([0]), torch.tensor([2]), 2)
    assert blocks.tolist() == [[[1, -1]]]
    assert gain.tolist() == [[[0.0, -1.0]]]


def test_top_missing_ignores_residents_beyond_the_blocks():
    blocks, _ = ops.top_missing(torch.ones(1, 1, 1), torch.tensor([[[7, -1]]]), torch.tensor([0]), torch.tensor([1]), 3)
    assert blocks.tolist() == [[[0]]]


def test_nothing_is_written():
    mass, resident, stamps = torch.rand(1, 1, 6), torch.tensor([[[0, -1]]]), torch.tensor([[[3, 4]]])
    before = mass.clone(), resident.clone(), stamps.clone()
    ops.select(mass, resident, stamps, torch.tensor([0]), torch.tensor([6]), torch.tensor([0.5]), 9, 2, 2, 0.0, 0.5)
    ops.top_missing(mass, resident, torch.tensor([0]), torch.tensor([6]), 2)
    assert all(torch.equal(old, new) for old, new in zip(before, (mass, resident, stamps), strict=True))
