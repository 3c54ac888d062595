"""The state machine, on every store that needs no server."""

import pytest
from hypothesis import settings

from oasiskv.testing.tier_kit.suite import LAYOUT
from oasiskv.testing.tier_machine import TierStoreMachine
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
for case in (TestMemory, TestMemoryOnTrio, TestMemoryWithALimit):
    case.settings = _SETTINGS


def test_a_machine_must_say_what_it_tests(tmp_path):
    with pytest.raises(NotImplementedError, match="overrides make"):
        TierStoreMachine.make(MemoryMachine(), tmp_path, LAYOUT, None)
