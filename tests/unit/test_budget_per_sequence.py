import pytest
import torch

from oasiskv import KVManager, Phase

from .driver import SHAPE, Driver, Part, close_to, tiny

SLOTS = SHAPE.num_layers * SHAPE.kv_heads * 3  # three selected blocks per head, see `tiny`


def sharing(**changes):
    return tiny(budget_per="sequence", **changes)


def selected(driver, sequence):
    return [[len(chosen) for chosen in driver.selected(sequence, layer)] for layer in range(SHAPE.num_layers)]


def total(driver, sequence):
    return sum(sum(heads) for heads in selected(driver, sequence))


def prompt_with_one_needy_head(driver, tokens=96, layer=1, head=0):
    """Keys alike within a block. One head attends to all blocks alike, the others to a single one."""
    rows = driver.draw(tokens)
    keys = rows.keys.unflatten(1, (-1, 4))
    keys.copy_(keys[:, :, :1].clone().expand_as(keys))
    point(driver, rows, rows.keys, layer, head)
    return rows


def point(driver, rows, keys, layer, head):
    rows.queries.copy_(20 * keys[:, 24:25].repeat_interleave(2, 2) / keys[:, 24:25].norm(dim=-1).amin())
    rows.queries[layer, :, 2 * head : 2 * head + 2] = 0.0


def test_a_head_that_attends_to_many_blocks_takes_what_the_others_do_not_need():
    with KVManager(SHAPE, sharing(max_new_blocks=8)) as manager:
        driver = Driver(manager)
        sequence = driver.create()
        prompt = prompt_with_one_needy_head(driver)
        driver.run(Part(sequence, 96, rows=prompt))
        for _ in range(6):
            rows = driver.draw(1)
            point(driver, rows, prompt.keys, 1, 0)
            driver.run(Part(sequence, 1, rows=rows))
            driver.check()
        counts = selected(driver, sequence)
        assert counts[1][0] == 6  # twice its share, which is the most
        assert all(6 in driver.selected(sequence, layer)[head] for layer, head in ((0, 0), (0, 1), (1, 1)))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_sequence_never_holds_more_than_its_slots_and_uses_most_of_them(workers):
    with KVManager(SHAPE, sharing(workers=workers)) as manager:
        driver = Driver(manager)
        sequence = driver.create(120)
        held = []
        for _ in range(40):
            driver.decode(sequence)
            manager.drain()
            driver.check()
            held.append(total(driver, sequence))
        assert max(held) <= SLOTS
        assert sum(held) / len(held) > 0.6 * SLOTS


def test_the_floor_rises_when_slots_run_short_and_falls_when_they_are_left():
    with KVManager(SHAPE, sharing()) as manager:
        driver = Driver(manager)
        sequence = driver.create(120)
        driver.decode(sequence)
        floors = manager.rooms.sets.selected.floors
        for start in (1e-5, 0.9):
            floors[sequence.row] = start
            driver.decode(sequence)
            first = float(floors[sequence.row])
            for _ in range(12):
                driver.decode(sequence)
            assert total(driver, sequence) > SLOTS // 2
            assert first < start if start > 0.5 else float(floors[sequence.row]) > start
        driver.check()


def test_what_is_far_below_the_floor_is_given_up():
    with KVManager(SHAPE, sharing()) as manager:
        driver = Driver(manager)
        sequence = driver.create(120)
        driver.decode(sequence)
        assert total(driver, sequence) > 0
        manager.rooms.sets.selected.floors[sequence.row] = 5.0  # a group's masses sum to 2
        driver.decode(sequence)
        assert total(driver, sequence) == 0
        assert len(manager.rooms.sets.selected.free_slots(sequence.row)) == SLOTS
        driver.check()


def test_workers_change_nothing():
    outputs = []
    for workers in (0, 1):
        with KVManager(SHAPE, sharing(workers=workers, correction_blocks=1)) as manager:
            driver = Driver(manager)
            sequence = driver.create(90)
            outputs.append(torch.cat([driver.decode(sequence) for _ in range(15)], 1))
    assert torch.equal(*outputs)


def test_a_batch_gives_what_its_sequences_give_alone():
    together, alone = [], []
    for batch in (True, False):
        with KVManager(SHAPE, sharing()) as manager:
            driver = Driver(manager)
            texts = [driver.draw(70), driver.draw(95)]
            steps = [[driver.draw(1) for _ in range(10)] for _ in texts]
            sequences = []
            for rows in texts:
                sequences.append(driver.create())
                driver.run(Part(sequences[-1], rows.keys.shape[1], rows=rows))
            for number in range(10):
                parts = [Part(s, 1, rows=rows[number]) for s, rows in zip(sequences, steps, strict=True)]
                if batch:
                    together.extend(driver.run(*parts))
                else:
                    alone.extend(driver.run(part)[0] for part in parts)
    for one, other in zip(together, alone, strict=True):
        close_to(one, other.double())


def test_a_fork_has_slots_of_its_own():
    with KVManager(SHAPE, sharing()) as manager:
        driver = Driver(manager)
        sequence = driver.create(90)
        driver.decode(sequence)
        child = driver.fork(sequence)
        assert [driver.selected(child, layer) for layer in range(2)] == [driver.selected(sequence, layer) for layer in range(2)]
        rows = driver.draw(1)
        first, second = (driver.run(Part(one, 1, rows=rows))[0] for one in (sequence, child))
        assert torch.equal(first, second)
        for _ in range(5):
            driver.decode(child)
            driver.check()
        driver.free(sequence)
        driver.decode(child)
        driver.check()


def test_a_crop_gives_slots_back():
    with KVManager(SHAPE, sharing()) as manager:
        driver = Driver(manager)
        sequence = driver.create(120)
        for _ in range(4):
            driver.decode(sequence)
        driver.crop(sequence, 60)
        driver.check()
        for _ in range(4):
            driver.decode(sequence)
        driver.check()
        driver.crop(sequence, 20)
        assert sequence.phase is Phase.DENSE
        driver.check()
