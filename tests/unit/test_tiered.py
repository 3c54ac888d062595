import anyio
import pytest

from oasiskv.errors import ConfigError, StateError, TierFull, TierUnavailable
from oasiskv.tiers import Location, Outcome, SegmentLayout
from oasiskv.tiers.tiered import TieredStore

from .moody import LAYOUT, SLOT, Hang, Moody, buffer, entry, key, read, segment

pytestmark = pytest.mark.anyio

SIZE = LAYOUT.segment_bytes


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


async def holds(tier, number):
    """What a tier has itself, whatever mood it is in."""
    one = read(number, slots=4)
    return await super(Moody, tier).load([one]) == [Outcome.HIT] and one.into == segment(number)


async def soon(condition):
    with anyio.fail_after(5):
        while not condition():
            await anyio.sleep(0.005)


async def loads(store, number):
    one = read(number, slots=4)
    outcomes = await store.load([one])
    assert outcomes != [Outcome.HIT] or one.into == segment(number)
    return outcomes[0]


async def test_the_fastest_tier_has_it_at_once_and_the_others_later():
    fast, slow, last = tiers = [Moody(), Moody(), Moody()]
    async with TieredStore(tiers) as store:
        slow.hang = Hang()
        data = bytearray(segment(1))
        await store.store([(key(1), memoryview(data))])
        data[:] = bytes(len(data))  # the caller's again
        assert await holds(fast, 1)
        assert not await holds(slow, 1)
        slow.hang.end()
        await store.flush()
        assert await holds(slow, 1)
        assert await holds(last, 1)


async def test_what_the_fast_tier_evicts_too_soon_is_still_read():
    fast, slow = Moody(limit_bytes=SIZE), Moody()
    async with TieredStore([fast, slow]) as store:
        slow.error = TierUnavailable("away")
        for number in range(5):
            await store.store([entry(number)])
        assert not await holds(fast, 0)
        assert await store.contains([key(0), key(9)]) == [True, False]
        assert [await loads(store, number) for number in range(5)] == [Outcome.HIT] * 5
        slow.error = None
        await store.flush()
        assert [await holds(slow, number) for number in range(5)] == [True] * 5


@pytest.mark.parametrize("error", [TierUnavailable("away"), TierFull("no space left")])
async def test_a_store_is_refused_when_a_lower_tier_has_failed_for_too_long(error):
    fast, slow = Moody(), Moody()
    async with TieredStore([fast, slow], queue_bytes=2 * SIZE) as store:
        slow.error = error
        await store.store([entry(1), entry(2)])
        with anyio.fail_after(2), pytest.raises(type(error), match="Moody fails: "):
            await store.store([entry(3)])
        assert not await holds(fast, 3)
        with pytest.raises(type(error)):
            await store.flush()
        slow.error = None
        await store.flush()
        await store.store([entry(3)])
        await store.flush()
        assert [await holds(slow, number) for number in (1, 2, 3)] == [True] * 3


async def test_a_store_waits_for_a_slow_tier():
    slow = Moody()
    async with TieredStore([Moody(), slow], queue_bytes=SIZE) as store:
        slow.hang = Hang()
        await store.store([entry(1)])
        with anyio.move_on_after(0.05) as scope:
            await store.store([entry(2)])
        assert scope.cancelled_caught
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.store, [entry(3)])
            await anyio.sleep(0.01)
            slow.hang.end()
        await store.flush()
        assert [await holds(slow, number) for number in (1, 2, 3)] == [True, False, True]


async def test_a_call_larger_than_the_queue_goes_alone():
    slow = Moody()
    async with TieredStore([Moody(), slow], queue_bytes=1) as store:
        await store.store([entry(1), entry(2)])
        await store.flush()
        assert await holds(slow, 2)


