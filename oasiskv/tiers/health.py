"""Whether one of several tiers is worth asking."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from ..errors import TierUnavailable
from .abc import TierStore
from .breaker import Breaker
from .probe import Probe
from .segments import SegmentKey

_PATIENCE_S = 0.02
"""A call that is cancelled earlier says nothing about the tier."""


class Health:
    """Passes a tier over once it has failed, until a probe in the background finds it alive. Made in the loop of its tier."""

    def __init__(self, tier: TierStore) -> None:
        self._breaker = Breaker()
        self._probe = Probe(tier, self._breaker)
        self._failed: SegmentKey | None = None
        self._changed = anyio.Event()

    @property
    def well(self) -> bool:
        """Whether to ask it now."""
        return not self._breaker.is_open

    @contextmanager
    def watch(self, key: SegmentKey) -> Iterator[None]:
        """Around a call, one of whose keys is given: what it raises is taken into account."""
        begin = time.monotonic()
        try:
            yield
        except TierUnavailable:
            self._fail(key)
            raise
        except anyio.get_cancelled_exc_class():
            if time.monotonic() - begin > _PATIENCE_S:
                self._fail(key)
            raise
        self._breaker.answered()

    def _fail(self, key: SegmentKey) -> None:
        if self._breaker.trip():
            self._failed = key
            self._changed.set()

    async def run(self) -> None:
        """Probe when there is need, for ever."""
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            if self._failed is not None:
                await self._probe.run(self._failed)
