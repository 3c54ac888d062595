"""Sequences whose KV exceeds the arena run on from a tier store, and what fails there is never attended to."""

import pytest
import torch

from oasiskv import KVManager, OasisConfig, Phase
from oasiskv.errors import ArenaExhausted, ConfigError, SegmentLost, TierUnavailable
from oasiskv.tiers import Outcome, SegmentLayout
from oasiskv.tiers.codecs import CODECS
from oasiskv.tiers.coded import CodedStore
from oasiskv.tiers.memory import MemoryStore

from .driver import PAGE_BYTES, SHAPE, Driver, Part, tiny

CONFIG = {"arena_bytes": 30 * PAGE_BYTES, "segment_blocks": 2, "correction_blocks": 2}


class Watched(MemoryStore):
    """Counts what is read, and does to it what a test wants."""

    def __init__(self, *args):
        super().__init__(*args)
        self.reads = []
        self.damage = lambda read, outcome: outcome

    async def load(self, reads):
        outcomes = await super().load(reads)
        self.reads += reads
        return [self.damage(read, outcome) for read, outcome in zip(reads, outcomes, strict=True)]


def layout(config):
    return SegmentLayout.of(SHAPE, config)


def tiered(store_limit=None, **changes):
    config = tiny(**{**CONFIG, **changes})
    return Driver(KVManager(SHAPE, config, tier=Watched(layout(config), store_limit)))


@pytest.fixture
def driver():
    driver = tiered()
    yield driver
    driver.manager.close()


def store_of(driver):
    return driver.manager.rooms.arena._store


@pytest.mark.parametrize(("limit", "pages"), [(None, None), (7 * PAGE_BYTES, 6), (2 * PAGE_BYTES, 2)])
def test_the_capacity_is_that_of_the_store_in_whole_segments(limit, pages):
    driver = tiered(limit)
    assert driver.manager.rooms.arena.capacity_pages == pages
    driver.manager.close()


def long_sequence(driver, blocks=80):
    """More than twice what the arena holds, read in pieces."""
    sequence = driver.create(4 * blocks, chunk=32)
    driver.manager.flush()
    return sequence


def test_the_arena_keeps_its_limit_and_the_rest_comes_from_the_store(driver):
    sequence = long_sequence(driver)
    for _ in range(20):
        assert driver.decode(sequence).isfinite().all()
    stats = driver.manager.stats()
    assert stats.arena_bytes <= stats.arena_peak_bytes <= 30 * PAGE_BYTES
    assert stats.tier_bytes >= 78 * PAGE_BYTES
    assert stats.fetched_blocks > 0
    assert stats.lost_blocks == stats.corrupt_blocks == stats.quarantined_blocks == 0
    driver.check()


@pytest.mark.parametrize("predictor", ["lookahead", "oracle"])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_results_are_those_of_an_arena_with_room(predictor, workers):
    changes = {"predictor": predictor, "workers": workers}
    small, large = tiered(**changes), Driver(KVManager(SHAPE, tiny(correction_blocks=2, **changes)))
    outputs = []
    for driver in (small, large):
        sequence = driver.create(4 * 80, chunk=32)
        outputs.append([driver.decode(sequence) for _ in range(10)])
        driver.manager.close()
    for mine, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_blocks_in_the_arena_are_not_read_again(driver):
    sequence = long_sequence(driver)
    arena, store = driver.manager.rooms.arena, store_of(driver)
    pages = torch.tensor(sequence.pages[3:5]).expand(1, SHAPE.kv_heads, -1)
    first = arena.locate(0, pages)
    before = len(store.reads)
    assert torch.equal(arena.locate(0, pages), first)
    assert len(store.reads) == before


def test_what_two_steps_use_is_not_evicted_for_more(driver):
    sequence = long_sequence(driver)
    arena = driver.manager.rooms.arena
    driver.manager.rooms.arena.begin_step()
    driver.manager.rooms.arena.begin_step()
    many = torch.tensor(sequence.pages[:70]).expand(1, SHAPE.kv_heads, -1)
    found = arena.locate(0, many)
    assert 0 < (found >= 0).sum() < many.numel()
    assert arena.faults() == []


