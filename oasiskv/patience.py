"""How long a call that cannot do without the tier store waits while the store is down."""

from __future__ import annotations

import logging
import threading
from time import monotonic

from .log import event

_PAUSE_S = 0.1
"""Between attempts. A store that has failed is not asked before it answers a probe, so attempts are cheap."""

_TELL_S = 10.0
"""Between log lines."""


class Patience:
    """Of one arena.

    Args:
        seconds: that a call waits at most, from its first failure on.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.given_up = threading.Event()

    def give_up(self) -> None:
        """Calls that wait now fail, and no later one waits."""
        self.given_up.set()


class Outage:
    """What one call has waited so far."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._begun: float | None = None
        self._told = 0.0

    def wait(self, error: Exception | None) -> bool:
        """The store has failed the call: pause. Returns whether to try again."""
        now = monotonic()
        if self._begun is None:
            self._begun, self._told = now, now - _TELL_S
        left = self._begun + self._patience.seconds - now
        if left <= 0:
            return False
        if now - self._told >= _TELL_S:
            self._told = now
            event(
                logging.WARNING, "tier-wait", waited_s=round(now - self._begun), patience_s=self._patience.seconds, error=error
            )
        return not self._patience.given_up.wait(min(_PAUSE_S, left))
