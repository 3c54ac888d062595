"""Three tiers that forget and fail at times: nothing that was stored is lost, nothing that was deleted comes back."""

from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from oasiskv.errors import TierUnavailable
from oasiskv.testing.tier_kit.suite import content, key
from oasiskv.testing.tier_machine import TierStoreMachine
from oasiskv.tiers.memory import MemoryStore
from oasiskv.tiers.tiered import TieredStore


class Failing(MemoryStore):
    down = False

    async def store(self, objects):
        self._check_up()
        await super().store(objects)

    async def load(self, reads):
        self._check_up()
        return await super().load(reads)

    async def contains(self, keys):
        self._check_up()
        return await super().contains(keys)

    def _check_up(self):
        if self.down:
            raise TierUnavailable("down")


class TieredMachine(TierStoreMachine):
    """A segment may be missed while the last tier is down, which may be the only one to have it, and at no other time."""

    def make(self, folder, layout, limit_bytes):
        size = layout.segment_bytes
        self._tiers = [MemoryStore(layout, 2 * size), Failing(layout, 3 * size), Failing(layout)]
        return TieredStore(self._tiers)

    @rule(number=st.integers(1, 2), down=st.booleans())
    def fail(self, number, down):
        self._tiers[number].down = down
        for health in self._store._health:
            health._until = 0.0  # it is asked at once, since time stands still between rules

    @rule()
    def flush(self):
        with suppress(TierUnavailable):  # which the next rules go on with
            self._await(self._store.flush)

    @rule(number=st.integers(0, 5))
    def store_and_delete(self, number):
        """While the copy is on its way."""
        self.store(objects=[(key(number), 6, 0)])
        self.delete(names=[key(number)])

    @rule(down=st.sampled_from([1, 2]))
    def store_while_it_fails(self, down):
        """More than the first tier holds, which is there when the other one is asked again."""
        self.fail(number=down, down=True)
        self.store(objects=[(key(number), 6, 0) for number in range(4)])
        self.fail(number=down, down=False)
        self.load(ranges=[(key(number), 0, 6) for number in range(4)], overlapping=False)

    def _bytes(self, name, slots, version):
        return content(name, slots=6)  # the same each time, as the contract says

    @property
    def _forgets(self):
        return self._tiers[2].down


class OnTrio(TieredMachine):
    backend = "trio"


TestTiered = TieredMachine.TestCase
TestTieredOnTrio = OnTrio.TestCase
for case in (TestTiered, TestTieredOnTrio):
    case.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
