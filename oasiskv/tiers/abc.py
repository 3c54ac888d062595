"""The contracts of the stores below the arena: one holds bytes of segments, one says who has them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from .location import Location
from .segments import Outcome, Read, SegmentKey, SegmentLayout, TierTraits


class _Resource(ABC):
    """Opened by `async with`, closed when it is left, or by `aclose`. The same object is not opened twice."""

    async def open(self) -> None:
        """Connect, read what is there, start threads. Raises `TierUnavailable`, `LayoutMismatch`, `ConfigError`."""
        return

    @abstractmethod
    async def aclose(self) -> None:
        """End what runs and give everything back, within a few seconds even if a peer is silent, and in a scope that is
        cancelled too. Idempotent; calls that come later, or are still under way, raise `StateError`."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class TierStore(_Resource):
    """Holds segments: immutable objects of whole slots, which are written once and read in ranges.

    It knows no attention, no GPU and no policy. Its caller knows what it asked to be stored and checks what it reads.

    Note for implementers:

    - Runs under asyncio and trio alike: use anyio, and `oasiskv.tiers.threads.in_thread` around calls that block, so that no
      thread outlives the call that lent it a buffer. `open` and `aclose` may be called from different tasks.
    - Buffers belong to the caller. When `store` or `load` has returned, raised or been cancelled, the store neither reads nor
      writes them any more. Where a transport cannot promise that, `unsettled` must say so for as long as it lasts.
    - Calls may overlap. `store` of a key that is there already is no error and changes nothing.
    - Foreign exceptions are mapped where they arise: what may pass is `TierUnavailable`, `TierFull` and `StateError`.
    - Arguments that break this contract raise `InputError` before anything is moved; `check_objects` and `check_reads` in
      `oasiskv.tiers.checks` do that.
    """

    def __init__(self, layout: SegmentLayout) -> None:
        self.layout = layout

    @classmethod
    @abstractmethod
    def at(cls, location: Location, layout: SegmentLayout) -> Self:
        """A store from its configuration, not open yet. Raises `ConfigError` for options that it does not know."""

    @property
    @abstractmethod
    def traits(self) -> TierTraits:
        """What the store is like."""

    @abstractmethod
    async def store(self, objects: Sequence[tuple[SegmentKey, memoryview]]) -> None:
        """Take segments, each a multiple of `layout.slot_bytes` long, and return when they can be read.

        A store with a size limit makes room by forgetting segments that were not used for longest; storing again and loading
        are use.

        Raises:
            TierFull: it cannot make room. Those before the first that did not fit may be there; `contains` tells.
            TierUnavailable: the medium or the peer fails. Any part of the objects may be there, each whole or not at all.
        """

    @abstractmethod
    async def load(self, reads: Sequence[Read]) -> list[Outcome]:
        """Fill the buffers, and say of each read how it ended.

        Offsets and lengths are multiples of `layout.slot_bytes`. A range that goes beyond the object is a `MISS`.

        Raises:
            TierUnavailable: the medium or the peer fails; no buffer is to be used.
        """

    @abstractmethod
    async def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        """Which segments could be read now, as far as the store knows without reading them. Raises `TierUnavailable`."""

    @abstractmethod
    async def delete(self, keys: Sequence[SegmentKey]) -> None:
        """Forget segments; those that are not there are no error. Raises `TierUnavailable`."""

    def register_buffer(self, region: memoryview) -> None:
        """Memory that buffers of later calls will lie in, for transports that want to know it beforehand. Called once per
        region, between `open` and the first call."""

    def unsettled(self, buffer: memoryview) -> bool:
        """Whether a call that has ended may still touch this buffer, which no one else may use until this turns false. Never
        blocks, may be called from any thread."""
        return False

    @property
    def load_blocking(self) -> Callable[[Sequence[Read]], list[Outcome]] | None:
        """`load` in the calling thread, for any number of threads at once; `None` if the store cannot do that. An optional
        speed-up for media that answer in microseconds, and do not hang: the caller can neither cancel it nor give it up."""
        return None

    @property
    def used_bytes(self) -> int:
        """What the objects take in this store, as its limit counts; 0 if it does not know."""
        return 0

    @property
    def limit_bytes(self) -> int | None:
        """What they may take; `None` without a limit."""
        return None

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes of segments, as callers count them, that it holds without forgetting one; `None` without a limit."""
        return self.limit_bytes

    def variants(self, data: memoryview) -> list[memoryview]:
        """What a `HIT` may give for slots that were stored as `data`: the same, but for stores that lose precision. Callers
        compare what they read with all of these. Slow for such stores, and may be called from any thread."""
        return [data]


@dataclass(frozen=True)
class Lease:
    """The right to a name for a time. Whoever acts on it shows its fence, and the owner of what is acted on refuses fences
    that are smaller than one it has seen: an epoch that grows when the store starts anew, and a counter within it.

    Attributes:
        remaining_s: seconds that were left when this was made; never an absolute time, since clocks differ.
    """

    name: str
    holder: str
    fence: tuple[int, int]
    remaining_s: float


class MetadataStore(_Resource):
    """Says who has which segment, and who may do what. A hint, never the truth: the holder's own answer decides.

    Runs under asyncio and trio alike, as tier stores do. Calls may overlap. A `ttl_s` that is not positive and finite raises
    `InputError`; a closed store raises `StateError`.
    """

    @classmethod
    @abstractmethod
    def at(cls, location: Location) -> Self:
        """A store from its configuration, not open yet. Raises `ConfigError` for options that it does not know."""

    @abstractmethod
    async def publish(self, keys: Sequence[SegmentKey], owner: str, ttl_s: float) -> None:
        """Say that `owner` has these segments, for `ttl_s` seconds; again, to prolong. Raises `TierUnavailable`."""

    @abstractmethod
    async def locate(self, keys: Sequence[SegmentKey]) -> list[list[str]]:
        """Who has each segment, most recently published first. Raises `TierUnavailable`."""

    @abstractmethod
    async def withdraw(self, keys: Sequence[SegmentKey], owner: str) -> None:
        """Take back what `owner` has published; what it has not is no error. Raises `TierUnavailable`."""

    @abstractmethod
    async def acquire(self, name: str, holder: str, ttl_s: float) -> Lease | None:
        """Take a lease, or `None` while somebody else has it. For its holder this is a renewal, with the same fence. A lease
        that was given up or has run out goes to the next with a larger fence. Raises `TierUnavailable`."""

    @abstractmethod
    async def release(self, lease: Lease) -> bool:
        """Give a lease up; false if it had been lost before. Raises `TierUnavailable`."""

    @abstractmethod
    async def put(self, name: str, value: bytes, ttl_s: float) -> None:
        """Leave a handoff for whoever claims it first, replacing one of that name. Raises `TierUnavailable`."""

    @abstractmethod
    async def claim(self, name: str) -> bytes | None:
        """Take a handoff away: one of many racing callers gets it, the others `None`. Raises `TierUnavailable`."""
