"""Dense sequences must give way when the pool runs short, also within the step that needs the room."""

import contextlib

import pytest

from oasiskv import Phase
from oasiskv.errors import PoolExhausted

from .driver import Part, close_to
from .test_manager_capacity import expect_full, make


def test_room_for_a_prompt_beside_a_large_dense_sequence_that_decodes():
    driver = make(strips=24, dense_threshold=100)
    large, fresh = driver.create(80), driver.create()
    driver.run(Part(large, 1), Part(fresh, 32))
    driver.check()
    for _ in range(3):
        driver.run(Part(large, 1), Part(fresh, 1))
        driver.check()


def test_room_for_a_prompt_beside_another_prompt():
    driver = make(strips=24, dense_threshold=100)
    first, second = driver.create(), driver.create()
    expect_full(driver, Part(first, 60), Part(second, 60))
    driver.check()
    driver.run(Part(first, 1), Part(second, 1))
    driver.check()


def test_room_for_a_small_sequence_that_decodes_beside_a_large_dense_one():
    driver = make(strips=25, dense_threshold=100)
    large, small = driver.create(79), driver.create(20)
    driver.run(Part(large, 1), Part(small, 1))
    driver.check()
    assert small.phase is Phase.DENSE


def test_room_for_two_that_grow_together():
    driver = make(strips=26, dense_threshold=100)
    first, second = driver.create(50), driver.create(50)
    for _ in range(20):
        driver.run(Part(first, 1), Part(second, 1))
        driver.check()


@pytest.mark.parametrize("left", [0, 2, 37])
def test_a_sequence_that_was_cropped_short_gives_its_room_back(left):
    driver = make(strips=24, dense_threshold=100)
    cropped = driver.create(80)
    driver.crop(cropped, left)
    other = driver.create(52)
    driver.check()
    expect_full(driver, Part(cropped, 3))
    driver.run(Part(other, 1))
    driver.check()


def test_a_prompt_that_was_aborted_gives_its_room_back():
    driver = make(strips=24, dense_threshold=100)
    aborted = driver.create()
    driver.begin(Part(aborted, 80)).abort()
    other = driver.create(52)
    driver.check()
    expect_full(driver, Part(aborted, 9))
    driver.run(Part(other, 1))
    driver.check()


def test_a_sequence_within_the_budget_is_never_turned_sparse_for_its_rejected_drafts():
    driver = make(strips=24, dense_threshold=100)
    short = driver.create(38)
    driver.decode(short, 16, 15, 1)
    assert short.length < driver.manager.config.budget_tokens
    driver.create(44)
    driver.check()
    expect_full(driver, Part(short, 1))


def test_a_step_that_fails_for_room_changes_no_sequence():
    driver = make(strips=12, pages=400)
    first, second, third = driver.create(20), driver.create(20), driver.create()
    with pytest.raises(MemoryError):
        driver.begin(Part(first, 1), Part(second, 1), Part(third, 40))
    driver.check()
    expect_full(driver, Part(first, 1))


def test_a_pool_that_holds_every_block_of_two_dense_sequences_serves_both():
    driver = make(strips=13)
    first, second = driver.create(20), driver.create(20)
    for _ in range(4):
        expect_full(driver, Part(first, 1), Part(second, 1))
        driver.check()


def test_room_for_one_that_turns_sparse_beside_a_prompt_that_would_stay_dense():
    driver = make(strips=20, dense_threshold=44)
    turning, fresh = driver.create(36), driver.create()
    with contextlib.suppress(PoolExhausted):
        driver.run(Part(turning, 16, 15, 1), Part(fresh, 44))
    driver.check()
    driver.run(Part(turning, 1))
    driver.check()


def test_forking_in_the_middle_of_a_step_takes_nothing_from_its_sequences():
    driver = make(strips=30, dense_threshold=100)
    stepping, small = driver.create(80), driver.create(32)
    part = Part(stepping, 1, rows=driver.draw(1))
    expected = driver.full(stepping, part.rows)
    step = driver.begin(part)
    first = driver.attend(step, 0, part)
    with contextlib.suppress(PoolExhausted):
        driver.fork(small)
    close_to(first, expected[0])
    close_to(driver.attend(step, 1, part), expected[1])
    step.commit()
    driver.remember(part)
    driver.check()