async def test_a_tier_without_room_is_passed_over():
    fast, middle, last = Moody(limit_bytes=SLOT), Moody(limit_bytes=SLOT), Moody()
    async with TieredStore([fast, middle, last]) as store:
        await store.store([entry(1)])
        assert await holds(last, 1)
        assert await loads(store, 1) is Outcome.HIT
        await store.flush()
    fast, middle, last = Moody(), Moody(limit_bytes=SLOT), Moody()
    async with TieredStore([fast, middle, last]) as store:
        small = (key(2), segment(2)[:SLOT])
        await store.store([entry(1), small, entry(3)])
        await store.flush()
        assert await holds(last, 1)
        assert await super(Moody, middle).contains([key(1), key(2), key(3)]) == [False, True, False]


async def test_when_no_tier_takes_it_the_error_says_whether_to_try_again():
    async with TieredStore([Moody(limit_bytes=SLOT), Moody(limit_bytes=SLOT)]) as store:
        with pytest.raises(TierFull):
            await store.store([entry(1)])
    fast, slow = Moody(limit_bytes=SLOT), Moody()
    async with TieredStore([fast, slow]) as store:
        slow.error = TierUnavailable("away")
        with pytest.raises(TierUnavailable):
            await store.store([entry(1)])
        assert await super(Moody, slow).contains([key(1)]) == [False]


async def test_reads_from_below_are_promoted_once_and_whole():
    fast, slow = Moody(), Moody()
    async with TieredStore([fast, slow]) as store:
        await super(Moody, slow).store([entry(1)])
        reads = [read(1, slot=number) for number in range(4)]
        assert await store.load(reads) == [Outcome.HIT] * 4
        assert b"".join(one.into for one in reads) == bytes(segment(1))
        await soon(lambda: store.promoted)
        assert await holds(fast, 1)
        assert fast.calls.count(("store", 1)) == 1
        calls = len(slow.calls)
        assert await loads(store, 1) is Outcome.HIT
        assert len(slow.calls) == calls


async def test_promotion_does_not_delay_the_load_nor_overfill_the_tier():
    fast, small, slow = Moody(), Moody(limit_bytes=SLOT), Moody()
    async with TieredStore([fast, slow]) as store:
        await super(Moody, slow).store([entry(1)])
        original, hang = fast.store, Hang()

        async def store_late(objects):
            await hang.wait()
            await original(objects)

        fast.store = store_late
        assert await loads(store, 1) is Outcome.HIT
        assert not store.promoted
        hang.end()
        await soon(lambda: store.promoted)
    slow = Moody()
    async with TieredStore([small, slow]) as store:
        await super(Moody, slow).store([entry(1)])
        assert await loads(store, 1) is Outcome.HIT
        await anyio.sleep(0.02)
        assert ("store", 1) not in small.calls
    slow = Moody()
    async with TieredStore([Moody(), slow], promote=False) as store:
        await super(Moody, slow).store([entry(2)])
        assert await loads(store, 2) is Outcome.HIT
        await anyio.sleep(0.02)
        assert not store.promoted


class Corrupting(Moody):
    """Finds damage in the segments that it is told of."""

    def __init__(self):
        super().__init__()
        self.damaged = set()

    async def load(self, reads):
        outcomes = await super().load(reads)
        hurt = {read.key for read in reads} & self.damaged
        await super().delete(list(hurt))
        self.damaged -= hurt
        return [Outcome.CORRUPT if read.key in hurt else outcome for read, outcome in zip(reads, outcomes, strict=True)]


@pytest.mark.parametrize("promote", [True, False])
async def test_damage_is_read_around_and_mended(promote):
    fast, slow = Corrupting(), Corrupting()
    async with TieredStore([fast, slow], promote=promote) as store:
        await store.store([entry(1), entry(2)])
        await store.flush()
        fast.damaged = {key(1), key(2)}
        slow.damaged = {key(2)}
        assert await loads(store, 1) is Outcome.HIT
        await soon(lambda: store.promoted)
        assert await holds(fast, 1)
        assert await loads(store, 2) is Outcome.CORRUPT
        assert await loads(store, 2) is Outcome.MISS


