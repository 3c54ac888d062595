import pytest
import torch

from oasiskv import KVManager, Phase

from .driver import SHAPE, Driver, Part, tiny


@pytest.fixture
def driver():
    with KVManager(SHAPE, tiny(summary="transform")) as manager:
        yield Driver(manager)


def scores(driver, sequence, layer):
    queries = torch.ones(1, 1, SHAPE.query_heads, SHAPE.head_dim)
    return driver.manager.rooms.summary.score(layer, queries, torch.tensor([sequence.pages]), 1.0)


def summaries_are_current(driver, sequence):
    """Writing all summaries of a sequence once more changes no score."""
    summary, current = driver.manager.rooms.summary, True
    for layer in range(SHAPE.num_layers):
        before = scores(driver, sequence, layer)
        blocks = driver.texts[sequence][0][layer, : 4 * len(sequence.pages)].view(-1, 4, SHAPE.kv_heads, SHAPE.head_dim)
        summary.write(layer, torch.tensor(sequence.pages), blocks.transpose(1, 2).contiguous())
        current &= torch.equal(scores(driver, sequence, layer), before)
    return current


def test_a_much_longer_sequence_fits_the_summary_anew_and_all_summaries_follow(driver):
    short = driver.create(50)
    driver.decode(short)
    child, dense, unsettled = driver.fork(short), driver.create(30), driver.create(60)
    assert unsettled.phase is Phase.UNSETTLED
    before = scores(driver, short, 0)
    long = driver.create(120)
    driver.decode(long)
    assert not torch.equal(scores(driver, short, 0), before)
    for sequence in (short, child, long):
        assert summaries_are_current(driver, sequence)
    driver.run(Part(dense, 25))
    driver.run(*(Part(sequence, 1) for sequence in (short, child, dense, unsettled, long)))
    for sequence in (short, child, dense, unsettled, long):
        assert sequence.phase is Phase.SPARSE
        assert summaries_are_current(driver, sequence)
    driver.check()


def test_sequences_of_the_same_length_leave_the_fit_alone(driver):
    first = driver.create(60)
    driver.decode(first)
    before = scores(driver, first, 0)
    second = driver.create(70)
    driver.decode(second)
    assert torch.equal(scores(driver, first, 0), before)
    driver.check()


@pytest.mark.parametrize("workers", [0, 2])
def test_summaries_stay_current_through_decoding_crops_and_forks(workers):
    with KVManager(SHAPE, tiny(summary="transform", workers=workers)) as manager:
        driver = Driver(manager)
        sequence = driver.create(50)
        for tokens, drafts, accepted in ((1, 0, 1), (16, 15, 9), (1, 0, 1), (8, 7, 2)):
            driver.decode(sequence, tokens, drafts, accepted)
        child = driver.fork(sequence)
        driver.crop(sequence, 47)
        for _ in range(9):
            driver.run(Part(sequence, 2, 1, 2), Part(child, 1))
        driver.run(Part(child, 20))
        driver.decode(child)
        manager.drain()
        for each in (sequence, child):
            assert summaries_are_current(driver, each)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sequence_that_outgrows_the_fit_in_one_generation_fits_it_anew(workers):
    with KVManager(SHAPE, tiny(summary="transform", workers=workers)) as manager:
        driver = Driver(manager)
        sequence, other = driver.create(60), driver.create(50)
        driver.run(Part(sequence, 1), Part(other, 1))
        assert manager.fitted_length == 60
        before = scores(driver, other, 0)
        for _ in range(28):
            driver.decode(sequence)
        assert manager.fitted_length == 60
        driver.decode(sequence)  # begins at 89 tokens
        driver.decode(sequence)  # begins at 90: half more than at the fit
        assert manager.fitted_length == 90
        assert not torch.equal(scores(driver, other, 0), before)
        for each in (sequence, other):
            assert summaries_are_current(driver, each)
        driver.check()
