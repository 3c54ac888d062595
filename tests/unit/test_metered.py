"""A metered store behaves as the one that it wraps, and counts."""

import logging

import anyio
import pytest

from oasiskv.errors import ConfigError, InputError, TierUnavailable
from oasiskv.tiers import Location, Outcome, Read, SegmentKey, SegmentLayout
from oasiskv.tiers.memory import MemoryStore
from oasiskv.tiers.metered import MeteredStore
from oasiskv.trace import Trace

pytestmark = pytest.mark.anyio

LAYOUT = SegmentLayout(kv_heads=2, num_blocks=4, block_size=4, head_dim=8)
SLOT = LAYOUT.slot_bytes


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


def key(number):
    return SegmentKey("test", bytes([number]) * 16, 0)


def data(number):
    return memoryview(bytes([number]) * LAYOUT.segment_bytes)


class Moody(MemoryStore):
    """Fails, hangs, or finds everything corrupt, when told to."""

    mood = "well"
    asked = None

    async def load(self, reads):
        if self.mood == "down":
            raise TierUnavailable("the test has pulled the plug")
        if self.mood == "silent":
            self.asked.set()
            await anyio.sleep_forever()
        outcomes = await super().load(reads)
        return [Outcome.CORRUPT] * len(outcomes) if self.mood == "rotten" else outcomes


def reads(*numbers, slots=1):
    return [Read(key(number), 0, memoryview(bytearray(slots * SLOT))) for number in numbers]


async def test_calls_are_counted_by_kind_with_their_bytes_and_outcomes():
    async with MeteredStore(MemoryStore(LAYOUT), "here") as store:
        await store.store([(key(1), data(1)), (key(2), data(2))])
        wanted = reads(1, 2, 3, slots=2)
        assert await store.load(wanted) == [Outcome.HIT, Outcome.HIT, Outcome.MISS]
        assert bytes(wanted[1].into) == bytes([2]) * 2 * SLOT
        assert await store.contains([key(1), key(9)]) == [True, False]
        await store.delete([key(1)])
        assert store.used_bytes == LAYOUT.segment_bytes
    stored, loaded, asked, deleted = (store.stats(call) for call in ("store", "load", "contains", "delete"))
    assert (stored.operations, stored.entries, stored.bytes) == (1, 2, 2 * LAYOUT.segment_bytes)
    assert (loaded.operations, loaded.entries, loaded.bytes) == (1, 3, 4 * SLOT)
    assert (loaded.hits, loaded.misses, loaded.corrupt) == (2, 1, 0)
    assert (asked.hits, asked.misses) == (1, 1)
    assert (deleted.operations, deleted.entries, deleted.bytes) == (1, 1, 0)
    assert loaded.seconds.count == loaded.batch.count == 1
    assert loaded.batch.total == 3


async def test_an_error_passes_and_is_counted_by_its_name():
    inner = Moody(LAYOUT)
    async with MeteredStore(inner, "here") as store:
        inner.mood = "down"
        for _ in range(2):
            with pytest.raises(TierUnavailable, match="plug"):
                await store.load(reads(1))
        with pytest.raises(InputError):
            await store.store([(key(1), memoryview(b"odd"))])
    assert store.stats("load").errors == {"TierUnavailable": 2}
    assert (store.stats("load").operations, store.stats("load").bytes) == (2, 0)
    assert store.stats("store").errors == {"InputError": 1}
    assert store.stats("store").bytes == 0


async def test_a_call_that_was_given_up_counts_as_cancelled():
    inner = Moody(LAYOUT)
    async with MeteredStore(inner, "here") as store:
        inner.mood, inner.asked = "silent", anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(store.load, reads(1))
            await inner.asked.wait()
            await anyio.sleep(0.01)
            group.cancel_scope.cancel()
    assert store.stats("load").errors == {"cancelled": 1}
    assert store.stats("load").seconds.total >= 0.009


async def test_an_outage_is_logged_once_when_it_begins_and_once_when_it_ends(caplog):
    caplog.set_level(logging.INFO, "oasiskv")
    inner = Moody(LAYOUT)
    async with MeteredStore(inner, "far") as store:
        for inner.mood in ("well", "down", "down", "well", "well"):
            try:
                await store.load(reads(1))
            except TierUnavailable:
                assert inner.mood == "down"
    assert [(record.event, record.levelname) for record in caplog.records] == [("tier-down", "WARNING"), ("tier-up", "INFO")]
    assert caplog.records[0].values["tier"] == "far"
    assert caplog.messages[0] == "tier-down tier=far error='the test has pulled the plug'"


async def test_what_is_corrupt_is_counted_and_logged(caplog):
    inner = Moody(LAYOUT)
    async with MeteredStore(inner, "here") as store:
        await store.store([(key(1), data(1))])
        inner.mood = "rotten"
        assert await store.load(reads(1, 1)) == [Outcome.CORRUPT] * 2
    assert (store.stats("load").corrupt, store.stats("load").bytes) == (2, 0)
    assert caplog.messages == ["tier-corrupt tier=here reads=2"]


async def test_loads_and_stores_are_slices_that_may_overlap():
    trace = Trace()
    inner = Moody(LAYOUT)
    async with MeteredStore(inner, "here", trace) as store:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.store, [(key(1), data(1))])
            tasks.start_soon(store.load, reads(2))
        inner.mood = "down"
        with pytest.raises(TierUnavailable):
            await store.load(reads(1))
    begins = [event for event in trace.as_dict()["traceEvents"] if event["ph"] == "b"]
    assert sorted(event["name"] for event in begins) == ["tier here load", "tier here load", "tier here store"]
    assert begins[-1]["args"] == {"entries": 1, "error": "TierUnavailable"}
    assert {"entries": 1, "bytes": LAYOUT.segment_bytes} in [event["args"] for event in begins]


async def test_it_hides_nothing_of_the_store():
    inner = MemoryStore(LAYOUT, 8 * LAYOUT.segment_bytes)
    store = MeteredStore(inner, "here")
    assert (store.layout, store.traits, store.limit_bytes) == (LAYOUT, inner.traits, inner.limit_bytes)
    assert not store.unsettled(memoryview(bytearray(8)))
    store.register_buffer(memoryview(bytearray(8)))
    async with store:
        pass


def test_it_has_no_location():
    with pytest.raises(ConfigError, match="wraps a store"):
        MeteredStore.at(Location.parse("metered:"), LAYOUT)
