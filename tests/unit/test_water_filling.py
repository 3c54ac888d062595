import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasiskv.summaries.quantizer import distortions
from oasiskv.summaries.water_filling import NIBBLE_BITS, water_fill


def draw_variances(seed, layers=3, heads=2, head_dim=16, spread=6.0):
    generator = torch.Generator().manual_seed(seed)
    logs = torch.rand((layers, heads, head_dim), generator=generator) * spread
    logs = logs + 3 * torch.rand((layers, heads, 1), generator=generator)
    return logs.exp().sort(-1, descending=True).values


def padded_bits(layouts, head_dim):
    return torch.stack([torch.nn.functional.pad(layout.bits, (0, head_dim - layout.bits.shape[1])) for layout in layouts])


def lanes(layout):
    """`(head, component, nibble, first bit, bits)` of every component that has bits."""
    for head, component in (layout.bits > 0).nonzero().tolist():
        at = head, component
        yield head, component, int(layout.nibbles[at]), int(layout.shifts[at]), int(layout.bits[at])


@settings(deadline=None, max_examples=60, derandomize=True)
@given(seed=st.integers(0, 10_000), budget=st.integers(0, 60), spread=st.sampled_from([0.1, 2.0, 6.0, 20.0]))
def test_the_budget_is_never_exceeded_and_nearly_used(seed, budget, spread):
    variances = draw_variances(seed, spread=spread)
    layouts = water_fill(variances, budget)
    used = sum(layout.num_nibbles for layout in layouts)
    assert used <= budget
    assert used >= min(budget, 3 * 2 * 16) - 3  # a bit that opens two nibbles at once may have to be left out


@settings(deadline=None, max_examples=60, derandomize=True)
@given(seed=st.integers(0, 10_000), budget=st.integers(0, 60), spread=st.sampled_from([0.1, 2.0, 6.0, 20.0]))
def test_components_share_nibbles_without_overlap_or_straddling(seed, budget, spread):
    for layout in water_fill(draw_variances(seed, spread=spread), budget):
        taken = set()
        for _, _, nibble, first, bits in lanes(layout):
            assert 0 <= nibble < layout.num_nibbles
            assert first + bits <= NIBBLE_BITS
            own = {(nibble, bit) for bit in range(first, first + bits)}
            assert not own & taken
            taken |= own


@settings(deadline=None, max_examples=60, derandomize=True)
@given(seed=st.integers(0, 10_000), budget=st.integers(0, 60))
def test_the_nibbles_of_a_head_are_its_own_range(seed, budget):
    for layout in water_fill(draw_variances(seed), budget):
        ends = [*layout.offsets.tolist()[1:], layout.num_nibbles]
        assert layout.offsets[0] == 0
        for head, _, nibble, _, _ in lanes(layout):
            assert layout.offsets[head] <= nibble < ends[head]
        filled = {nibble for _, _, nibble, _, _ in lanes(layout)}
        assert filled == set(range(layout.num_nibbles))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(seed=st.integers(0, 10_000), budget=st.integers(0, 60))
def test_more_variance_never_gets_fewer_bits(seed, budget):
    variances = draw_variances(seed)
    bits = padded_bits(water_fill(variances, budget), 16).flatten()
    assert (bits[variances.flatten().argsort(descending=True)].diff() <= 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_bits_go_where_they_remove_most_error(seed):
    variances, table = draw_variances(seed).double(), torch.tensor(distortions(), dtype=torch.float64)
    bits = padded_bits(water_fill(variances, 40), 16)
    gain_of_next = variances * (table[:-1] - table[1:])[bits.clamp(max=3)]
    gain_of_last = variances * (table[:-1] - table[1:])[(bits - 1).clamp(min=0)]
    most_refused = gain_of_next[bits < 4].max()
    assert gain_of_last[bits > 0].min() >= most_refused * 0.999


def first_fit(sizes):
    """Nibbles that components of these bits fill, the largest first, each in the first nibble with room."""
    room = []
    for size in sorted((size for size in sizes if size), reverse=True):
        place = next((number for number, left in enumerate(room) if left >= size), None)
        if place is None:
            room.append(NIBBLE_BITS)
            place = -1
        room[place] -= size
    return len(room)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [7, 20, 33, 50])
def test_no_further_bit_would_fit(seed, budget):
    variances = draw_variances(seed).double()
    layouts = water_fill(variances, budget)
    bits = padded_bits(layouts, 16).flatten(0, 1)
    assert sum(first_fit(head) for head in bits.tolist()) == sum(layout.num_nibbles for layout in layouts)
    table = torch.tensor(distortions(), dtype=torch.float64)
    gain = (variances.flatten(0, 1) * (table[:-1] - table[1:])[bits.clamp(max=3)]).masked_fill(bits == 4, -1.0)
    bits.view(-1)[gain.argmax()] += 1
    assert sum(first_fit(head) for head in bits.tolist()) > budget


def test_a_head_without_variance_gets_no_nibble():
    variances = draw_variances(1, layers=1)
    variances[0, 0] = 1e-12
    (layout,) = water_fill(variances, 6)
    assert layout.bits[0].sum() == 0
    assert layout.offsets.tolist() == [0, 0]


def test_everything_fits_a_large_budget_with_all_bits():
    layouts = water_fill(draw_variances(2), 10_000)
    assert all((layout.bits == 4).all() for layout in layouts)
