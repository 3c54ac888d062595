"""Which call of a tier store goes wrong, and how."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from ..errors import ConfigError


class FaultKind(Enum):
    """How a call goes wrong."""

    UNAVAILABLE = "unavailable"
    """Raises `TierUnavailable`. Entries of the batch before `Fault.entry` are done."""
    FULL = "full"
    """Raises `TierFull`. Entries of the batch before `Fault.entry` are stored."""
    SHORT = "short"
    """A load that writes the first half of a buffer and says `HIT`: it is the caller's checksum that must notice."""
    FLIP = "flip"
    """A load that says `HIT` with one bit of a buffer changed: it is the caller's checksum that must notice."""
    HANG = "hang"
    """Never ends by itself: until it is cancelled, or the store is closed, which raises `StateError`."""
    SLOW = "slow"
    """Waits `Fault.delay_s`, and is then done."""
    LATE = "late"
    """A load that gives up with `TierUnavailable` after half of `Fault.delay_s`, while its buffers are written after all of it,
    also if it is cancelled. Until then `unsettled` is true."""


_OPERATIONS: dict[FaultKind, tuple[str, ...]] = {
    FaultKind.FULL: ("store",),
    FaultKind.SHORT: ("load",),
    FaultKind.FLIP: ("load",),
    FaultKind.LATE: ("load",),
}


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one call, or with all from it on.

    Attributes:
        kind: how.
        operation: `store`, `load`, `contains` or `delete`.
        call: which call of the operation, counted from 1.
        onwards: whether all later calls go wrong in the same way.
        entry: which entry of the batch it strikes, counted from 0; the last one if there are fewer.
        delay_s: how long `SLOW` and `LATE` take.

    Raises:
        ConfigError: a fault that cannot be.
    """

    kind: FaultKind
    operation: str = "load"
    call: int = 1
    onwards: bool = False
    entry: int = 0
    delay_s: float = 0.05

    def __post_init__(self) -> None:
        possible = _OPERATIONS.get(self.kind, ("store", "load", "contains", "delete"))
        if self.operation not in possible:
            raise ConfigError(f"Fault.operation is {self.operation!r}; for {self.kind.name} it must be {' or '.join(possible)}")
        if self.call < 1:
            raise ConfigError(f"Fault.call is {self.call!r}; calls are counted from 1")
        if self.entry < 0:
            raise ConfigError(f"Fault.entry is {self.entry!r}; entries are counted from 0")
        if not self.delay_s >= 0:
            raise ConfigError(f"Fault.delay_s is {self.delay_s!r}; it must be at least 0")


class FaultPlan:
    """Faults in store. Of several for one call, the one that was named first strikes.

    Attributes:
        calls: how many calls of each operation there were.
        struck: the faults that have struck, in order; one that goes on comes once per call.
    """

    def __init__(self, *faults: Fault) -> None:
        self._faults = list(faults)
        self.calls: Counter[str] = Counter()
        self.struck: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Plan another one. Its `call` counts from the beginning, not from now."""
        self._faults.append(fault)

    def clear(self) -> None:
        """From now on nothing goes wrong. Calls are counted on."""
        self._faults.clear()

    def next(self, operation: str) -> Fault | None:
        """Count a call, and say how it goes wrong; `None` if it does not."""
        self.calls[operation] += 1
        number = self.calls[operation]
        for fault in self._faults:
            if fault.operation == operation and (number == fault.call or (fault.onwards and number > fault.call)):
                self.struck.append(fault)
                return fault
        return None
