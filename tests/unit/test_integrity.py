"""`check_integrity` finds every listed slot that was not written, and every block that is another one."""

import pytest
import torch

from oasiskv import KVManager
from oasiskv.errors import IntegrityError
from oasiskv.pool import poison, poisoned

from .driver import PAGE_BYTES, SHAPE, Driver, Part, tiny


def slots(driver, sequence, kind, layer=1, head=1):
    """A slot of a kind that the sequence lists."""
    manager = driver.manager
    if kind == "selected":
        blocks, there = (table[layer][sequence.row, head] for table in (selected(manager).blocks, selected(manager).slots))
        return int(there[blocks >= 0][0])
    tail = sequence.length // 4
    place = (
        {"sink": 0, "window": 1 + (tail - 1) % 6, "tail": 1 + tail % 6}[kind]
        if sequence.phase.value == "sparse"
        else {"sink": 0, "window": tail - 1, "tail": tail}[kind]
    )
    return int(manager.rooms.pool.slots_of(torch.tensor(sequence.strips[place]))[layer, head])


def selected(manager):
    return manager.rooms.sets.selected


@pytest.fixture(params=["exact", "lossy"])
def driver(request):
    lossy = {"tier": "memory:?codec=int4", "arena_bytes": 60 * PAGE_BYTES, "segment_blocks": 2}
    with KVManager(SHAPE, tiny(**(lossy if request.param == "lossy" else {}))) as manager:
        yield Driver(manager)


@pytest.mark.parametrize("kind", ["sink", "window", "tail", "selected"])
@pytest.mark.parametrize("length", [29, 77])
def test_a_listed_slot_that_was_not_written_is_found(driver, length, kind):
    sequence = driver.create(length)
    driver.decode(sequence)
    if kind == "selected" and sequence.phase.value == "dense":
        return
    driver.manager.check_integrity()
    poison(driver.manager.rooms.pool.slots[slots(driver, sequence, kind)])
    with pytest.raises(IntegrityError, match="never written"):
        driver.manager.check_integrity()


@pytest.mark.parametrize("kind", ["sink", "window", "selected"])
def test_a_block_of_another_sequence_is_found(driver, kind):
    sequence, other = driver.create(77), driver.create(77)
    driver.decode(sequence)
    driver.decode(other)
    pool = driver.manager.rooms.pool.slots
    pool[slots(driver, sequence, kind)] = pool[slots(driver, other, kind)]
    with pytest.raises(
        IntegrityError, match=r"a resident block of layer 1 (differs from|has little to do with that in) the arena"
    ):
        driver.manager.check_integrity()


def test_values_that_are_no_numbers_are_compared_bit_for_bit():
    with KVManager(SHAPE, tiny()) as manager:
        driver = Driver(manager)
        rows = driver.draw(30)
        rows.values[:] = float("nan")
        driver.run(Part(driver.create(), 30, rows=rows))
        manager.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poison_is_what_no_arithmetic_gives(dtype):
    slots = torch.zeros((4, 2, 3, 8), dtype=dtype)
    poison(slots[1])
    assert slots[1].isnan().all()
    slots[2] = float("nan")
    slots[3] = torch.tensor(float("inf"), dtype=dtype) - torch.tensor(float("inf"), dtype=dtype)
    assert poisoned(slots).tolist() == [[[number == 1] * 3] * 2 for number in range(4)]