async def test_an_unavailable_tier_is_read_around_and_passed_over_for_a_while():
    fast, slow = Moody(), Moody()
    async with TieredStore([fast, slow]) as store:
        await store.store([entry(1)])
        await store.flush()
        fast.error = TierUnavailable("away")
        calls = len(fast.calls)
        for _ in range(5):
            assert await loads(store, 1) is Outcome.HIT
            assert await store.contains([key(1), key(2)]) == [True, False]
        assert [call for call in fast.calls[calls:] if call[0] == "contains"] == []
        slow.error = TierUnavailable("away, too")
        with pytest.raises(TierUnavailable, match="none of the 2 tiers"):
            await loads(store, 1)
        with pytest.raises(TierUnavailable, match="none of the 2 tiers"):
            await store.contains([key(1)])
        fast.error = slow.error = None
        await soon(lambda: store._health[0].well and store._health[1].well)
        assert await loads(store, 1) is Outcome.HIT


async def test_a_tier_that_calls_are_cancelled_in_is_passed_over():
    fast, slow = Moody(), Moody()
    async with TieredStore([fast, slow]) as store:
        slow.hang = Hang()
        with anyio.move_on_after(0.05):
            await loads(store, 1)
        for _ in range(20):  # while probes find nobody
            with anyio.fail_after(0.05):
                assert await loads(store, 1) is Outcome.MISS
            await anyio.sleep(0.01)
        slow.hang.end()
        await soon(lambda: store._health[1].well)


async def test_a_buffer_that_a_tier_may_still_write_to_is_given_to_no_other():
    class Late(Moody):
        def unsettled(self, buffer):
            return self.error is not None

    fast, slow = Late(), Moody()
    async with TieredStore([fast, slow]) as store:
        await store.store([entry(1)])
        await store.flush()
        fast.error = TierUnavailable("cut off")
        one = read(1, slots=4)
        with pytest.raises(TierUnavailable, match="may still write"):
            await store.load([one])
        assert store.unsettled(one.into)
        assert ("load", 1) not in slow.calls


async def test_a_delete_is_not_undone_by_what_was_on_its_way():
    fast, slow = Moody(), Moody()
    async with TieredStore([fast, slow]) as store:
        slow.hang = Hang()
        await store.store([entry(1)])
        await store.store([entry(2)])
        await soon(lambda: slow.calls)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.delete, [key(1), key(2), key(9)])
            await anyio.sleep(0.02)
            slow.hang.end()
        await store.flush()
        assert await store.contains([key(1), key(2)]) == [False, False]
        assert [await loads(store, number) for number in (1, 2)] == [Outcome.MISS] * 2


async def test_a_delete_is_not_undone_by_a_promotion():
    fast, slow = Moody(), Moody()
    async with TieredStore([fast, slow]) as store:
        await super(Moody, slow).store([entry(1)])
        original, hang = fast.store, Hang()

        async def store_late(objects):
            await hang.wait()
            await original(objects)

        fast.store = store_late
        assert await loads(store, 1) is Outcome.HIT
        await anyio.sleep(0.02)  # the copy is under way
        await store.delete([key(1)])
        hang.end()
        await anyio.sleep(0.02)
        assert await loads(store, 1) is Outcome.MISS
        assert not store.promoted


async def test_a_delete_that_a_tier_does_not_answer_is_an_error_and_done_in_the_others():
    fast, middle, last = Moody(), Moody(), Moody()
    async with TieredStore([fast, middle, last]) as store:
        await store.store([entry(1)])
        await store.flush()
        middle.error = TierUnavailable("away")
        with pytest.raises(TierUnavailable, match="away"):
            await store.delete([key(1)])
        assert [await holds(tier, 1) for tier in (fast, middle, last)] == [False, True, False]


async def test_batches_are_split_as_each_tier_wants_them():
    fast, slow = Moody(max_batch=2), Moody(max_batch=3)
    async with TieredStore([fast, slow]) as store:
        await store.store([entry(number) for number in range(5)])
        await store.flush()
        assert await store.load([read(number) for number in range(5)]) == [Outcome.HIT] * 5
    assert fast.calls == [("store", 2), ("store", 2), ("store", 1), ("load", 2), ("load", 2), ("load", 1)]
    assert slow.calls == [("store", 3), ("store", 2)]


