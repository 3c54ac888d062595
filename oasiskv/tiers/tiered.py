"""`TieredStore`: several tier stores as one, from fast to slow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Self, TypeVar

import anyio

from ..errors import ConfigError, StateError, TierError, TierFull, TierUnavailable
from .abc import TierStore
from .background import Background
from .checks import check_objects, check_reads
from .health import Health
from .location import Location
from .promotion import Promotion
from .segments import Outcome, Read, SegmentKey, SegmentLayout, TierTraits
from .write_behind import WriteBehind

T = TypeVar("T")
U = TypeVar("U")

_DRAIN_S = 2.0
"""How long closing waits for what is on its way."""


class TieredStore(TierStore):
    """Stores into the fastest tier that takes it and writes the lower ones behind; reads the fastest that has it.

    What `store` has taken is never lost by what the tiers above the last one evict: copies wait in memory until every lower
    tier has them, and are read there. If a lower tier is away for so long that the copies reach `queue_bytes`, `store` raises
    what that tier fails with; if it is only slow, `store` waits. What the last tier evicts is gone. What waits when the process
    dies is only where it was stored first.

    A tier that is unavailable, or in which a call was cancelled after 0.02 s, is passed over by reads until a probe in the
    background finds it alive, 0.1 s later or 0.2 s and so on up to 5 s; what only it has is a miss meanwhile.

    Args:
        tiers: fast to slow, all of one layout, not open yet. This store opens and closes them.
        promote: whether segments that a read found below the fastest tier are copied into it, in the background.
        queue_bytes: of memory for segments that are not in all lower tiers yet. A larger call goes alone.
    """

    def __init__(self, tiers: Sequence[TierStore], *, promote: bool = True, queue_bytes: int = 256 << 20) -> None:
        if not tiers or any(tier.layout != tiers[0].layout for tier in tiers):
            raise ConfigError(f"tiers have the layouts {[tier.layout for tier in tiers]}; there must be one, the same for all")
        if queue_bytes < 1:
            raise ConfigError(f"queue_bytes is {queue_bytes}; it must be a positive number of bytes")
        super().__init__(tiers[0].layout)
        self._tiers = list(tiers)
        self._promote = promote
        self._queue_bytes = queue_bytes
        self._closed = False
        self._dropped = 0
        self._stack = AsyncExitStack()
        # Made by `open`, since events belong to the loop that they are made in.
        self._below: WriteBehind
        self._lifts: Promotion
        self._health: list[Health]
        self._tasks: Background | None = None

    @classmethod
    def at(cls, location: Location, layout: SegmentLayout) -> Self:
        """Always raises `ConfigError`: it takes several locations, which `oasiskv.tiers.opening.store_at` does."""
        raise ConfigError(f"tier {location.text!r} is no single location; give a list of locations, fast to slow")

    @property
    def traits(self) -> TierTraits:
        last = self._tiers[-1].traits
        alignment = max(tier.traits.alignment_bytes for tier in self._tiers)
        return TierTraits(last.persistent, last.shared, None, alignment, any(tier.traits.lossy for tier in self._tiers))

    @property
    def used_bytes(self) -> int:
        """Of all tiers together: a segment counts in each that has it."""
        return sum(tier.used_bytes for tier in self._tiers)

    @property
    def limit_bytes(self) -> int | None:
        limits = [tier.limit_bytes for tier in self._tiers]
        return None if None in limits else sum(limit for limit in limits if limit is not None)

    @property
    def capacity_bytes(self) -> int | None:
        return self._tiers[-1].capacity_bytes  # which gets everything

    def variants(self, data: memoryview) -> list[memoryview]:
        found = [data]
        for tier in reversed(self._tiers):  # what is promoted goes through the tiers above again
            for given in list(found):
                found += [new for new in tier.variants(given) if new not in found]
        return found

    @property
    def dropped(self) -> int:
        """Segments that were still on their way when the store was closed."""
        return self._dropped

    @property
    def promoted(self) -> int:
        """Copies that were made upwards."""
        return self._lifts.copies

    def register_buffer(self, region: memoryview) -> None:
        for tier in self._tiers:
            tier.register_buffer(region)

    def unsettled(self, buffer: memoryview) -> bool:
        return any(tier.unsettled(buffer) for tier in self._tiers)

    async def open(self) -> None:
        async with AsyncExitStack() as stack:
            for tier in self._tiers:
                await stack.enter_async_context(tier)
            self._below = WriteBehind(self._tiers[1:], self._queue_bytes)
            self._lifts = Promotion(self.layout.segment_bytes)
            self._health = [Health(tier) for tier in self._tiers]
            self._stack = stack.pop_all()
        self._tasks = Background()
        writers = [partial(self._below.run, number) for number in range(len(self._tiers) - 1)]
        self._tasks.start([*writers, self._lifts.run, *(health.run for health in self._health)])

    async def aclose(self) -> None:
        if self._closed or self._tasks is None:
            self._closed = True
            return
        self._closed = True
        try:
            # A tier that fails now is not waited for; `dropped` says what that costs.
            with anyio.move_on_after(_DRAIN_S), suppress(TierError):
                await self._below.flush()
        finally:
            self._dropped = len(self._below)
            self._below.close()
            try:
                await self._tasks.stop()
            finally:
                await self._stack.aclose()

    async def flush(self) -> None:
        """Wait until every tier has what was stored. Raises `TierUnavailable` or `TierFull` if one fails, which is tried again
        all the same."""
        self._check_open()
        await self._below.flush()

    async def store(self, objects: Sequence[tuple[SegmentKey, memoryview]]) -> None:
        self._check_open()
        check_objects(objects, self.layout, self.traits)
        count = sum(data.nbytes for _, data in objects) if len(self._tiers) > 1 else 0
        await self._below.reserve(count)
        try:
            taken = await self._store_first(objects)
            self._check_open()  # else nobody would write it behind
            for key, data in objects:
                if taken + 1 < len(self._tiers) and self._below.add(key, data, taken):
                    count -= data.nbytes
        finally:
            self._below.release(count)

    async def _store_first(self, objects: Sequence[tuple[SegmentKey, memoryview]]) -> int:
        """The number of the first tier that takes them."""
        errors: list[TierError] = []
        for number, tier in enumerate(self._tiers):
            try:
                for part in _parts(objects, tier):
                    await tier.store(part)
                return number
            except (TierFull, TierUnavailable) as error:
                errors.append(error)
        raise next((error for error in errors if isinstance(error, TierUnavailable)), errors[-1])

    async def load(self, reads: Sequence[Read]) -> list[Outcome]:
        self._check_open()
        check_reads(reads, self.layout, self.traits)
        outcomes = [Outcome.MISS] * len(reads)
        wanted: defaultdict[SegmentKey, list[TierStore]] = defaultdict(list)  # the tiers to copy it to
        answers = 0
        for number in range(len(self._tiers)):
            left = [place for place, outcome in enumerate(outcomes) if outcome is not Outcome.HIT]
            if left:
                answers += await self._load_from(number, reads, left, outcomes, wanted)
                if not number:
                    self._read_below(reads, left, outcomes)
        self._check_answers(outcomes.count(Outcome.HIT) < len(reads), answers)
        return outcomes

    async def _load_from(
        self,
        number: int,
        reads: Sequence[Read],
        left: Sequence[int],
        outcomes: list[Outcome],
        wanted: dict[SegmentKey, list[TierStore]],
    ) -> bool:
        """Whether a tier has answered."""
        tier = self._tiers[number]
        asked = [reads[place] for place in left]
        answer = await self._ask(number, asked[0].key, asked, tier.load)
        if any(tier.unsettled(read.into) for read in asked):
            raise TierUnavailable(f"{type(tier).__name__} may still write to buffers of this call; ask `unsettled`")
        for place, read, outcome in zip(left, asked, answer or [], strict=False):
            tiers = wanted[read.key]
            if outcome is Outcome.HIT:
                self._lifts.ask(read.key, tier, tiers)
            elif (outcome is Outcome.CORRUPT or (self._promote and not number)) and tier not in tiers:
                tiers.append(tier)
            if outcome is not Outcome.MISS:  # damage above is told of, unless it is found below
                outcomes[place] = outcome
        return answer is not None

    def _read_below(self, reads: Sequence[Read], left: Sequence[int], outcomes: list[Outcome]) -> None:
        """Fill from the copies that are on their way down."""
        for place in left:
            read = reads[place]
            data = self._below.get(read.key)
            end = read.offset + read.into.nbytes
            if outcomes[place] is not Outcome.HIT and data is not None and end <= len(data):
                read.into[:] = memoryview(data)[read.offset : end]
                outcomes[place] = Outcome.HIT

    async def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        self._check_open()
        found = {key for key in keys if self._below.get(key) is not None}
        answers = 0
        for number, tier in enumerate(self._tiers):
            left = [key for key in keys if key not in found]
            if not left:
                break
            answer = await self._ask(number, left[0], left, tier.contains)
            if answer is not None:
                answers += 1
                found |= {key for key, there in zip(left, answer, strict=True) if there}
        self._check_answers(not found.issuperset(keys), answers)
        return [key in found for key in keys]

    async def _ask(
        self, number: int, key: SegmentKey, entries: Sequence[T], call: Callable[[Sequence[T]], Awaitable[list[U]]]
    ) -> list[U] | None:
        """What a tier says, or `None` if it is unavailable."""
        if not self._health[number].well:
            return None
        answer: list[U] = []
        try:
            with self._health[number].watch(key):
                for part in _parts(entries, self._tiers[number]):
                    answer += await call(part)
        except TierUnavailable:
            return None
        return answer

    def _check_answers(self, left: bool, answers: int) -> None:
        if left and not answers:
            raise TierUnavailable(f"none of the {len(self._tiers)} tiers is available; try again in some seconds")

    async def delete(self, keys: Sequence[SegmentKey]) -> None:
        self._check_open()
        failure: TierUnavailable | None = None
        try:
            await self._lifts.bar(keys)
            await self._below.remove(keys)
            for tier in self._tiers:
                try:
                    for part in _parts(keys, tier):
                        await tier.delete(part)
                except TierUnavailable as error:
                    failure = error
        finally:
            self._lifts.unbar(keys)
        if failure is not None:
            raise failure

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the tiered store is closed; make a new one")
        if self._tasks is None:
            raise StateError("the tiered store is not open; use `async with`")


def _parts(entries: Sequence[T], tier: TierStore) -> Iterator[Sequence[T]]:
    size = tier.traits.max_batch or len(entries) or 1
    return (entries[first : first + size] for first in range(0, len(entries), size))
