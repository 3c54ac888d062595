"""Counts what goes through a tier store, and how long it takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from ..errors import TierUnavailable
from ..log import event
from ..meters import POWERS_OF_TWO, SECONDS, Distribution, Histogram, Tally
from ..trace import Trace, now
from .abc import TierStore
from .segments import Outcome, Read, SegmentKey
from .wrapping import WrappedStore

Call = Literal["store", "load", "contains", "delete"]
CALLS: tuple[Call, ...] = ("store", "load", "contains", "delete")
"""The calls of a tier store that are counted, each on its own."""


@dataclass(frozen=True)
class CallStats:
    """One kind of call of one tier, since its store was made.

    Attributes:
        operations: calls that have ended, failed ones included.
        entries: objects, reads or keys in these calls.
        bytes: stored by calls that returned, or loaded by reads that hit.
        hits, misses, corrupt: how reads ended; for `contains`, what was there and what was not.
        errors: calls that raised, by the name of the exception; `cancelled` if the caller gave up.
        seconds: how long calls took, failed ones included.
        batch: how many entries they had.
    """

    operations: int
    entries: int
    bytes: int
    hits: int
    misses: int
    corrupt: int
    errors: dict[str, int]
    seconds: Distribution
    batch: Distribution


class _Meter:
    def __init__(self) -> None:
        self.tally = Tally()
        self.errors = Tally()
        self.seconds = Histogram(SECONDS)
        self.batch = Histogram(POWERS_OF_TWO)

    def read(self) -> CallStats:
        known = self.tally.read()
        totals = {name: known.get(name, 0) for name in ("operations", "entries", "bytes", "hits", "misses", "corrupt")}
        return CallStats(**totals, errors=self.errors.read(), seconds=self.seconds.read(), batch=self.batch.read())


class MeteredStore(WrappedStore):
    """A store that behaves as `inner` does, and counts. It opens and closes `inner`.

    Args:
        inner: not open yet.
        name: of the tier, for labels and logs; give every store of a process its own.
        trace: takes a slice for each `store` and `load`, if there is one.
    """

    def __init__(self, inner: TierStore, name: str, trace: Trace | None = None) -> None:
        super().__init__(inner)
        self.name = name
        self._trace = trace
        self._meters = {call: _Meter() for call in CALLS}
        self._down = False

    def stats(self, call: Call) -> CallStats:
        """What was counted for one kind of call. May be called from any thread."""
        return self._meters[call].read()

    async def store(self, objects: Sequence[tuple[SegmentKey, memoryview]]) -> None:
        with self._timed("store", len(objects)) as done:
            await self.inner.store(objects)
            done["bytes"] = sum(data.nbytes for _, data in objects)

    async def load(self, reads: Sequence[Read]) -> list[Outcome]:
        with self._timed("load", len(reads)) as done:
            outcomes = await self.inner.load(reads)
            self._note(reads, outcomes, done)
        return outcomes

    def _note(self, reads: Sequence[Read], outcomes: list[Outcome], done: dict[str, int]) -> None:
        hits = [read.into.nbytes for read, outcome in zip(reads, outcomes, strict=True) if outcome is Outcome.HIT]
        corrupt = outcomes.count(Outcome.CORRUPT)
        done.update(bytes=sum(hits), hits=len(hits), misses=outcomes.count(Outcome.MISS), corrupt=corrupt)
        if corrupt:
            event(logging.WARNING, "tier-corrupt", tier=self.name, reads=corrupt)

    async def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        with self._timed("contains", len(keys)) as done:
            there = await self.inner.contains(keys)
            done.update(hits=sum(there), misses=len(there) - sum(there))
        return there

    async def delete(self, keys: Sequence[SegmentKey]) -> None:
        with self._timed("delete", len(keys)):
            await self.inner.delete(keys)

    @property
    def load_blocking(self) -> Callable[[Sequence[Read]], list[Outcome]] | None:
        inner = self.inner.load_blocking
        if inner is None:
            return None

        def load(reads: Sequence[Read]) -> list[Outcome]:
            with self._timed("load", len(reads)) as done:
                outcomes = inner(reads)
                self._note(reads, outcomes, done)
            return outcomes

        return load

    @contextmanager
    def _timed(self, call: Call, entries: int) -> Iterator[dict[str, int]]:
        meter = self._meters[call]
        done: dict[str, int] = {}
        failure: dict[str, str] = {}
        start = now()
        try:
            yield done
        except BaseException as error:
            name = type(error).__name__ if isinstance(error, Exception) else "cancelled"
            meter.errors.add(**{name: 1})
            failure = {"error": name}
            if isinstance(error, TierUnavailable):
                self._say_down(error)
            raise
        else:
            self._say_up()
        finally:
            meter.seconds.record((now() - start) * 1e-9)
            meter.batch.record(entries)
            meter.tally.add(operations=1, entries=entries, **done)
            if self._trace is not None and call in ("store", "load"):
                self._trace.add_overlapping(f"tier {self.name}", call, start, entries=entries, **done, **failure)

    def _say_down(self, error: TierUnavailable) -> None:
        """Once, not for every call of an outage."""
        if not self._down:
            self._down = True
            event(logging.WARNING, "tier-down", tier=self.name, error=error)

    def _say_up(self) -> None:
        if self._down:
            self._down = False
            event(logging.INFO, "tier-up", tier=self.name)
