from oasiskv.testing.tier_kit import TierStoreTests
from oasiskv.tiers.memory import MemoryStore
from oasiskv.tiers.tiered import TieredStore


class TestTwoTiers(TierStoreTests):
    takes_limit = False  # each tier has its own

    def make(self, folder, layout, limit_bytes):
        return TieredStore([MemoryStore(layout, 4 * layout.segment_bytes), MemoryStore(layout)])


class TestATinyFirstTier(TestTwoTiers):
    """Which evicts at once, so that nearly all is read on its way down, or below."""

    def make(self, folder, layout, limit_bytes):
        return TieredStore([MemoryStore(layout, layout.slot_bytes), MemoryStore(layout)])


class TestOneTier(TierStoreTests):
    def make(self, folder, layout, limit_bytes):
        return TieredStore([MemoryStore(layout, limit_bytes)])
