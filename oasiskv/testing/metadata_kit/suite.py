"""What the parts of the kit share: how a suite makes its store, times to live, and leases that must be free."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from ...tiers import Lease, MetadataStore
from ..backends import OnEachBackend

LONG_S = 600.0
"""A time to live that no test sees the end of."""


class MetadataSuite(OnEachBackend):
    """Base of the kit's parts. A suite overrides `make`."""

    shared = False
    """Whether stores that are made for the same folder see each other while both are open."""

    short_s = 0.2
    """A time to live that is waited for. Make it longer for a store whose clock is coarse."""

    patience_s = 60.0
    """How long a test may take. A store that hangs is noticed after that."""

    closing_s = 5.0
    """How long closing may take while calls are under way."""

    def make(self, folder: Path) -> MetadataStore:
        """A store that is not open yet.

        Args:
            folder: an empty folder at first, of this test's own. Stores made for the same folder are the same store, opened
                again or twice; one that keeps nothing in files takes its name.
        """
        raise NotImplementedError("a conformance suite overrides make() to return a store that is not open")

    @asynccontextmanager
    async def opened(self, folder: Path) -> AsyncIterator[MetadataStore]:
        """An open store, for a test that may not take longer than `patience_s`."""
        with anyio.fail_after(self.patience_s):
            async with self.make(folder) as store:
                yield store

    async def run_out(self) -> None:
        """Wait until what lives for `short_s` lives no more."""
        await anyio.sleep(1.25 * self.short_s)

    async def lease(self, store: MetadataStore, name: str, holder: str, ttl_s: float = LONG_S) -> Lease:
        """Take a lease that must be free, or this holder's."""
        lease = await store.acquire(name, holder, ttl_s)
        assert lease is not None, f"{holder} does not get {name}, which nobody else has"
        assert (lease.name, lease.holder) == (name, holder)
        return lease
