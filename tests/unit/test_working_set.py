import pytest
import torch

from oasiskv.working_set import WorkingSets, place_of, window_start

from .driver import SHAPE, tiny

RECENT_ROWS = 4


@pytest.fixture
def sets():
    made = WorkingSets(SHAPE, tiny(), RECENT_ROWS)
    made.reserve_rows(3)
    return made


def rows_of(*numbers):
    """Query rows that are told apart by their number, `(1, len(numbers), Hq, D)`."""
    return torch.tensor(numbers, dtype=torch.float32)[None, :, None, None].expand(1, -1, SHAPE.query_heads, SHAPE.head_dim)


def recent(sets, row, layer=0):
    return sets.recent[layer][row, :, 0, 0].tolist()


def test_recent_queries_are_the_last_ones_in_order(sets):
    row = torch.tensor([1])
    for number in range(1, 7):
        sets.remember_queries(0, row, rows_of(number))
    assert recent(sets, 1) == [3, 4, 5, 6]
    sets.remember_queries(0, row, rows_of(7, 8))
    assert recent(sets, 1) == [5, 6, 7, 8]
    sets.remember_queries(0, row, rows_of(*range(10, 20)))
    assert recent(sets, 1) == [16, 17, 18, 19]
    assert recent(sets, 0) == recent(sets, 2) == [0] * RECENT_ROWS
    assert recent(sets, 1, layer=1) == [0] * RECENT_ROWS


def test_growing_keeps_every_table(sets):
    sets.set_pages(2, 0, [7, 5])
    sets.set_strips(2, [4, 1, 3])
    sets.selected.blocks[1][2] = 6
    sets.selected.stamps[1][2] = 9
    sets.selected.slots[1][2] = 3
    sets.remember_queries(1, torch.tensor([2]), rows_of(1, 2, 3, 4))
    sets.reserve_rows(10)
    assert sets.capacity == 10
    assert sets.pages[2, :2].tolist() == [7, 5]
    assert sets.strips[2, :3].tolist() == [4, 1, 3]
    assert (sets.selected.blocks[1][2] == 6).all()
    assert (sets.selected.stamps[1][2] == 9).all()
    assert (sets.selected.slots[1][2] == 3).all()
    assert recent(sets, 2, layer=1) == [1, 2, 3, 4]
    assert (sets.selected.blocks[0][3:] == -1).all()
    sets.reserve_rows(4)
    assert sets.capacity == 10


def test_pages_are_written_from_a_block_on_and_those_beyond_forgotten(sets):
    sets.set_pages(1, 0, [1, 2, 3, 4])
    sets.set_pages(0, 0, list(range(10, 30)))
    assert sets.pages[1].tolist()[:5] == [1, 2, 3, 4, -1]
    sets.set_pages(1, 2, [9])
    assert sets.pages[1].tolist()[:5] == [1, 2, 9, -1, -1]
    sets.set_pages(1, 0, [])
    assert (sets.pages[1] == -1).all()
    assert sets.pages[0, :20].tolist() == list(range(10, 30))


def test_strips_beyond_the_budget_widen_the_table(sets):
    sets.set_strips(0, list(range(25)))
    sets.set_strips(1, [8])
    assert sets.strips[0, :25].tolist() == list(range(25))
    assert sets.strips[1].tolist() == [8] + [-1] * (sets.strips.shape[1] - 1)


def test_trimming_forgets_blocks_that_the_window_took_over(sets):
    sets.selected.blocks[0][1] = torch.tensor([[3, 8, 5], [7, 1, -1]])
    sets.selected.trim(1, 7)
    assert sets.selected.blocks[0][1].tolist() == [[3, -1, 5], [-1, 1, -1]]


def test_a_copied_row_has_everything_in_strips_of_its_own(sets):
    sets.set_pages(0, 0, [1, 2])
    sets.set_strips(0, [5, 6])
    sets.selected.blocks[0][0] = 4
    sets.selected.stamps[0][0] = 3
    sets.selected.slots[1][0] = 7
    sets.remember_queries(0, torch.tensor([0]), rows_of(1, 2, 3, 4))
    sets.copy_row(0, 2, lambda slots: slots + 10)
    assert sets.pages[2, :2].tolist() == [1, 2]
    assert (sets.selected.blocks[0][2] == 4).all()
    assert (sets.selected.stamps[0][2] == 3).all()
    assert (sets.selected.slots[1][2] == 17).all()
    assert recent(sets, 2) == [1, 2, 3, 4]
    assert (sets.strips[2] == -1).all()


def test_bytes_are_those_of_the_tables(sets):
    before = sets.device_bytes()
    sets.reserve_rows(6)
    assert sets.device_bytes() == 2 * before


@pytest.mark.parametrize(("length", "start"), [(0, 1), (8, 1), (12, 2), (15, 2), (16, 3), (40, 9)])
def test_the_window_starts_its_blocks_before_the_tail_and_after_the_sinks(length, start):
    assert window_start(tiny(), length) == start


def test_window_blocks_lie_in_a_ring_behind_the_sinks_and_dense_blocks_in_order():
    config = tiny()
    assert [place_of(config, block, dense=False) for block in range(6, 13)] == [1, 2, 3, 4, 5, 6, 1]
    assert [place_of(config, block, dense=True) for block in (0, 5, 17)] == [0, 5, 17]
