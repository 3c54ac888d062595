"""The conformance kit of tier stores: subclass `TierStoreTests` and say how your store is made."""

from .arguments import ArgumentTests
from .contents import ContentTests
from .interruptions import InterruptionTests
from .lifetime import LifetimeTests
from .limits import LimitTests


class TierStoreTests(ContentTests, ArgumentTests, LimitTests, InterruptionTests, LifetimeTests):
    """What a `TierStore` promises, on asyncio and on trio.

    class TestMine(TierStoreTests):
        takes_limit = False

        def make(self, folder: Path, layout: SegmentLayout, limit_bytes: int | None) -> TierStore:
            return MyStore(folder, layout)
    """


__all__ = ["TierStoreTests"]
