"""The state machine, on every store that needs no server."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from oasiskv.testing.tier_kit.suite import LAYOUT
from oasiskv.testing.tier_machine import TierStoreMachine
from oasiskv.tiers import Outcome
from oasiskv.tiers.memory import MemoryStore

_SETTINGS = settings(max_examples=40, stateful_step_count=25, deadline=None)


class MemoryMachine(TierStoreMachine):
    def make(self, folder, layout, limit_bytes):
        return MemoryStore(layout, limit_bytes)


class TrioMachine(MemoryMachine):
    backend = "trio"


class LimitedMachine(MemoryMachine):
    limit_bytes = 3 * LAYOUT.segment_bytes


TestMemory = MemoryMachine.TestCase
TestMemoryOnTrio = TrioMachine.TestCase
TestMemoryWithALimit = LimitedMachine.TestCase
for _case in (TestMemory, TestMemoryOnTrio, TestMemoryWithALimit):
    _case.settings = _SETTINGS


def test_a_machine_must_say_what_it_tests(tmp_path):
    with pytest.raises(NotImplementedError, match="overrides make"):
        TierStoreMachine.make(MemoryMachine(), tmp_path, LAYOUT, None)


class Undying(MemoryStore):
    """Deletes nothing."""

    async def delete(self, keys):
        return


class Overwriting(MemoryStore):
    """Takes the newest bytes of a key."""

    async def store(self, objects):
        await self.delete([key for key, _ in objects])
        await super().store(objects)


class Lenient(MemoryStore):
    """Says `HIT` of a range that goes beyond the object."""

    def _read(self, read):
        return Outcome.HIT if read.key in self._objects and read.offset else super()._read(read)


class Boundless(MemoryStore):
    """Ignores its limit."""

    def _make_room(self, key, count):
        return


@pytest.mark.parametrize("broken", [Undying, Overwriting, Lenient, Boundless])
def test_a_store_that_breaks_a_promise_is_refused(broken):
    class Machine(TierStoreMachine):
        limit_bytes = LAYOUT.segment_bytes * 2 if broken is Boundless else None

        def make(self, folder, layout, limit_bytes):
            return broken(layout, limit_bytes)

    few = settings(
        _SETTINGS, max_examples=200, database=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=few)
