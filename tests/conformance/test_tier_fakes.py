"""The fakes of `oasiskv.testing` are stores themselves, whatever they do."""

from oasiskv.testing.faults import Fault, FaultKind, FaultPlan
from oasiskv.testing.faulty import FaultyStore
from oasiskv.testing.latency import LatencyStore
from oasiskv.testing.throttled import ThrottledStore
from oasiskv.testing.tier_kit import TierStoreTests
from oasiskv.tiers.memory import MemoryStore


class TestLatencyStore(TierStoreTests):
    def make(self, folder, layout, limit_bytes):
        return LatencyStore(MemoryStore(layout, limit_bytes), 0.0005)


class TestThrottledStore(TierStoreTests):
    def make(self, folder, layout, limit_bytes):
        return ThrottledStore(MemoryStore(layout, limit_bytes), bytes_per_s=50e6)


class TestSlowStore(TierStoreTests):
    def make(self, folder, layout, limit_bytes):
        slow = [Fault(FaultKind.SLOW, name, onwards=True, delay_s=0.0005) for name in ("store", "load", "contains", "delete")]
        return FaultyStore(MemoryStore(layout, limit_bytes), FaultPlan(*slow))
