"""Keeps callers from waiting for a store that does not answer."""

from __future__ import annotations

import threading

FIRST_BACK_OFF_S = 0.1
LAST_BACK_OFF_S = 5.0


class Breaker:
    """Open while a store is taken for dead. Whoever opens it starts a probe, so that there is one at a time.

    The back-off is how long a probe waits. It doubles with every probe, and begins anew only when a caller has got an answer:
    a store that answers probes and then fails its callers is not asked every 0.1 seconds. May be used from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = False
        self._back_off_s = FIRST_BACK_OFF_S
        self._openings = 0

    @property
    def is_open(self) -> bool:
        """Whether callers are refused."""
        return self._open

    @property
    def openings(self) -> int:
        """How often it has opened."""
        return self._openings

    def trip(self) -> bool:
        """Open it. True for the caller that has to probe: it was closed."""
        with self._lock:
            opened, self._open = not self._open, True
            self._openings += opened
            return opened

    def back_off_s(self) -> float:
        """How long to wait before the next probe, in seconds; twice as long the next time, up to 5."""
        with self._lock:
            wait_s = self._back_off_s
            self._back_off_s = min(2 * wait_s, LAST_BACK_OFF_S)
            return wait_s

    def close(self) -> None:
        """A probe was answered."""
        with self._lock:
            self._open = False

    def answered(self) -> None:
        """A caller was answered."""
        with self._lock:
            if not self._open:  # an answer from before it opened says nothing
                self._back_off_s = FIRST_BACK_OFF_S
