"""Work of a tier lane that nobody waits for: in order for each key, retried, and reported when it has ended."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence

import anyio

from ..errors import OasisError, StateError, TierUnavailable, WorkerError
from .lane_thread import LaneThread
from .segments import SegmentKey

Call = tuple[SegmentKey, Callable[[], Awaitable[object]]]
"""A call to make, and a key to ask for when the store has failed it."""

Attempt = Callable[[SegmentKey, Callable[[], Awaitable[object]]], Awaitable[None]]
"""Makes a call once. Raises `TierUnavailable`, which is retried."""

Done = Callable[[Exception | None], None]
"""Told how a job has ended: with nothing, or with an error."""

_AT_ONCE = 4
"""Jobs that run at the same time: enough to hide a store's latency, too few to crowd out reads."""

_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 5.0


class _Job:
    """Calls to make one after the other, all of the same keys."""

    def __init__(self, keys: Sequence[SegmentKey], calls: Sequence[Call], done: Done) -> None:
        self.keys = keys
        self.calls = calls
        self.done = done


class LaneJobs:
    """Runs jobs in the lane. Of two jobs with a key in common the one that was submitted first ends first."""

    def __init__(self, thread: LaneThread, attempt: Attempt, retries: int, retried: Callable[[], None]) -> None:
        self._thread = thread
        self._attempt = attempt
        self._retries = retries
        self._retried = retried
        self._jobs: set[_Job] = set()
        self._left = 0  # those, and those whose callbacks run
        self._changed = threading.Condition()
        self._callback_error: Exception | None = None
        # These are the lane's own: for each key the end of its last job, and who may run.
        self._last: dict[SegmentKey, anyio.Event] = {}
        self._running: anyio.Semaphore | None = None
        thread.at_end.append(self._end)

    def submit(self, keys: Sequence[SegmentKey], calls: Sequence[Call], done: Done) -> None:
        """Never blocks. `done` is called once, in the lane: with nothing, or with the exception that ended the job."""
        job = _Job(keys, calls, done)
        with self._changed:
            self._jobs.add(job)
            self._left += 1
        try:
            posted = self._thread.post(self._begin, job)
        except BaseException:  # an interrupt: nobody may wait for a job that may not run
            with self._changed:
                if job in self._jobs:
                    self._jobs.remove(job)
                    self._left -= 1
            raise
        if not posted:
            self._end()

    def wait(self, timeout_s: float | None) -> int:
        """Wait until no job is left; how many are, when time runs out."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left, timeout_s)
            return self._left

    def raise_failure(self) -> None:
        """Raises `WorkerError`, once, if a callback has raised."""
        with self._changed:
            error, self._callback_error = self._callback_error, None
        if error is not None:
            raise WorkerError.of("a callback of the tier lane", error)

    def _begin(self, job: _Job) -> None:
        # Here and not in the task, since the order of tasks is nobody's promise.
        ended = anyio.Event()
        before = {self._last[key] for key in job.keys if key in self._last}
        if self._thread.start(self._serve, job, before, ended):  # else `_end` follows
            self._last.update(dict.fromkeys(job.keys, ended))

    async def _serve(self, job: _Job, before: set[anyio.Event], ended: anyio.Event) -> None:
        error: Exception | None = _closed()  # unless it comes to an end of its own
        try:
            for event in before:
                await event.wait()
            self._running = self._running or anyio.Semaphore(_AT_ONCE)
            async with self._running:
                for key, call in job.calls:
                    await self._persist(key, call)
            error = None
        except OasisError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - it reaches the callback
            error = WorkerError.of("the tier store", failure)
        finally:
            ended.set()
            for key in job.keys:
                if self._last.get(key) is ended:
                    del self._last[key]
            self._ended(job, error)

    async def _persist(self, key: SegmentKey, call: Callable[[], Awaitable[object]]) -> None:
        pause_s = _FIRST_PAUSE_S
        for left in range(self._retries, -1, -1):
            try:
                return await self._attempt(key, call)
            except TierUnavailable:
                if not left:
                    raise
            self._retried()
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return None

    def _ended(self, job: _Job, error: Exception | None) -> None:
        with self._changed:
            if job not in self._jobs:
                return
            self._jobs.remove(job)
        try:
            job.done(error)
        except Exception as failure:  # noqa: BLE001 - `drain` and `close` raise it
            self._callback_error = self._callback_error or failure
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    def _end(self) -> None:
        """Report the jobs that are left when the lane has ended."""
        with self._changed:
            left = list(self._jobs)
        for job in left:
            self._ended(job, _closed())


def _closed() -> StateError:
    return StateError("the tier lane was closed before this was done; what it was about is not in the tier store")
