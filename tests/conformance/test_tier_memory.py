from oasiskv.testing.tier_kit import TierStoreTests
from oasiskv.tiers.memory import MemoryStore


class TestMemory(TierStoreTests):
    def make(self, folder, layout, limit_bytes):
        return MemoryStore(layout, limit_bytes)