def test_an_arena_that_is_too_small_for_a_piece_of_prompt_says_so(driver):
    sequence = driver.create()
    with pytest.raises(ArenaExhausted, match=r"31 new blocks take 31744 bytes, and arena_bytes is 30720.*at most 30 blocks"):
        driver.run(Part(sequence, 4 * 31))
    driver.check()
    assert driver.manager.prompt_piece(1000) == 40
    assert driver.manager.prompt_piece(16) == 16


def test_forks_share_segments_and_the_last_one_deletes_them(driver):
    sequence = long_sequence(driver)
    child = driver.fork(sequence)
    for one in (sequence, child):
        for _ in range(5):
            driver.decode(one)
    driver.check()
    driver.free(sequence)
    driver.check()
    driver.free(child)
    driver.manager.flush()
    assert driver.manager.stats().tier_bytes == 0
    assert store_of(driver).used_bytes == 0


def test_a_crop_into_a_segment_keeps_the_rest_of_it(driver):
    sequence = long_sequence(driver)
    driver.crop(sequence, 4 * 51 + 2)
    driver.check()
    for _ in range(20):
        driver.decode(sequence)
    driver.manager.flush()
    driver.check()


def test_a_crop_while_segments_are_on_their_way(driver):
    sequence = driver.create(4 * 20)
    driver.crop(sequence, 4 * 7)
    for _ in range(12):
        driver.decode(sequence, 4, 3, 4)
    driver.manager.flush()
    driver.check()
    driver.free(sequence)
    driver.manager.flush()
    assert store_of(driver).used_bytes == 0


def flip(read, outcome):
    read.into[3] ^= 1
    return outcome


@pytest.mark.parametrize("damage", [flip, lambda read, outcome: Outcome.CORRUPT, lambda read, outcome: Outcome.MISS])
def test_what_comes_back_wrong_is_not_attended_to(driver, damage):
    sequence = long_sequence(driver)
    driver.decode(sequence)
    store_of(driver).damage = damage
    rows = driver.draw(1)
    for _ in range(4):
        output = driver.run(Part(sequence, 1, rows=rows))[0]
        assert output.isfinite().all()
        driver.manager.drain()
        for layer in range(SHAPE.num_layers):
            assert all(block < 80 for blocks in driver.selected(sequence, layer) for block in blocks)
    stats = driver.manager.stats()
    assert stats.lost_blocks + stats.corrupt_blocks > 0
    with pytest.raises(SegmentLost, match="read its prompt again"):
        driver.manager.full_kv(sequence, 0)
    store_of(driver).damage = lambda read, outcome: outcome
    driver.check()


def test_damage_that_is_gone_at_the_second_read_costs_nothing(driver):
    long_sequence(driver)
    seen = set()

    def once(read, outcome):
        if (read.key, read.offset) not in seen:
            seen.add((read.key, read.offset))
            read.into[0] ^= 255
        return outcome

    store_of(driver).damage = once
    driver.check()
    assert driver.manager.stats().corrupt_blocks > 0
    assert driver.manager.stats().lost_blocks == 0


def fail(read, outcome):
    raise TierUnavailable("the medium is gone")


def test_a_sequence_that_cannot_settle_stays_as_it_was(driver):
    sequence, other = long_sequence(driver), driver.create(4 * 10)
    store_of(driver).damage = flip
    for _ in range(2):
        with pytest.raises(SegmentLost):
            driver.decode(sequence)
        assert sequence.phase is Phase.UNSETTLED
    assert driver.decode(other).isfinite().all()
    store_of(driver).damage = lambda read, outcome: outcome
    driver.check()
    assert driver.decode(sequence).isfinite().all()
    driver.check()


