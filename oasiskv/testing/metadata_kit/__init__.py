"""The conformance kit of metadata stores: subclass `MetadataStoreTests` and say how your store is made."""

import pytest

_PARTS = ("callers", "directory", "handoffs", "leases", "lifetime", "suite")

# Without it, a test of an installed package fails without saying what it compared. It must come before what it is for.
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from .callers import CallerTests  # noqa: E402 - see above
from .directory import DirectoryTests  # noqa: E402 - see above
from .handoffs import HandoffTests  # noqa: E402 - see above
from .leases import LeaseTests  # noqa: E402 - see above
from .lifetime import LifetimeTests  # noqa: E402 - see above


class MetadataStoreTests(DirectoryTests, LeaseTests, HandoffTests, CallerTests, LifetimeTests):
    """What a `MetadataStore` promises, on asyncio and on trio.

    class TestMine(MetadataStoreTests):
        shared = True

        def make(self, folder: Path) -> MetadataStore:
            return MyStore(folder)
    """


__all__ = ["MetadataStoreTests"]
