"""How long calls that cannot do without the tier store wait while it is down."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from .log import event

_PAUSE_S = 0.1
"""Between attempts. A store that has failed is not asked before it answers a probe, so attempts are cheap."""

_TELL_S = 10.0
"""Between log lines."""


class Patience:
    """Of one arena. Each outage has the whole of it, however many calls wait in turn.

    Args:
        seconds: from the first failure that a call of an outage waits for.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._begun: float | None = None
        self._told = 0.0
        self._given_up = threading.Event()
        self._here = threading.local()

    def wait(self, error: Exception | None) -> bool:
        """The store has failed a call: pause. Returns whether to try again."""
        if getattr(self._here, "suspended", False):
            return False
        now = monotonic()
        if self._begun is None:
            self._begun, self._told = now, now - _TELL_S
        waited = now - self._begun
        if waited >= self.seconds:
            return False
        if now - self._told >= _TELL_S:
            self._told = now
            event(logging.WARNING, "tier-wait", waited_s=round(waited), patience_s=self.seconds, error=error)
        return not self._given_up.wait(min(_PAUSE_S, self.seconds - waited))

    def worked(self) -> None:
        """The store has answered: the outage is over."""
        self._begun = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """No call of this thread waits: there is something else to do if the store fails."""
        self._here.suspended = True
        try:
            yield
        finally:
            self._here.suspended = False

    def give_up(self) -> None:
        """Calls that wait now fail, and no later one waits."""
        self._given_up.set()
