import pytest

from oasiskv import KVManager, Phase
from oasiskv.errors import ArenaExhausted, ConfigError, PoolExhausted

from .driver import PAGE_BYTES, SHAPE, STRIP_BYTES, Driver, Part, close_to, tiny


def make(strips=None, pages=400, **changes):
    pool = None if strips is None else strips * STRIP_BYTES
    return Driver(KVManager(SHAPE, tiny(pool_bytes=pool, arena_bytes=pages * PAGE_BYTES, **changes)))


def expect_full(driver, *parts):
    """Run a step whose every output must be full attention."""
    for part in parts:
        part.rows = part.rows or driver.draw(part.tokens)
    expected = [driver.full(part.sequence, part.rows) for part in parts]
    for output, wanted in zip(driver.run(*parts), expected, strict=True):
        close_to(output, wanted)


@pytest.mark.parametrize("tokens", [41, 60])
def test_a_pool_below_the_budget_refuses_the_prompt_and_changes_nothing(tokens):
    driver = make(strips=9)
    sequence = driver.create()
    with pytest.raises(PoolExhausted, match=f"pool_bytes must be at least {10 * STRIP_BYTES}"):
        driver.begin(Part(sequence, tokens))
    driver.check()
    assert sequence.length == 0
    assert driver.manager.rooms.arena.used_pages == 0
    driver.run(Part(sequence, 36))
    driver.check()


def test_a_pool_of_exactly_the_budget_serves_one_sequence_of_any_length():
    driver = make(strips=10)
    sequence = driver.create(90)
    for drafts in (0, 15, 3, 0):
        driver.decode(sequence, drafts + 1, drafts, 1)
        driver.check()
    assert driver.manager.rooms.pool.allocated_bytes == 10 * STRIP_BYTES


def test_a_second_sequence_that_does_not_fit_is_refused_and_the_first_goes_on():
    driver = make(strips=12)
    first, second = driver.create(60), driver.create()
    driver.decode(first)
    with pytest.raises(PoolExhausted, match=f"at least {15 * STRIP_BYTES}"):
        driver.begin(Part(first, 1), Part(second, 20))
    assert driver.manager.open_step is None
    driver.check()
    driver.run(Part(first, 1), Part(second, 8))
    driver.check()
    driver.free(first)
    driver.run(Part(second, 20))
    driver.check()


def test_growth_while_decoding_is_refused_before_anything_changed():
    driver = make(strips=5)
    sequence = driver.create(20)
    with pytest.raises(PoolExhausted):
        driver.begin(Part(sequence, 1))
    driver.check()
    assert sequence.length == 20


def test_a_fork_that_does_not_fit_is_refused_and_leaks_nothing():
    driver = make(strips=15)
    sequence = driver.create(60)
    with pytest.raises(PoolExhausted):
        driver.manager.fork(sequence)
    driver.check()
    driver.decode(sequence)
    driver.check()


def test_the_pool_grows_to_what_is_needed_when_it_has_no_size():
    driver = make()
    for number in range(1, 4):
        driver.create(60)
        assert driver.manager.rooms.pool.num_strips == 10 * number
    driver.check()


@pytest.mark.parametrize("tokens", [44, 24])
def test_an_arena_too_small_for_the_prompt_refuses_it_and_changes_nothing(tokens):
    driver = make(pages=5)
    sequence = driver.create()
    with pytest.raises(ArenaExhausted, match=f"arena_bytes must be at least {tokens // 4 * PAGE_BYTES}"):
        driver.begin(Part(sequence, tokens))
    assert sequence.length == 0
    driver.check()
    driver.run(Part(sequence, 23))
    driver.check()


@pytest.mark.parametrize("length", [23, 63])
def test_a_decode_step_that_cannot_be_stored_is_refused_and_changes_nothing(length):
    driver = make(pages=length // 4)
    sequence = driver.create(length)
    with pytest.raises(ArenaExhausted):
        driver.begin(Part(sequence, 1))
    assert driver.manager.open_step is None
    assert sequence.length == length
    driver.check()
    driver.crop(sequence, length - 8)
    driver.decode(sequence)
    driver.check()


@pytest.mark.parametrize("length", [21, 61])
@pytest.mark.parametrize("with_prefill", [False, True])
def test_a_draft_step_that_cannot_be_stored_loses_and_leaks_nothing(length, with_prefill):
    driver = make(pages=length // 4 + (3 if with_prefill else 0))
    sequence, fresh = driver.create(length), driver.create()
    parts = [Part(sequence, 8, 7, 8)] + ([Part(fresh, 12)] if with_prefill else [])
    with pytest.raises(ArenaExhausted):
        driver.run(*parts)
    if driver.manager.open_step:
        driver.manager.open_step.abort()
    assert sequence.length == length
    driver.check()
    driver.free(fresh)
    driver.decode(sequence)
    driver.check()


def test_the_arena_serves_again_after_a_sequence_is_freed():
    driver = make(pages=10)
    first, second = driver.create(24), driver.create()
    with pytest.raises(ArenaExhausted):
        driver.begin(Part(second, 20))
    driver.free(first)
    driver.run(Part(second, 20))
    driver.check()


def test_a_prefill_that_cannot_be_stored_undoes_the_other_parts_of_its_step():
    driver = make(pages=20)
    first, second, third = driver.create(39), driver.create(), driver.create()
    with pytest.raises(ArenaExhausted):
        driver.begin(Part(first, 1), Part(second, 20), Part(third, 60))
    driver.check()
    driver.run(Part(first, 1), Part(second, 20))
    driver.check()


def test_sizes_below_one_block_are_refused_at_once():
    with pytest.raises(ConfigError, match="pool_bytes"):
        KVManager(SHAPE, tiny(pool_bytes=STRIP_BYTES - 1))
    with pytest.raises(ConfigError, match="arena_bytes"):
        KVManager(SHAPE, tiny(arena_bytes=PAGE_BYTES - 1))


def test_a_prompt_that_finds_no_room_to_stay_dense_turns_sparse():
    driver = make(strips=16, dense_threshold=100)
    sequence = driver.create(80)
    assert sequence.phase is Phase.UNSETTLED
    assert len(sequence.strips) == 10
    driver.decode(sequence)
    driver.check()


def test_a_decoding_sequence_that_finds_no_room_to_stay_dense_turns_sparse():
    driver = make(strips=16, dense_threshold=100)
    sequence = driver.create(64)
    assert sequence.phase is Phase.DENSE
    driver.decode(sequence)
    assert sequence.phase is Phase.SPARSE
    driver.check()


def test_the_largest_dense_sequence_makes_room_for_a_new_one():
    driver = make(strips=40, dense_threshold=100)
    small, large = driver.create(52), driver.create(80)
    third = driver.create(40)
    assert (small.phase, large.phase, third.phase) == (Phase.DENSE, Phase.SPARSE, Phase.DENSE)
    driver.check()
    expect_full(driver, Part(small, 1))
    driver.run(Part(small, 1), Part(large, 1))
    driver.check()


def test_forking_makes_room_in_the_same_way():
    driver = make(strips=32, dense_threshold=100)
    large, small = driver.create(80), driver.create(40)
    driver.fork(small)
    assert large.phase is Phase.SPARSE
    driver.check()