@pytest.mark.parametrize(("length", "left"), [(4 * 9 + 1, 4 * 80 + 1), (4 * 9, 4 * 9)])
def test_a_crop_that_cannot_read_leaves_a_sound_sequence(driver, length, left):
    sequence = long_sequence(driver)
    driver.decode(sequence)
    store_of(driver).damage = flip
    with pytest.raises(SegmentLost):
        driver.crop(sequence, length)
    assert sequence.length == left
    driver.texts[sequence] = tuple(tensor[:, :left] for tensor in driver.texts[sequence])
    store_of(driver).damage = lambda read, outcome: outcome
    driver.check()


def test_a_store_that_fails_leaves_what_is_in_the_arena(driver):
    sequence = long_sequence(driver)
    driver.decode(sequence)
    store_of(driver).damage = fail
    for _ in range(8):
        assert driver.decode(sequence).isfinite().all()
    assert driver.manager.stats().lost_blocks > 0
    with pytest.raises(TierUnavailable):
        driver.manager.full_kv(sequence, 0)


def test_a_store_without_room_fills_the_arena_and_loses_nothing():
    driver = tiered(store_limit=40 * PAGE_BYTES)
    sequence = driver.create()
    for _ in range(8):
        driver.run(Part(sequence, 32))
    with pytest.raises(ArenaExhausted, match=r"the tier store fails: .* raise the limit"):
        driver.run(Part(sequence, 32))
    driver.check()
    assert driver.decode(sequence).isfinite().all()
    driver.manager.close()


def test_a_store_of_another_layout_is_refused():
    config = tiny(**CONFIG)
    with pytest.raises(ConfigError, match="was made for"):
        KVManager(SHAPE, config, tier=MemoryStore(layout(tiny(segment_blocks=4))))


@pytest.mark.parametrize("value", ["", [], 5, [""], ["memory:", 3]])
def test_a_tier_that_is_no_location_is_refused(value):
    with pytest.raises(ConfigError, match="tier is"):
        OasisConfig(tier=value)


@pytest.mark.parametrize(
    "tier", ["memory:?codec=int8", "memory:?codec=int4", ["memory:?limit=4KiB", "memory:?codec=fp8"], "memory:?codec=fp8"]
)
def test_a_store_that_compresses_is_checked_all_the_same(tier):
    driver = Driver(KVManager(SHAPE, tiny(**CONFIG, tier=tier)))
    sequence = long_sequence(driver)
    for _ in range(12):
        assert driver.decode(sequence).isfinite().all()
    stats = driver.manager.stats()
    assert stats.fetched_blocks > 0
    assert stats.lost_blocks == stats.corrupt_blocks == 0
    driver.manager.check_integrity()
    keys, _ = driver.manager.full_kv(sequence, 0)
    error = (keys - driver.texts[sequence][0][0].transpose(0, 1)).abs()
    assert 0 < error.max() < 0.7
    assert error.mean() < 0.06
    driver.manager.close()


def test_damage_in_a_store_that_compresses_is_found():
    config = tiny(**CONFIG)
    codec = CODECS["int8"]
    inner = Watched(codec.coded(layout(config)), None)
    driver = Driver(KVManager(SHAPE, config, tier=CodedStore(inner, layout(config), codec)))
    sequence = long_sequence(driver)
    driver.decode(sequence)
    inner.damage = flip
    with pytest.raises(SegmentLost):
        driver.manager.full_kv(sequence, 0)
    assert driver.manager.stats().corrupt_blocks > 0
    driver.manager.close()


def test_every_tier_of_a_manager_is_counted():
    driver = Driver(KVManager(SHAPE, tiny(**CONFIG, tier=["memory:?limit=16KiB", "memory:"])))
    long_sequence(driver)
    driver.manager.rooms.arena.drain()
    meters = driver.manager.rooms.arena.meters
    assert [meter.name for meter in meters] == ["memory", "memory-2"]
    assert all(meter.stats("store").bytes > 0 for meter in meters)
    driver.manager.close()


def test_locations_come_from_the_configuration():
    driver = Driver(KVManager(SHAPE, tiny(**CONFIG, tier="memory:?limit=1MiB")))
    sequence = long_sequence(driver)
    driver.decode(sequence)
    driver.check()
    driver.manager.close()