async def test_closing_writes_what_is_on_its_way_and_counts_what_it_cannot(monkeypatch):
    seen = []

    class Remembering(Moody):
        async def store(self, objects):
            await super().store(objects)
            seen.extend(key for key, _ in objects)

    store = TieredStore([Moody(), Remembering()])
    async with store:
        await store.store([entry(1), entry(2)])
    assert seen == [key(1), key(2)]
    assert store.dropped == 0

    monkeypatch.setattr("oasiskv.tiers.tiered._DRAIN_S", 0.05)
    slow = Moody()
    slow.hang = Hang()
    store = TieredStore([Moody(), slow])
    with anyio.fail_after(2):
        async with store:
            await store.store([entry(1), entry(2)])
    assert store.dropped == 2
    for call in (
        store.store([entry(1)]),
        store.load([read(1)]),
        store.contains([key(1)]),
        store.delete([key(1)]),
        store.flush(),
    ):
        with pytest.raises(StateError, match="closed"):
            await call
    await store.aclose()
    slow.hang.end()


async def test_those_who_wait_when_it_closes_get_an_error(monkeypatch):
    monkeypatch.setattr("oasiskv.tiers.tiered._DRAIN_S", 0.05)
    slow = Moody()
    slow.hang = Hang()
    ended = []

    async def expect(call):
        with pytest.raises(StateError):
            await call
        ended.append(call)

    async with anyio.create_task_group() as tasks, TieredStore([Moody(), slow], queue_bytes=SIZE) as store:
        await store.store([entry(1)])
        tasks.start_soon(expect, store.store([entry(2)]))
        tasks.start_soon(expect, store.flush())
        await anyio.sleep(0.01)
    assert len(ended) == 2


async def test_a_store_under_way_when_it_closes_is_no_success(monkeypatch):
    monkeypatch.setattr("oasiskv.tiers.tiered._DRAIN_S", 0.05)
    fast = Moody()
    store = TieredStore([fast, Moody()])
    fast.hang = Hang()
    async with anyio.create_task_group() as tasks, store:
        tasks.start_soon(expect_closed, store.store([entry(1)]))
        await soon(lambda: fast.calls)
        tasks.start_soon(store.aclose)
        await anyio.sleep(0.01)
        fast.hang.end()


async def expect_closed(call):
    with pytest.raises(StateError, match="closed"):
        await call


async def test_an_exception_that_no_tier_should_raise_keeps_the_others_going():
    fast, slow = Moody(), Moody()
    async with TieredStore([fast, slow]) as store:
        slow.error = KeyError("a bug")
        await store.store([entry(1)])
        await soon(lambda: slow.calls)
        with pytest.raises(TierUnavailable, match="a bug"):
            await store.flush()
        assert await loads(store, 1) is Outcome.HIT
        slow.error = None
        await store.flush()


async def test_what_it_says_of_itself():
    fast, slow = Moody(limit_bytes=2 * SIZE), Moody()
    store = TieredStore([fast, slow])
    with pytest.raises(StateError, match="not open"):
        await store.load([read(1)])
    async with store:
        assert store.limit_bytes is None
        await store.store([entry(1)])
        await store.flush()
        assert store.used_bytes == 2 * SIZE
        assert not store.unsettled(buffer())
    with pytest.raises(ConfigError, match="the same for all"):
        TieredStore([Moody(), Moody(SegmentLayout(1, 1, 2, 4))])
    with pytest.raises(ConfigError, match="queue_bytes"):
        TieredStore([Moody()], queue_bytes=0)
    with pytest.raises(ConfigError, match="list of locations"):
        TieredStore.at(Location.parse("tiered:"), LAYOUT)


async def test_a_tier_that_does_not_open_closes_those_that_did():
    class Broken(Moody):
        async def open(self):
            raise TierUnavailable("no disk")

    fast = Moody()
    with pytest.raises(TierUnavailable, match="no disk"):
        async with TieredStore([fast, Broken()]):
            pass
    with pytest.raises(StateError):
        await fast.contains([key(1)])


async def test_one_tier_is_a_store_too():
    async with TieredStore([Moody()]) as store:
        await store.store([entry(1)])
        assert await loads(store, 1) is Outcome.HIT
        await store.flush()
