"""Whether one of several tiers is worth asking."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from ..errors import TierUnavailable
from .breaker import FIRST_BACK_OFF_S, LAST_BACK_OFF_S

_PATIENCE_S = 0.25
"""A call that is cancelled earlier says nothing about the tier."""


class Health:
    """Passes a tier over for a time that doubles while it fails, from 0.1 s to 5 s."""

    def __init__(self) -> None:
        self._back_off_s = FIRST_BACK_OFF_S
        self._until = 0.0

    @property
    def well(self) -> bool:
        """Whether to ask it now."""
        return time.monotonic() >= self._until

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around a call: what it raises is taken into account."""
        begin = time.monotonic()
        try:
            yield
        except TierUnavailable:
            self._fail()
            raise
        except anyio.get_cancelled_exc_class():
            if time.monotonic() - begin > _PATIENCE_S:
                self._fail()
            raise
        self._back_off_s = FIRST_BACK_OFF_S

    def _fail(self) -> None:
        if self.well:  # else this call began before the last failure
            self._until = time.monotonic() + self._back_off_s
            self._back_off_s = min(2 * self._back_off_s, LAST_BACK_OFF_S)
