import math

import pytest

from oasiskv import KVManager
from oasiskv.abc import TransferScheduler
from oasiskv.errors import ConfigError
from oasiskv.scheduler import WorkTicket

from .driver import SHAPE, Driver, Part, close_to, tiny


class Stuck(TransferScheduler):
    """While `stuck`, holds work back: before it begins, or after `mark` when `inside` is set. `drain` lets all of it go."""

    def __init__(self):
        self.stuck = False
        self.inside = False
        self._held = []
        self.waiting_transfers = []

    def submit(self, work):
        ticket = WorkTicket(work)
        if not self.stuck:
            ticket.run()
        elif self.inside and not self._held:
            self._begin(ticket, work)
        else:
            self._held.append(ticket.run)
        return ticket

    def _begin(self, ticket, work):
        """Everything that `WorkTicket.run` does before the transfer; the rest is held."""
        work.predict()
        work.select()
        work.mark()
        ticket._transferring = True
        self.waiting_transfers.append(work)

        def finish():
            work.transfer()
            ticket._done.set()

        self._held.append(finish)

    def drain(self):
        while self._held:
            self._held.pop(0)()
        self.waiting_transfers.clear()

    def close(self):
        self.drain()


@pytest.fixture
def scheduler():
    return Stuck()


@pytest.fixture
def driver(scheduler):
    with KVManager(SHAPE, tiny(on_late="skip"), scheduler) as manager:
        driver = Driver(manager)
        driver.sequence = driver.create(80)
        driver.decode(driver.sequence)
        driver.decode(driver.sequence)
        yield driver


def decode_and_compare(driver, drafts=0, accepted=1):
    """Decode one step; the output must be attention over exactly what the tables list when each layer begins."""
    sequence = driver.sequence
    part = Part(sequence, drafts + 1, drafts, accepted, driver.draw(drafts + 1))
    always, text = driver.always(sequence), driver.texts[sequence]
    seen = []
    output = driver.run(part, before=lambda layer: seen.append(driver.selected(sequence, layer)))[0]
    after, driver.texts[sequence] = driver.texts[sequence], text
    close_to(output, driver.restricted(sequence, part.rows, [[always | chosen for chosen in heads] for heads in seen]))
    driver.texts[sequence] = after
    return seen


@pytest.mark.parametrize("drafts", [0, 3])
def test_work_that_has_not_begun_is_skipped_and_the_old_set_serves_on(driver, scheduler, drafts):
    decode_and_compare(driver, drafts)
    scheduler.stuck = True
    decode_and_compare(driver, drafts)
    stats = driver.manager.stats()
    seen = [decode_and_compare(driver, drafts) for _ in range(5)]
    assert all(layers == seen[0] for layers in seen)
    assert all(len(chosen) == 3 for heads in seen[0] for chosen in heads)
    late = driver.manager.stats()
    assert late.late_layers - stats.late_layers == 5 * SHAPE.num_layers
    assert late.late_blocks == stats.late_blocks
    assert late.loaded_blocks == stats.loaded_blocks
    scheduler.stuck = False
    driver.check()


@pytest.mark.parametrize("drafts", [0, 3])
def test_blocks_of_a_transfer_in_progress_are_left_out_and_counted(driver, scheduler, drafts):
    sequence = driver.sequence
    decode_and_compare(driver, drafts)
    scheduler.stuck = scheduler.inside = True
    decode_and_compare(driver, drafts)
    (work,) = scheduler.waiting_transfers
    layer, missing = work.layer, [3 - len(chosen) for chosen in driver.selected(sequence, work.layer)]
    assert sum(missing) > 0
    poison_places(driver, layer, work.places)
    stats = driver.manager.stats()
    seen = decode_and_compare(driver, drafts)
    assert [3 - len(chosen) for chosen in seen[layer]] == missing
    late = driver.manager.stats()
    assert late.late_layers - stats.late_layers == SHAPE.num_layers
    assert late.late_blocks - stats.late_blocks == sum(missing)
    assert late.loaded_blocks == stats.loaded_blocks
    driver.manager.drain()
    assert driver.manager.stats().loaded_blocks - stats.loaded_blocks >= sum(missing)
    assert all(len(chosen) == 3 for chosen in driver.selected(sequence, layer))
    scheduler.stuck = scheduler.inside = False
    driver.check()
    decode_and_compare(driver, drafts)
    driver.check()


def poison_places(driver, layer, places):
    """What a half-done copy may leave in the places that are filling."""
    rooms = driver.manager.rooms
    for head, head_places in enumerate(places[0].tolist()):
        for place in head_places:
            if place >= 0:
                rooms.pool.slots[rooms.sets.selected.slots[layer][driver.sequence.row, head, place]] = math.nan


def test_a_late_block_may_be_read_in_place_by_correction(scheduler):
    with KVManager(SHAPE, tiny(on_late="skip", correction_blocks=3), scheduler) as manager:
        driver = Driver(manager)
        driver.sequence = driver.create(80)
        driver.decode(driver.sequence)
        scheduler.stuck = scheduler.inside = True
        driver.decode(driver.sequence)
        poison_places(driver, 0, scheduler.waiting_transfers[0].places)
        before = manager.stats().corrected_blocks
        assert driver.decode(driver.sequence).isfinite().all()
        assert manager.stats().corrected_blocks > before
        scheduler.stuck = False
        driver.check()


def test_a_dense_sequence_in_the_batch_is_not_counted_as_late(driver, scheduler):
    dense = driver.create(8)
    scheduler.stuck = True
    driver.run(Part(driver.sequence, 1), Part(dense, 1))
    before = driver.manager.stats().late_blocks
    driver.run(Part(driver.sequence, 1), Part(dense, 1))
    driver.run(Part(dense, 1))
    assert driver.manager.stats().late_blocks == before
    scheduler.stuck = False
    driver.check()


def test_work_in_time_is_not_counted(driver):
    for _ in range(5):
        decode_and_compare(driver)
    stats = driver.manager.stats()
    assert stats.late_layers == stats.late_blocks == 0
    assert stats.loaded_blocks > 0


@pytest.mark.parametrize("what", ["crop", "fork", "free", "prefill", "abort", "create", "close"])
def test_whatever_moves_blocks_waits_for_a_transfer_in_progress(driver, scheduler, what):
    sequence, manager = driver.sequence, driver.manager
    scheduler.stuck = scheduler.inside = True
    driver.decode(sequence)
    scheduler.stuck = False
    assert scheduler.waiting_transfers
    if what == "crop":
        driver.crop(sequence, sequence.length - 6)
    elif what == "fork":
        driver.fork(sequence)
    elif what == "free":
        driver.free(sequence)
    elif what == "prefill":
        driver.run(Part(sequence, 20))
    elif what == "abort":
        part = Part(sequence, 4, 3, rows=driver.draw(4))
        step = driver.begin(part)
        driver.attend(step, 0, part)
        step.abort()
    elif what == "create":
        driver.create(30)
    else:
        manager.close()
    assert not scheduler.waiting_transfers
    if what != "close":
        driver.check()


def test_skip_and_wait_are_the_only_modes():
    with pytest.raises(ConfigError):
        tiny(on_late="hurry")
