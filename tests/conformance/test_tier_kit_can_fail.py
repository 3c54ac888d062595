"""The kit of tier stores is worth what it refuses: each store here breaks one promise, and the test of it must notice."""

import threading
import time
from collections import OrderedDict

import anyio
import pytest

from oasiskv.errors import TierUnavailable
from oasiskv.testing.faults import Fault, FaultKind, FaultPlan
from oasiskv.testing.faulty import FaultyStore
from oasiskv.testing.late_writes import LateWrites
from oasiskv.testing.latency import LatencyStore
from oasiskv.testing.tier_kit import TierStoreTests
from oasiskv.tiers import Outcome, TierTraits
from oasiskv.tiers.memory import MemoryStore
from oasiskv.tiers.wrapping import WrappedStore

pytestmark = pytest.mark.anyio


class Idle(MemoryStore):
    """Says `HIT` and writes nothing."""

    def _read(self, read):
        return Outcome.HIT if read.key in self._objects else Outcome.MISS


class Lenient(MemoryStore):
    """Gives what there is of a range that goes beyond the object."""

    def _read(self, read):
        data = self._objects.get(read.key)
        if data is None:
            return Outcome.MISS
        part = data[read.offset : read.offset + read.into.nbytes]
        read.into[: len(part)] = part
        return Outcome.HIT


class Shifted(MemoryStore):
    """Reads every range from the beginning."""

    def _read(self, read):
        if read.key not in self._objects:
            return Outcome.MISS
        read.into[:] = self._objects[read.key][: read.into.nbytes]
        return Outcome.HIT


class Overwriting(MemoryStore):
    """Takes the newest bytes of a key."""

    async def store(self, objects):
        self._check_open()
        await super().delete([key for key, _ in objects])
        await super().store(objects)


class Borrowing(MemoryStore):
    """Keeps a view of what it was shown."""

    async def store(self, objects):
        await super().store(objects)
        self._objects.update(objects)


class Unsorted(MemoryStore):
    """Answers in another order than it was asked in."""

    async def load(self, reads):
        return (await super().load(reads))[::-1]


class Raising(MemoryStore):
    """Treats a miss as an error."""

    async def load(self, reads):
        outcomes = await super().load(reads)
        if Outcome.MISS in outcomes:
            raise TierUnavailable("no such segment")
        return outcomes


class Trusting(MemoryStore):
    """Gives what it finds, whatever has become of it."""


class Clinging(MemoryStore):
    """Notices damage and keeps it."""

    def _read(self, read):
        outcome = super()._read(read)
        damaged = bytes(len(self._objects.get(read.key, b""))) == self._objects.get(read.key)
        return Outcome.CORRUPT if damaged else outcome


class Undying(MemoryStore):
    """Deletes nothing."""

    async def delete(self, keys):
        self._check_open()


class Hasty(MemoryStore):
    """Checks arguments one by one, while it works."""

    async def store(self, objects):
        for one in objects:
            await super().store([one])

    async def load(self, reads):
        outcomes = []
        for read in reads:
            outcomes += await super().load([read])
        return outcomes


class Blind(MemoryStore):
    """Keys without the layer."""

    def _flat(self, key):
        return type(key)(key.space, key.digest, 0)

    async def store(self, objects):
        await super().store([(self._flat(key), data) for key, data in objects])

    async def load(self, reads):
        return await super().load([type(read)(self._flat(read.key), read.offset, read.into) for read in reads])


class Boundless(MemoryStore):
    """Ignores its limit."""

    def _make_room(self, key, count):
        return


class FirstIn(MemoryStore):
    """Forgets the oldest, used or not."""

    def _read(self, read):
        order = list(self._objects)
        outcome = super()._read(read)
        for key in order:
            self._objects.move_to_end(key)
        return outcome


class Evicting(MemoryStore):
    """Empties itself for what can never fit."""

    def _make_room(self, key, count):
        while self._objects and self._used + count > (self._limit or 1 << 60):
            self._used -= len(self._objects.popitem(last=False)[1])


class Uncounted(MemoryStore):
    """Says that it takes nothing."""

    @property
    def used_bytes(self):
        return 0


class Careless(MemoryStore):
    """Takes any option."""

    @classmethod
    def at(cls, location, layout):
        return cls(layout)


class Blocking(MemoryStore):
    """Holds the event loop while it waits for its medium."""

    async def load(self, reads):
        time.sleep(0.15)
        return await super().load(reads)


