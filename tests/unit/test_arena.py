import re

import pytest
import torch

from oasiskv import ModelShape
from oasiskv.arena import Arena
from oasiskv.errors import ArenaExhausted, CapacityError, ConfigError

SHAPE = ModelShape(num_layers=2, query_heads=4, kv_heads=2, head_dim=8)
PAGE_BYTES = 2 * 2 * (2 * 4 * 8 * 4)


@pytest.fixture
def arena():
    arena = Arena(SHAPE, 4, 10 * PAGE_BYTES)
    yield arena
    arena.close()


def test_layers_have_the_slot_layout(arena):
    assert arena.page_bytes == PAGE_BYTES
    assert arena.num_pages == arena.capacity_pages == 10
    assert [tuple(layer.shape) for layer in arena.layers] == [(20, 2, 4, 8)] * 2


def test_layers_are_separate_memory_that_can_be_written_to_the_end(arena):
    arena.layers[0].fill_(1.0)
    arena.layers[1].fill_(2.0)
    assert (arena.layers[0] == 1.0).all()
    assert (arena.layers[1] == 2.0).all()


def test_pages_are_given_lowest_first(arena):
    assert arena.allocate(4) == [0, 1, 2, 3]
    arena.release([2])
    arena.release([0])
    assert arena.allocate(3) == [0, 2, 4]


def test_a_shared_page_is_free_when_its_last_holder_lets_go(arena):
    (page,) = arena.allocate(1)
    arena.share([page])
    arena.share([page])
    assert arena.references(page) == 3
    arena.release([page])
    arena.release([page])
    assert arena.used_pages == 1
    assert arena.allocate(1) == [1]
    arena.release([page])
    assert arena.references(page) == 0
    assert arena.allocate(1) == [page]


def test_a_page_taken_anew_has_one_holder(arena):
    arena.allocate(1)
    arena.share([0])
    arena.release([0])
    arena.release([0])
    assert arena.allocate(1) == [0]
    assert arena.references(0) == 1


def test_bytes_in_use_fall_and_the_peak_stays(arena):
    arena.allocate(6)
    assert arena.used_bytes == arena.peak_bytes == 6 * PAGE_BYTES
    arena.release([0, 1, 2])
    assert arena.used_bytes == 3 * PAGE_BYTES
    assert arena.peak_bytes == 6 * PAGE_BYTES
    arena.allocate(3)
    assert arena.peak_bytes == 6 * PAGE_BYTES


def test_exhaustion_takes_nothing_and_says_the_bytes_that_would_do(arena):
    arena.allocate(8)
    with pytest.raises(ArenaExhausted) as caught:
        arena.allocate(3)
    assert arena.used_pages == 8
    message = str(caught.value)
    assert int(re.search(r"at least (\d+)", message).group(1)) == 11 * PAGE_BYTES
    assert f"now {10 * PAGE_BYTES}" in message
    assert "arena_bytes" in message
    assert issubclass(ArenaExhausted, CapacityError)
    assert arena.allocate(2) == [8, 9]


def test_a_limit_below_one_page_is_refused():
    with pytest.raises(ConfigError, match=f"arena_bytes is {PAGE_BYTES - 1}, less than .*: {PAGE_BYTES} bytes"):
        Arena(SHAPE, 4, PAGE_BYTES - 1)


def test_more_address_space_than_there_is_is_refused_with_the_bytes():
    with pytest.raises(ConfigError, match=r"arena_bytes is \d+, and reserving \d+ bytes .* failed"):
        Arena(SHAPE, 4, 1 << 62)


def test_without_a_limit_the_whole_memory_is_reserved_and_little_is_taken():
    arena = Arena(SHAPE, 4, None)
    assert arena.num_pages * PAGE_BYTES > 1 << 28
    assert arena.peak_bytes == 0
    last = arena.layers[1][-1]
    last.fill_(3.0)
    assert torch.equal(last, torch.full_like(last, 3.0))
    arena.close()


def test_close_gives_everything_back_and_may_be_repeated(arena):
    arena.allocate(3)
    arena.close()
    arena.close()
    assert arena.layers == []
    assert arena.used_pages == arena.peak_bytes == 0
