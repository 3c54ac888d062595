import itertools

import pytest
import torch

from oasiskv.errors import ConfigError, InputError, StateError
from oasiskv.lent_pool import LentPool

from .driver import SHAPE
from .lending import host_pool


def make(**changes):
    settings = {
        "shape": SHAPE,
        "block_size": 4,
        "slots": torch.zeros(100, 2, 4, 8),
        "layer_slots": [0, 50],
        "num_host_blocks": 12,
        "host_block_slots": 4,
        "host_block_size": 8,
    }
    return LentPool(**{**settings, **changes})


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("gap", [0, 3])
def test_strips_lie_where_the_engine_keeps_its_blocks(parts, gap):
    pool = host_pool(5, parts, gap)
    stride = 5 * 2 * parts + gap
    assert pool.num_strips == 5 * parts
    slots = pool.slots_of(torch.arange(5 * parts))
    assert slots.shape == (2, 2, 5 * parts)
    for layer, head, block, part in itertools.product(range(2), range(2), range(5), range(parts)):
        strip = pool.strips_of([block])[part]
        assert strip == block * parts + part
        assert slots[layer, head, strip] == layer * stride + block * 2 * parts + head * parts + part
    assert len(slots.unique()) == slots.numel()
    assert (slots < len(pool.slots)).all()


def test_a_block_may_be_followed_by_slots_of_others():
    pool = make(num_host_blocks=2, host_block_slots=10, layer_slots=[0, 4], slots=torch.zeros(24, 2, 4, 8))
    assert pool.strips_of([1, 0]) == [2, 3, 0, 1]
    assert pool.num_strips == 4
    assert pool.slots_of(torch.tensor([[2, 3]]))[1].tolist() == [[[14, 15]], [[16, 17]]]


def test_the_memory_is_the_engines():
    pool = make(slots=torch.ones(100, 2, 4, 8))
    assert pool.lent
    assert pool.allocated_bytes == pool.free_strips == 0
    assert pool.allocate(0) == []
    assert pool.can_allocate(0)
    assert not pool.can_allocate(1)
    with pytest.raises(StateError, match=r"KVManager.lend"):
        pool.allocate(1)
    pool.take([0, 1])
    pool.release([0, 1])
    assert (pool.slots == 1).all()


def test_a_strip_is_lent_once_at_a_time():
    pool = make()
    pool.take([3, 5])
    with pytest.raises(InputError, match=r"strips \[3, 5\] are lent to a sequence already; reclaim them there first"):
        pool.take([5, 4, 3])
    pool.release([3])
    pool.take([3, 4])
    for strips in ([7, 7], [24], [-1]):
        with pytest.raises(InputError, match="each must be another one of 0 to 23"):
            pool.take(strips)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": torch.zeros(100, 2, 8, 8)}, "slots is .*2, 8, 8.*must be contiguous"),
        ({"slots": torch.zeros(100, 2, 4, 8, dtype=torch.float16)}, "slots is torch.float16"),
        ({"slots": torch.zeros(100, 2, 8, 4).transpose(2, 3)}, "contiguous"),
        ({"layer_slots": [0]}, "layer_slots has 1 entries for 2 layers"),
        ({"layer_slots": [-1, 50]}, r"layer_slots is \[-1, 50\]"),
        ({"layer_slots": [0, 53]}, "12 blocks, which take 48 slots from there on, must lie within 100 slots"),
        ({"num_host_blocks": 13}, "13 blocks"),
        ({"num_host_blocks": 0}, "num_host_blocks is 0"),
        ({"host_block_size": 6}, "host_block_size is 6; it must be a multiple of block_size 4"),
        ({"host_block_size": 2}, "host_block_size is 2"),
        ({"host_block_slots": 3}, "host_block_slots is 3; a block of 2 heads takes 4"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make(**changes)
