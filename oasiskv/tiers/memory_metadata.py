"""Who has what, in this process's memory: for one process and for tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from ..errors import StateError
from .abc import Lease, MetadataStore
from .checks import check_ttl
from .location import Location
from .segments import SegmentKey

_SWEEP_EVERY_S = 60.0


@dataclass
class _Grant:
    holder: str
    counter: int
    ends_at: float


class MemoryMetadata(MetadataStore):
    """Dicts; `memory:`.

    The epoch of its fences is the wall clock when it was made, in nanoseconds, so that a process that starts anew hands out
    larger ones.

    Args:
        clock: seconds from any beginning, which never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._epoch = time.time_ns()
        self._counter = 0
        self._owners: dict[SegmentKey, dict[str, float]] = {}
        self._grants: dict[str, _Grant] = {}
        self._handoffs: dict[str, tuple[bytes, float]] = {}
        self._swept_at = clock()
        self._closed = False

    @classmethod
    def at(cls, location: Location) -> Self:
        location.finish()
        return cls()

    async def publish(self, keys: Sequence[SegmentKey], owner: str, ttl_s: float) -> None:
        now = self._begin(ttl_s)
        for key in keys:
            owners = self._owners.setdefault(key, {})
            owners.pop(owner, None)  # a dict keeps the place of a key that is set again, and this one is the newest now
            owners[owner] = now + ttl_s

    async def locate(self, keys: Sequence[SegmentKey]) -> list[list[str]]:
        now = self._begin()
        return [[owner for owner, end in reversed(self._owners.get(key, {}).items()) if end > now] for key in keys]

    async def withdraw(self, keys: Sequence[SegmentKey], owner: str) -> None:
        self._begin()
        for key in keys:
            owners = self._owners.get(key, {})
            owners.pop(owner, None)
            if not owners:
                self._owners.pop(key, None)

    async def acquire(self, name: str, holder: str, ttl_s: float) -> Lease | None:
        now = self._begin(ttl_s)
        grant = self._grants.get(name)
        if grant is None or grant.ends_at <= now:
            self._counter += 1
            grant = self._grants[name] = _Grant(holder, self._counter, now)
        elif grant.holder != holder:
            return None
        grant.ends_at = now + ttl_s
        return Lease(name, holder, (self._epoch, grant.counter), ttl_s)

    async def release(self, lease: Lease) -> bool:
        now = self._begin()
        grant = self._grants.get(lease.name)
        if grant is None or lease.fence != (self._epoch, grant.counter):
            return False
        del self._grants[lease.name]
        return grant.ends_at > now

    async def put(self, name: str, value: bytes, ttl_s: float) -> None:
        now = self._begin(ttl_s)
        self._handoffs[name] = (bytes(value), now + ttl_s)

    async def claim(self, name: str) -> bytes | None:
        now = self._begin()
        value, end = self._handoffs.pop(name, (b"", now))
        return value if end > now else None

    async def aclose(self) -> None:
        self._closed = True
        self._owners.clear()
        self._grants.clear()
        self._handoffs.clear()

    def _begin(self, ttl_s: float | None = None) -> float:
        """Check that a call may be made; returns the time."""
        if self._closed:
            raise StateError("the memory metadata store is closed; make a new one")
        if ttl_s is not None:
            check_ttl(ttl_s)
        now = self._clock()
        if now - self._swept_at > _SWEEP_EVERY_S:
            self._swept_at = now
            self._sweep(now)
        return now

    def _sweep(self, now: float) -> None:
        """Forget what has run out, which is seldom asked for again."""
        for key, owners in list(self._owners.items()):
            left = {owner: end for owner, end in owners.items() if end > now}
            if left:
                self._owners[key] = left
            else:
                del self._owners[key]
        self._grants = {name: grant for name, grant in self._grants.items() if grant.ends_at > now}
        self._handoffs = {name: entry for name, entry in self._handoffs.items() if entry[1] > now}