class Late(WrappedStore):
    """Writes when the call has been cancelled, and does not say so."""

    def __init__(self, inner):
        super().__init__(inner)
        self.late = LateWrites()

    async def load(self, reads):
        outcomes = await self.inner.load(reads)
        found = [(read.into, bytes(read.into)) for read, outcome in zip(reads, outcomes, strict=True) if outcome is Outcome.HIT]
        try:
            await anyio.sleep(0.001)
        except anyio.get_cancelled_exc_class():
            self.late.plan(found, 0.005)
            raise
        return outcomes


class Torn(WrappedStore):
    """Leaves half a segment when it is cancelled."""

    async def store(self, objects):
        try:
            await anyio.lowlevel.checkpoint()
        except anyio.get_cancelled_exc_class():
            await self.inner.store([(key, data[: data.nbytes // 2]) for key, data in objects])
            raise
        await self.inner.store(objects)


class Lingering(WrappedStore):
    """Reads the objects of a call that was cancelled when somebody asks for them."""

    def __init__(self, inner):
        super().__init__(inner)
        self.waiting = []

    async def store(self, objects):
        self.waiting += objects
        await anyio.lowlevel.checkpoint()
        await self._write()

    async def load(self, reads):
        await self._write()
        return await self.inner.load(reads)

    async def _write(self):
        waiting, self.waiting = self.waiting, []
        await self.inner.store(waiting)


class Unsure(MemoryStore):
    """Never says that a buffer is settled."""

    def unsettled(self, buffer):
        return True


class Immortal(MemoryStore):
    """Works on when it is closed."""

    async def aclose(self):
        return


class Stubborn(LatencyStore):
    """Waits for calls that do not end."""

    def __init__(self, inner):
        super().__init__(inner, 0.0)
        self.running = 0

    async def load(self, reads):
        self.running += 1
        try:
            await anyio.sleep(1)
        finally:
            self.running -= 1
        return await self.inner.load(reads)

    async def aclose(self):
        while self.running:
            await anyio.sleep(0.01)
        await self.inner.aclose()


class Forgetful(MemoryStore):
    """Says that it is persistent."""

    @property
    def traits(self):
        return TierTraits(persistent=True)


class Lonely(MemoryStore):
    """Says that it is shared."""

    @property
    def traits(self):
        return TierTraits(shared=True)


KEPT = OrderedDict()


class Indifferent(MemoryStore):
    """Persistent, whatever the layout."""

    traits = TierTraits(persistent=True)

    async def open(self):
        self._objects = KEPT

    async def aclose(self):
        self._closed = True


class Insatiable(MemoryStore):
    """Takes more than a batch."""

    traits = TierTraits(max_batch=2)


class Leaking(MemoryStore):
    """Opens a file and never closes it."""

    async def open(self):
        LEAKED.append(open(__file__, "rb"))  # noqa: SIM115 - the leak is what is tested


class Threaded(MemoryStore):
    """Starts a thread and never ends it."""

    async def open(self):
        self._end = threading.Event()
        ENDS.append(self._end)
        threading.Thread(target=self._end.wait).start()


class Fragile(Threaded):
    """Ends its thread, but not in a scope that is cancelled."""

    async def aclose(self):
        await anyio.lowlevel.checkpoint()
        if hasattr(self, "_end"):
            self._end.set()
        await super().aclose()


LEAKED, ENDS = [], []


@pytest.fixture(autouse=True)
def _tidy():
    yield
    KEPT.clear()
    while LEAKED:
        LEAKED.pop().close()
    while ENDS:
        ENDS.pop().set()


def around(kind):
    """A wrapper around the memory tier."""
    return lambda layout, limit: kind(MemoryStore(layout, limit))


def damaged(kind):
    """The memory tier with one fault in every load."""
    return lambda layout, limit: FaultyStore(MemoryStore(layout, limit), FaultPlan(Fault(kind, onwards=True)))


def leaves(error):
    """The exceptions that a group is made of."""
    return [leaf for part in error.exceptions for leaf in leaves(part)] if isinstance(error, BaseExceptionGroup) else [error]


async def refuse(make, test, arguments, tmp_path, expected=AssertionError):
    class Suite(TierStoreTests):
        patience_s = 1.0 if expected is TimeoutError else 30.0
        closing_s = 0.3

        def make(self, folder, layout, limit_bytes):
            self.made = make(layout, limit_bytes)
            return self.made

        def damage(self, folder, key):
            self.made._objects[key] = bytes(len(self.made._objects[key]))
            return True

    with pytest.raises(BaseException) as caught:  # noqa: PT011 - what it may be is checked below
        await getattr(Suite(), test)(tmp_path, *arguments)
    found = leaves(caught.value)
    assert all(isinstance(error, (expected, pytest.fail.Exception)) for error in found), found


@pytest.mark.parametrize(
    ("make", "test", "arguments"),
    [
        (Idle, "test_what_is_stored_is_read", (6,)),
        (Shifted, "test_every_range_of_slots", ()),
        (Lenient, "test_a_miss_is_a_value", ()),
        (Overwriting, "test_a_segment_never_changes", (6,)),
        (Overwriting, "test_a_segment_never_changes", (3,)),
        (Borrowing, "test_buffers_belong_to_the_caller", ()),
        (Unsorted, "test_many_segments_in_one_call", ()),
        (Undying, "test_what_is_deleted_is_gone", ()),
        (Trusting, "test_damage_is_noticed_and_forgotten", ()),
        (Clinging, "test_damage_is_noticed_and_forgotten", ()),
        (Blind, "test_keys_that_differ_a_little_are_different", ()),
        (Hasty, "test_objects_that_do_not_fit_are_refused", (memoryview(b""),)),
        (Hasty, "test_buffers_that_do_not_fit_are_refused", (memoryview(bytearray(3)),)),
        (Hasty, "test_offsets_between_slots_are_refused", (-256,)),
        (Insatiable, "test_more_than_a_batch_is_refused", ()),
        (Careless, "test_unknown_options_are_refused", ()),
        (Boundless, "test_the_limit_is_held", ()),
        (Boundless, "test_what_can_never_fit_is_refused", ()),
        (Evicting, "test_what_can_never_fit_is_refused", ()),
        (FirstIn, "test_what_was_not_used_for_longest_is_forgotten_first", ()),
        (Uncounted, "test_the_limit_is_held", ()),
        (Undying, "test_deleting_makes_room", ()),
        (Blocking, "test_calls_do_not_hold_the_event_loop", ()),
        (around(Late), "test_a_load_that_is_cancelled_leaves_its_buffers_alone", ()),
        (around(Torn), "test_a_store_that_is_cancelled_leaves_whole_segments", ()),
        (around(Lingering), "test_a_store_that_is_cancelled_leaves_whole_segments", ()),
        (Unsure, "test_after_a_call_nothing_is_unsettled", ()),
        (Immortal, "test_calls_after_closing_are_refused", ()),
        (Forgetful, "test_what_is_persistent_is_found_again", ()),
        (Forgetful, "test_a_store_that_is_made_again_counts_what_it_has", ()),
        (Indifferent, "test_another_layout_is_refused", ()),
        (Indifferent, "test_stores_of_different_places_are_apart", ()),
        (Lonely, "test_what_is_shared_is_seen_by_others", ()),
        (Leaking, "test_nothing_is_left_behind", ()),
        (Threaded, "test_nothing_is_left_behind", ()),
        (Fragile, "test_a_whole_life_may_be_cancelled", ()),
        (damaged(FaultKind.FLIP), "test_what_is_stored_is_read", (6,)),
        (damaged(FaultKind.SHORT), "test_calls_may_overlap", ()),
    ],
)
async def test_a_store_that_breaks_a_promise_is_refused(make, test, arguments, tmp_path):
    await refuse(make, test, arguments, tmp_path)


@pytest.mark.parametrize(
    ("make", "test", "error"),
    [
        (Raising, "test_a_miss_is_a_value", TierUnavailable),
        (around(Stubborn), "test_closing_ends_what_is_under_way", TimeoutError),
        (damaged(FaultKind.HANG), "test_every_range_of_slots", TimeoutError),
    ],
)
async def test_a_store_that_raises_or_hangs_is_refused(make, test, error, tmp_path):
    arguments = (5,) if error is TimeoutError and "closing" in test else ()
    await refuse(make, test, arguments, tmp_path, error)


async def test_a_store_that_keeps_its_promises_is_not_refused(tmp_path):
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await refuse(MemoryStore, "test_every_range_of_slots", (), tmp_path)


def test_a_suite_must_say_what_it_tests(tmp_path):
    with pytest.raises(NotImplementedError, match="overrides make"):
        TierStoreTests().make(tmp_path, None, None)
