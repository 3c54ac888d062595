"""The conformance kit of tier stores: subclass `TierStoreTests` and say how your store is made."""

import pytest

_PARTS = ("arguments", "contents", "interruptions", "lifetime", "limits", "suite")

# Without it, a test of an installed package fails without saying what it compared. It must come before what it is for.
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from .arguments import ArgumentTests  # noqa: E402 - see above
from .contents import ContentTests  # noqa: E402 - see above
from .interruptions import InterruptionTests  # noqa: E402 - see above
from .lifetime import LifetimeTests  # noqa: E402 - see above
from .limits import LimitTests  # noqa: E402 - see above


class TierStoreTests(ContentTests, ArgumentTests, LimitTests, InterruptionTests, LifetimeTests):
    """What a `TierStore` promises, on asyncio and on trio.

    class TestMine(TierStoreTests):
        takes_limit = False

        def make(self, folder: Path, layout: SegmentLayout, limit_bytes: int | None) -> TierStore:
            return MyStore(folder, layout)
    """


__all__ = ["TierStoreTests"]
