import random
import re

import pytest
import torch

from oasiskv import ModelShape
from oasiskv.errors import CapacityError, ConfigError, PoolExhausted
from oasiskv.pool import OwnPool

SHAPE = ModelShape(num_layers=2, query_heads=4, kv_heads=2, head_dim=8)
STRIP_BYTES = 2 * 2 * (2 * 4 * 8 * 4)


def make_pool(strips=None, poison=False):
    return OwnPool(SHAPE, 4, None if strips is None else strips * STRIP_BYTES, poison)


@pytest.mark.parametrize("strips", [None, 12])
def test_strips_are_conserved(strips):
    pool, chance, held = make_pool(strips), random.Random(0), []
    for _ in range(200):
        if held and chance.random() < 0.5:
            pool.release([held.pop(chance.randrange(len(held)))])
        else:
            count = chance.randrange(4)
            if pool.can_allocate(count):
                held.extend(pool.allocate(count))
        assert sorted([*held, *pool.free_list]) == list(range(pool.num_strips))
        assert pool.free_strips == len(pool.free_list)


def test_a_strip_is_a_slot_for_every_layer_and_head():
    pool = make_pool(3)
    assert pool.strip_bytes == STRIP_BYTES
    assert pool.slots.shape == (12, 2, 4, 8)
    assert pool.slots.dtype == SHAPE.dtype
    slots = pool.slots_of(torch.tensor([2, 0, 1]))
    assert slots.shape == (2, 2, 3)
    assert slots[:, :, 0].tolist() == [[8, 9], [10, 11]]
    assert slots.flatten().sort().values.tolist() == list(range(12))


def test_growing_keeps_the_content_and_takes_what_is_needed_only():
    pool = make_pool()
    first = pool.allocate(3)
    pool.slots.copy_(torch.randn_like(pool.slots))
    before = pool.slots.clone()
    second = pool.allocate(5)
    assert not set(first) & set(second)
    assert pool.num_strips == 8
    assert pool.allocated_bytes == 8 * STRIP_BYTES
    assert torch.equal(pool.slots[: before.shape[0]], before)


def test_freed_strips_are_used_before_the_pool_grows():
    pool = make_pool()
    strips = pool.allocate(4)
    pool.release(strips)
    assert sorted(pool.allocate(4)) == sorted(strips)
    assert pool.num_strips == 4


def test_a_limit_is_allocated_at_once_and_never_exceeded():
    pool = OwnPool(SHAPE, 4, 5 * STRIP_BYTES + STRIP_BYTES - 1, poison=False)
    assert pool.num_strips == 5
    assert pool.allocated_bytes == 5 * STRIP_BYTES
    pool.allocate(5)
    with pytest.raises(PoolExhausted):
        pool.allocate(1)
    assert pool.allocated_bytes == 5 * STRIP_BYTES


def test_exhaustion_takes_nothing_and_says_the_bytes_that_would_do():
    pool = make_pool(5)
    pool.allocate(3)
    assert pool.can_allocate(2)
    assert not pool.can_allocate(4)
    with pytest.raises(PoolExhausted) as caught:
        pool.allocate(4)
    assert pool.free_strips == 2
    message = str(caught.value)
    needed = int(re.search(r"at least (\d+)", message).group(1))
    assert needed == 7 * STRIP_BYTES
    assert f"now {5 * STRIP_BYTES}" in message
    assert "pool_bytes" in message
    bigger = OwnPool(SHAPE, 4, needed, poison=False)
    bigger.allocate(3)
    bigger.allocate(4)


def test_exhaustion_is_a_memory_error():
    assert issubclass(PoolExhausted, CapacityError)
    assert issubclass(CapacityError, MemoryError)


def test_a_limit_below_one_strip_is_refused():
    with pytest.raises(ConfigError, match=f"pool_bytes is {STRIP_BYTES - 1}, less than .*: {STRIP_BYTES} bytes"):
        OwnPool(SHAPE, 4, STRIP_BYTES - 1, poison=False)


def test_poison_marks_fresh_and_freed_slots_and_spares_the_others():
    pool = make_pool(4, poison=True)
    assert pool.slots.isnan().all()
    strips = pool.allocate(4)
    pool.slots.fill_(1.0)
    pool.release([strips[1]])
    by_strip = [pool.slots[pool.slots_of(torch.tensor(strip)).flatten()] for strip in strips]
    assert by_strip[1].isnan().all()
    assert all((slots == 1.0).all() for slots in (by_strip[0], *by_strip[2:]))


def test_without_poison_freed_slots_keep_their_bytes():
    pool = make_pool(2)
    strips = pool.allocate(2)
    pool.slots.fill_(1.0)
    pool.release(strips)
    assert (pool.slots == 1.0).all()


def test_slots_are_moved_to_the_same_place_of_other_strips():
    pool = make_pool(6)
    slots = pool.slots_of(torch.tensor([4, 1]))
    moved = pool.moved(torch.cat([slots.flatten(), torch.tensor([-1])]), [1, 4], [5, 0])
    assert moved.tolist() == [*pool.slots_of(torch.tensor([0, 5])).flatten().tolist(), -1]
