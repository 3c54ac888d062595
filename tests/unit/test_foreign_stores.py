"""A tier store that breaks its contract, at any of its calls: an error of ours, and a sequence that is right or refuses.

The right outputs come from naive attention over what the driver remembers.
"""

import contextlib
import time

import pytest

from oasiskv import KVManager
from oasiskv.errors import OasisError, TierUnavailable, WorkerError
from oasiskv.tiers import Outcome, SegmentLayout, breaker
from oasiskv.tiers.lane import TierLane
from oasiskv.tiers.memory import MemoryStore
from oasiskv.tiers.wrapping import WrappedStore

from .driver import PAGE_BYTES, SHAPE, Driver, Part, close_to, tiny
from .moody import LAYOUT, key, read


def raises(_, __):
    raise OSError("the socket is closed")


BREACHES = {
    "raises OSError": raises,
    "answers too few": lambda outcomes, _: outcomes[:-1],
    "answers too many": lambda outcomes, _: [*outcomes, Outcome.HIT],
    "answers other things": lambda outcomes, _: ["hit"] * len(outcomes),
    "answers None": lambda _, __: None,
    "answers a generator": lambda outcomes, _: iter(outcomes),
}


class Foreign(WrappedStore):
    """Breaks the contract from its `since`-th load on."""

    def __init__(self, inner, breach):
        super().__init__(inner)
        self.breach, self.since, self.loads = breach, None, 0

    async def load(self, reads):
        self.loads += 1
        outcomes = await self.inner.load(reads)
        if self.since is not None and self.loads >= self.since:
            return self.breach(outcomes, reads)
        return outcomes


class Blocking(MemoryStore):
    def __init__(self, layout, breach):
        super().__init__(layout)
        self.breach = breach

    @property
    def load_blocking(self):
        return lambda reads: self.breach([Outcome.MISS] * len(reads), reads)


@pytest.mark.parametrize("breach", BREACHES.values(), ids=BREACHES)
@pytest.mark.parametrize("blocking", [False, True], ids=["async", "blocking"])
def test_a_lane_says_what_a_store_has_answered(blocking, breach):
    store = Blocking(LAYOUT, breach) if blocking else Foreign(MemoryStore(LAYOUT), breach)
    store.since = 1
    with (
        TierLane(store) as lane,
        pytest.raises(WorkerError, match=r"store failed: OSError|TierStore\.load.* answered"),
    ):
        lane.load([read(1), read(2)], 5.0)


@pytest.mark.parametrize("answer", [[True], [True, False, True], [1, 0], None, "no"])
def test_a_lane_says_what_a_store_has_answered_to_contains(answer):
    class Odd(MemoryStore):
        async def contains(self, keys):
            return answer

    with TierLane(Odd(LAYOUT)) as lane, pytest.raises(WorkerError, match=r"TierStore\.contains answered"):
        lane.contains([key(1), key(2)], 5.0)


@pytest.fixture(params=BREACHES.values(), ids=BREACHES)
def scene(request, monkeypatch):
    monkeypatch.setattr(breaker, "FIRST_BACK_OFF_S", 0.01)
    config = tiny(arena_bytes=30 * PAGE_BYTES, segment_blocks=2, workers=1)
    store = Foreign(MemoryStore(SegmentLayout.of(SHAPE, config)), request.param)
    with KVManager(SHAPE, config, tier=store) as manager:
        driver = Driver(manager)
        driver.free(driver.create(60))  # whose values lie in the pool yet
        driver.store = store
        yield driver


def forgiven(driver):
    """The store keeps its contract again, and its lane has found out."""
    driver.store.since = None
    for _ in range(500):
        try:
            driver.manager.check_integrity()
            for sequence in driver.manager.sequences:
                driver.manager.full_kv(sequence, 0)
        except (WorkerError, TierUnavailable):  # what has failed in the background is raised once for each layer
            time.sleep(0.01)
        else:
            return
    raise TimeoutError


def elsewhere(driver):
    """A sparse sequence whose blocks are in the store only, for the most part."""
    sequence = driver.create(96, chunk=24)
    for _ in range(3):
        driver.decode(sequence)
    driver.manager.flush()
    for _ in range(3):
        other = driver.create(60, chunk=20)
        driver.manager.flush()
        driver.free(other)
    return sequence


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("length", [30, 32, 61, 64])
def test_a_crop_is_complete_or_has_not_been(scene, length, at):
    sequence = elsewhere(scene)
    before = scene.texts[sequence]
    scene.store.since = scene.store.loads + at
    with contextlib.suppress(OasisError):
        scene.manager.crop(sequence, length)
    forgiven(scene)
    if sequence.length == length:
        scene.texts[sequence] = tuple(tensor[:, :length] for tensor in before)
    scene.check()
    part = Part(sequence, 1, rows=scene.draw(1))
    text = scene.texts[sequence]
    output = scene.run(part)[0]
    scene.check()
    if length < 40:  # within the budget, so that the output is that of full attention
        now, scene.texts[sequence] = scene.texts[sequence], text
        if sequence.length == length + 1:
            close_to(output, scene.full(sequence, part.rows))
        scene.texts[sequence] = now


@pytest.mark.parametrize("at", [1, 2, 3, 4, 6])
def test_steps_go_on_when_the_store_keeps_its_contract_again(scene, at):
    sequence = elsewhere(scene)
    scene.store.since = scene.store.loads + at
    failed = 0
    for _ in range(6):
        part = Part(sequence, 1, rows=scene.draw(1))
        try:
            scene.run(part)
        except WorkerError:
            failed += 1
            if scene.manager.open_step is not None:
                scene.manager.open_step.abort()
    forgiven(scene)
    scene.check()
    scene.decode(sequence)
    scene.check()


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_more_prompt_is_read_when_the_store_keeps_its_contract_again(scene, at):
    sequence = elsewhere(scene)
    scene.store.since = scene.store.loads + at
    part = Part(sequence, 12, rows=scene.draw(12))
    try:
        scene.run(part)
    except WorkerError:
        if scene.manager.open_step is not None:
            scene.manager.open_step.abort()
    forgiven(scene)
    scene.check()
    part = Part(sequence, 12, rows=scene.draw(12))
    text = scene.texts[sequence]
    output = scene.run(part)[0]
    scene.check()
    scene.texts[sequence] = text
    close_to(output, scene.full(sequence, part.rows))
