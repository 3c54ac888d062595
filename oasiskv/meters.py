"""Counters and histograms without dependencies: cheap to add to, from any thread, and read as a whole."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

POWERS_OF_TWO = tuple(float(1 << power) for power in range(17))
"""Buckets of batch sizes, 1 to 65536."""


def one_two_five(first: int, last: int) -> tuple[float, ...]:
    """Bounds 1, 2, 5 times each power of ten from `10**first` on, up to `10**last`."""
    steps = [float(f"{digit}e{power}") for power in range(first, last) for digit in (1, 2, 5)]
    return (*steps, float(f"1e{last}"))


SECONDS = one_two_five(-5, 2)
"""Buckets of durations, 10 microseconds to 100 seconds."""


class Tally:
    """Totals by name; names appear when they are first added to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, int] = {}

    def add(self, **amounts: int) -> None:
        """Add to totals by name, all at once."""
        totals = self._totals
        with self._lock:
            for name, amount in amounts.items():
                totals[name] = totals.get(name, 0) + amount

    def read(self) -> dict[str, int]:
        """A copy of the totals."""
        with self._lock:
            return dict(self._totals)


@dataclass(frozen=True)
class Distribution:
    """What a histogram held when it was read.

    Attributes:
        bounds: upper bounds of the buckets, inclusive, growing. A last bucket without a bound follows.
        counts: values per bucket, one more than `bounds`.
        total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """Each bound with the number of values up to it; the last bound is infinity."""
        return list(zip((*self.bounds, math.inf), accumulate(self.counts), strict=True))

    def quantile(self, share: float) -> float:
        """The smallest bound that at least this share of the values does not exceed; 0 without values."""
        wanted = share * self.count
        return next((bound for bound, so_far in self.cumulative() if so_far >= wanted), math.inf) if self.count else 0.0


class Histogram:
    """Counts values into buckets.

    Args:
        bounds: upper bounds of the buckets, inclusive, growing.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def record(self, value: float) -> None:
        """Count a value."""
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._total += value

    def read(self) -> Distribution:
        """A copy of what was counted."""
        with self._lock:
            return Distribution(self._bounds, tuple(self._counts), self._total)
