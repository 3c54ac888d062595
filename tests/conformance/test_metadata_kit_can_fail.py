"""The kit of metadata stores is worth what it refuses: each store here breaks one promise, and the test of it must notice."""

import dataclasses
import time

import anyio
import pytest

from oasiskv.testing.metadata_kit import MetadataStoreTests
from oasiskv.tiers.memory_metadata import MemoryMetadata

pytestmark = pytest.mark.anyio


class Eternal(MemoryMetadata):
    """Nothing runs out."""

    async def publish(self, keys, owner, ttl_s):
        await super().publish(keys, owner, 1000 * ttl_s)

    async def put(self, name, value, ttl_s):
        await super().put(name, value, 1000 * ttl_s)


class Ordered(MemoryMetadata):
    """Names the first owner first."""

    async def locate(self, keys):
        return [found[::-1] for found in await super().locate(keys)]


class Sweeping(MemoryMetadata):
    """Withdraws for everybody."""

    async def withdraw(self, keys, owner):
        for key in keys:
            self._owners.pop(key, None)


class Generous(MemoryMetadata):
    """Gives a lease to whoever asks."""

    async def acquire(self, name, holder, ttl_s):
        self._grants.pop(name, None)
        return await super().acquire(name, holder, ttl_s)


class Constant(MemoryMetadata):
    """Fences that do not grow."""

    async def acquire(self, name, holder, ttl_s):
        lease = await super().acquire(name, holder, ttl_s)
        return lease and dataclasses.replace(lease, fence=(1, 1))


class Restarting(MemoryMetadata):
    """Epochs that do not grow."""

    def __init__(self):
        super().__init__()
        self._epoch = 1


class Absolute(MemoryMetadata):
    """Tells until when a lease lasts, not how long."""

    async def acquire(self, name, holder, ttl_s):
        lease = await super().acquire(name, holder, ttl_s)
        return lease and dataclasses.replace(lease, remaining_s=time.time() + ttl_s)


class Agreeing(MemoryMetadata):
    """Gives up whatever lease it is shown."""

    async def release(self, lease):
        self._begin()
        self._grants.pop(lease.name, None)
        return True


class Copying(MemoryMetadata):
    """Leaves what is claimed."""

    async def claim(self, name):
        self._begin()
        return self._handoffs.get(name, (None,))[0]


class Falsy(MemoryMetadata):
    """Takes empty handoffs for none."""

    async def claim(self, name):
        return await super().claim(name) or None


class Racing(MemoryMetadata):
    """Looks, waits, and then takes."""

    async def acquire(self, name, holder, ttl_s):
        now = self._begin(ttl_s)
        grant = self._grants.get(name)
        if grant is not None and grant.holder != holder and grant.ends_at > now:
            return None
        await anyio.lowlevel.checkpoint()
        self._grants.pop(name, None)
        return await super().acquire(name, holder, ttl_s)


class Tolerant(MemoryMetadata):
    """Takes any time to live."""

    async def publish(self, keys, owner, ttl_s):
        if ttl_s > 0:
            await super().publish(keys, owner, min(ttl_s, 1e9))


class Folding(MemoryMetadata):
    """Knows no capitals."""

    async def put(self, name, value, ttl_s):
        await super().put(name.lower(), value, ttl_s)

    async def claim(self, name):
        return await super().claim(name.lower())


class Immortal(MemoryMetadata):
    """Works on when it is closed."""

    async def aclose(self):
        return


class Careless(MemoryMetadata):
    """Takes any option."""

    @classmethod
    def at(cls, location):
        return cls()


@pytest.mark.parametrize(
    ("plugin", "test", "arguments"),
    [
        (Eternal, "test_what_is_published_runs_out", ()),
        (Eternal, "test_a_handoff_replaces_one_of_its_name", ()),
        (Ordered, "test_who_published_last_comes_first", ()),
        (Sweeping, "test_what_is_withdrawn_is_gone", ()),
        (Generous, "test_a_lease_has_one_holder", ()),
        (Generous, "test_renewing_keeps_the_fence", ()),
        (Constant, "test_fences_grow", ()),
        (Restarting, "test_fences_grow_when_the_store_starts_anew", ()),
        (Absolute, "test_a_lease_says_how_long_it_lasts", ()),
        (Agreeing, "test_a_lease_that_was_lost_cannot_be_given_up", ()),
        (Copying, "test_a_handoff_is_claimed_once", ()),
        (Falsy, "test_a_handoff_is_claimed_once", ()),
        (Copying, "test_one_of_many_racers_wins", ()),
        (Racing, "test_one_of_many_racers_wins", ()),
        (Tolerant, "test_times_that_cannot_be_are_refused", (-1.0,)),
        (Tolerant, "test_times_that_cannot_be_are_refused", (float("inf"),)),
        (Folding, "test_names_may_be_any_text", ()),
        (Immortal, "test_calls_after_closing_are_refused", ()),
        (Careless, "test_unknown_options_are_refused", ()),
    ],
)
async def test_a_store_that_breaks_a_promise_is_refused(plugin, test, arguments, tmp_path):
    suite = type("Suite", (MetadataStoreTests,), {"make": lambda self, folder: plugin()})()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await getattr(suite, test)(tmp_path, *arguments)


def test_a_suite_must_say_what_it_tests(tmp_path):
    with pytest.raises(NotImplementedError, match="overrides make"):
        MetadataStoreTests().make(tmp_path)
