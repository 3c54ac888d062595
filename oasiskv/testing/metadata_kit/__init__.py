"""The conformance kit of metadata stores: subclass `MetadataStoreTests` and say how your store is made."""

from .callers import CallerTests
from .directory import DirectoryTests
from .handoffs import HandoffTests
from .leases import LeaseTests
from .lifetime import LifetimeTests


class MetadataStoreTests(DirectoryTests, LeaseTests, HandoffTests, CallerTests, LifetimeTests):
    """What a `MetadataStore` promises, on asyncio and on trio.

    class TestMine(MetadataStoreTests):
        shared = True

        def make(self, folder: Path) -> MetadataStore:
            return MyStore(folder)
    """


__all__ = ["MetadataStoreTests"]
