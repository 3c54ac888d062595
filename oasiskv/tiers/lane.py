"""`TierLane`: a tier store for threads that know no event loop, and that must not wait for a store that is dead."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Self, TypeVar

import anyio

from ..errors import InputError, OasisError, StateError, TierUnavailable, WorkerError
from .abc import TierStore
from .breaker import Breaker
from .lane_calls import LaneCalls
from .lane_counters import LaneCounters
from .lane_jobs import Done, LaneJobs
from .lane_thread import LaneThread
from .probe import Probe
from .segments import Outcome, Read, SegmentKey, TierTraits

T = TypeVar("T")


class TierLane:
    """Owns a thread in which a tier store lives; its methods may be called from any other thread.

    A call that finds the store unavailable, or ends too late, opens a *breaker*: until a probe of one slot succeeds, which the
    lane makes in the background after 0.1 s, 0.2 s and so on up to 5 s, calls fail at once. So a dead store costs its callers
    one timeout.

    In a forked child every call but `close` raises `StateError`.

    Args:
        store: not open yet. The lane opens and closes it.
        store_retries: how often what was submitted is tried again after `TierUnavailable`, 0.1 s later, then 0.2 s and so on.
        store_timeout_s: how long a single call of what was submitted may take.
        open_timeout_s: how long the store may take to open.

    Raises:
        TierUnavailable, LayoutMismatch, ConfigError: the store does not open.
    """

    def __init__(
        self, store: TierStore, *, store_retries: int = 4, store_timeout_s: float = 30.0, open_timeout_s: float = 30.0
    ) -> None:
        if store_retries < 0:
            raise InputError(f"store_retries is {store_retries}; it must be 0 or more")
        for name, value in (("store_timeout_s", store_timeout_s), ("open_timeout_s", open_timeout_s)):
            _check_seconds(name, value)
        self._store = store
        self._store_timeout_s = store_timeout_s
        self._breaker = Breaker()
        self._counters = LaneCounters()
        self._lock = threading.Lock()
        self._closing = False
        self._probe = Probe(store, self._breaker)
        self._thread = LaneThread(store, open_timeout_s)
        self._calls = LaneCalls(self._thread)
        self._jobs = LaneJobs(self._thread, self._attempt, store_retries, partial(self._count, retries=1))

    @property
    def forked(self) -> bool:
        """Whether this is a forked child, in which every call but `close` raises `StateError`."""
        return self._thread.forked

    @property
    def traits(self) -> TierTraits:
        """Those of the store."""
        return self._store.traits

    def register_buffer(self, region: memoryview) -> None:
        """Memory that buffers of later calls will lie in; before the first of them. Raises `StateError`, `TierUnavailable`."""

        async def register() -> bool:
            self._store.register_buffer(region)
            return True

        self._check_open()
        self._thread.check_caller()
        try:
            self._calls.run(register, [], self._store_timeout_s)
        except TimeoutError:
            raise _late(self._store_timeout_s) from None

    def load(self, reads: Sequence[Read], timeout_s: float) -> list[Outcome]:
        """Fill the buffers, and say of each read how it ended; of any number of reads, whatever the store takes at once.

        After an error no buffer is to be used. Those for which `unsettled` is true may still be written to, and must be kept
        until it is false; after any return and for any other buffer the lane and the store are done with it.

        Raises:
            TierUnavailable: the store fails, has failed recently, or has not answered in `timeout_s`, after which it gets
                another 0.05 s to let go of the buffers.
            InputError: reads that the store does not take.
            StateError: the lane is closed, or was meanwhile.
            WorkerError: a store that raises what it should not, or answers with anything but an `Outcome` per read.
        """

        async def load() -> list[Outcome]:
            outcomes: list[Outcome] = []
            for part in self._batches(reads):
                outcomes += _answers("load", await self._store.load(part), Outcome, len(part))
            return outcomes

        def load_here(load_blocking: Callable[[Sequence[Read]], list[Outcome]]) -> list[Outcome]:
            outcomes: list[Outcome] = []
            for part in self._batches(reads):
                outcomes += _answers("load_blocking", load_blocking(part), Outcome, len(part))
            return outcomes

        if not reads:
            return []
        here = self._store.load_blocking
        if here is None:
            outcomes = self._wait(load, reads[0].key, [read.into for read in reads], timeout_s)
        else:
            outcomes = self._guarded(partial(load_here, here), reads[0].key)
        found = {outcome: outcomes.count(outcome) for outcome in Outcome}
        self._count(
            hits=found[Outcome.HIT],
            misses=found[Outcome.MISS],
            corrupt=found[Outcome.CORRUPT],
            loaded_bytes=sum(read.into.nbytes for read, outcome in zip(reads, outcomes, strict=True) if outcome is Outcome.HIT),
            reads=len(reads),
        )
        return outcomes

    def contains(self, keys: Sequence[SegmentKey], timeout_s: float) -> list[bool]:
        """Which segments could be read now. Raises as `load` does."""

        async def contains() -> list[bool]:
            return _answers("contains", await self._store.contains(keys), bool, len(keys))

        return self._wait(contains, keys[0], [], timeout_s) if keys else []

    def submit_store(self, objects: Sequence[tuple[SegmentKey, memoryview]], done: Done) -> None:
        """Store segments in the background. Never blocks.

        `done` is called once, in the lane, which it must not hold up: with `None` when all can be read, or with the error that
        ended it: `TierFull`, `InputError`, `StateError` when the lane was closed before, `TierUnavailable` after the last
        retry. Until then the buffers must not change; afterwards they are free, unless they are `unsettled`.

        Raises:
            StateError: the lane is closed.
        """
        begin = perf_counter()

        def ended(error: Exception | None) -> None:
            stored = [] if error else objects
            self._count(
                store_s=perf_counter() - begin,
                stored_segments=len(stored),
                stored_bytes=sum(data.nbytes for _, data in stored),
                failed_stores=int(error is not None),
            )
            done(error)

        self._check_open()
        calls = [(part[0][0], partial(self._store.store, part)) for part in self._batches(objects)]
        self._jobs.submit([key for key, _ in objects], calls, ended)

    def submit_delete(self, keys: Sequence[SegmentKey], done: Done | None = None) -> None:
        """Forget segments in the background, after what was submitted before for the same keys. Never blocks; retried and
        reported as in `submit_store`. Raises `StateError` when the lane is closed."""

        def ended(error: Exception | None) -> None:
            self._count(deleted=0 if error else len(keys), failed_deletes=int(error is not None))
            if done is not None:
                done(error)

        self._check_open()
        calls = [(keys[0], partial(self._store.delete, keys))] if keys else []
        self._jobs.submit(keys, calls, ended)

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until nothing that was submitted is left.

        Raises:
            TierUnavailable: it was not done in time, and goes on.
            WorkerError: a callback has raised.
        """
        self._thread.check_caller()
        if left := self._jobs.wait(timeout_s):
            raise TierUnavailable(f"the tier store has not ended {left} submitted calls in {timeout_s} s")
        self._jobs.raise_failure()

    def unsettled(self, buffer: memoryview) -> bool:
        """Whether a call that has ended may still touch this buffer, which no one else may use until this turns false. Never
        blocks."""
        if self._thread.forked:
            self._thread.check_caller()
        return self._calls.holds(buffer) or self._store.unsettled(buffer)

    def counters(self) -> LaneCounters:
        """A copy of the counters."""
        if self._thread.forked:
            self._thread.check_caller()
        with self._lock:
            return replace(self._counters, breaker_openings=self._breaker.openings)

    def close(self, timeout_s: float = 5.0) -> None:
        """End what was submitted, as far as the store takes it in time, and close the store. Idempotent. What is left, and
        loads under way, end with `StateError`.

        Raises:
            WorkerError: the store does not let go of a call; or a callback has raised.
            TierUnavailable: the store does not close.
        """
        if self._thread.forked:
            return  # the thread is the parent's
        self._thread.check_caller()
        with self._lock:
            self._closing = True
        self._jobs.wait(timeout_s)
        self._thread.stop()
        self._jobs.raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._thread.forked:
            self._thread.check_caller()
        if self._closing:
            raise StateError("the tier lane is closed; make a new one")

    def _batches(self, entries: Sequence[T]) -> Iterator[Sequence[T]]:
        size = self._store.traits.max_batch or len(entries)
        return (entries[first : first + size] for first in range(0, len(entries), size))

    def _count(self, **more: float) -> None:
        with self._lock:
            for name, value in more.items():
                setattr(self._counters, name, getattr(self._counters, name) + value)

    def _wait(self, action: Callable[[], Awaitable[T]], key: SegmentKey, buffers: Sequence[memoryview], timeout_s: float) -> T:
        _check_seconds("timeout_s", timeout_s)

        def run() -> T:
            try:
                return self._calls.run(action, buffers, timeout_s)
            except TimeoutError:
                self._count(timeouts=1)
                raise _late(timeout_s) from None

        return self._guarded(run, key)

    def _guarded(self, call: Callable[[], T], key: SegmentKey) -> T:
        """Make a call unless the store is taken for dead, and learn from how it ends."""
        self._check_open()
        self._thread.check_caller()
        if self._breaker.is_open:
            self._count(refused=1, failed_loads=1)
            raise _refused()
        begin = perf_counter()
        try:
            result = call()
        except OasisError as error:
            if not isinstance(error, (InputError, StateError)):
                self._trip(key)
            self._count(failed_loads=1, load_s=perf_counter() - begin)
            raise
        except Exception as error:
            self._trip(key)
            self._count(failed_loads=1, load_s=perf_counter() - begin)
            raise WorkerError.of("the tier store", error) from error
        self._breaker.answered()
        self._count(load_s=perf_counter() - begin)
        return result

    async def _attempt(self, key: SegmentKey, call: Callable[[], Awaitable[object]]) -> None:
        if self._breaker.is_open:
            self._count(refused=1)
            raise _refused()
        try:
            with anyio.move_on_after(self._store_timeout_s) as scope:
                await call()
        except TierUnavailable:
            self._trip(key)
            raise
        if scope.cancelled_caught:
            self._count(timeouts=1)
            self._trip(key)
            raise _late(self._store_timeout_s)
        self._breaker.answered()

    def _trip(self, key: SegmentKey) -> None:
        if self._breaker.trip():
            self._thread.post(self._thread.start, self._probe.run, key)


def _answers(method: str, answers: object, kind: type[T], count: int) -> list[T]:
    """What a store has answered, if that is as many of a kind as it was asked for. Raises `WorkerError`."""
    if isinstance(answers, list) and len(answers) == count and all(isinstance(answer, kind) for answer in answers):
        return answers
    raise WorkerError(
        f"TierStore.{method} answered {answers!r:.200}; it must be a list of {count} {kind.__name__}, one per "
        f"{'segment' if method == 'contains' else 'read'}: a fault of the store"
    )


def _check_seconds(name: str, value: float) -> None:
    if not 0 < value <= threading.TIMEOUT_MAX:
        raise InputError(f"{name} is {value!r}; it must be a positive number of seconds")


def _refused() -> TierUnavailable:
    return TierUnavailable("the tier store has failed and is not asked until it answers a probe; try again in some seconds")


def _late(timeout_s: float) -> TierUnavailable:
    return TierUnavailable(f"the tier store did not answer within {timeout_s:g} s; look at its medium or its peer")
