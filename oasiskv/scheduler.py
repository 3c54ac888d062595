"""Transfer schedulers for hosts without streams: in the caller's thread, or on background threads."""

from __future__ import annotations

import ctypes
import queue
import threading

import torch

from .abc import LayerWork, Ticket, TransferScheduler
from .errors import ConfigError, StateError, WorkerError


class WorkTicket(Ticket):
    """Follows one piece of work through its stages."""

    def __init__(self, work: LayerWork, before: WorkTicket | None = None) -> None:
        self._work = work
        self._before = before
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._cancelled = False
        self._transferring = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run all stages."""
        try:
            with torch.no_grad():  # every thread has its own grad mode
                self._stages()
        except BaseException as error:  # noqa: BLE001 - it reaches the waiter
            self._error = error
        finally:
            try:
                self._work.end()
            finally:
                before, self._before = self._before, None
                if before is not None and self._error is None:
                    self._error = before._error
                self._done.set()

    def _stages(self) -> None:
        self._work.predict()
        self._work.select()
        with self._lock:
            self._transferring = not self._cancelled
            if self._transferring:
                self._work.mark()
        if self._transferring:
            self._work.transfer()

    def wait(self) -> None:
        self._done.wait()
        self._raise()

    def skip(self) -> LayerWork | None:
        with self._lock:
            late = not self._done.is_set()
            self._cancelled = late and not self._transferring
        if late:
            return self._work
        self._raise()
        return None

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise WorkerError.of(f"the background work of layer {self._work.layer}", error)

    def raise_interrupt(self) -> None:
        """Work that ran in the caller's thread may have got the caller's interrupt: raise it as it came."""
        if self._error is not None and not isinstance(self._error, Exception):
            error, self._error = self._error, None
            raise error


class InlineScheduler(TransferScheduler):
    """Runs work at once, in the caller's thread: no threads, no waiting, the same result."""

    def __init__(self) -> None:
        self._last: dict[int, WorkTicket] = {}
        self._closed = False

    def submit(self, work: LayerWork) -> Ticket:
        if self._closed:
            raise StateError("the transfer scheduler is closed; create a new manager")
        ticket = WorkTicket(work, self._last.get(work.layer))
        self._last[work.layer] = ticket
        ticket.run()
        ticket.raise_interrupt()
        return ticket

    def drain(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        self._closed = True


def use_one_thread() -> None:
    """Let parallel work of the calling thread, torch's and ours, run on this thread alone. A team of its own would wait for the
    next piece by spinning, on cores that the foreground computes on. Nothing happens if the process has no OpenMP runtime."""
    torch.get_num_threads()  # at first, torch gives a thread the number that the process was told
    # torch.set_num_threads would tell MKL as well, for the whole process.
    set_num_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if set_num_threads is not None:
        set_num_threads(1)


class ThreadScheduler(TransferScheduler):
    """Runs work on background threads of one core each. A layer always goes to the same thread, which keeps its work in
    order."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ConfigError(f"workers is {workers}; a ThreadScheduler needs at least 1 (InlineScheduler needs none)")
        self._queues: list[queue.SimpleQueue[WorkTicket | None]] = [queue.SimpleQueue() for _ in range(workers)]
        self._last: dict[int, WorkTicket] = {}
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(jobs,), name=f"oasiskv-{number}", daemon=True)
            for number, jobs in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _run(jobs: queue.SimpleQueue[WorkTicket | None]) -> None:
        use_one_thread()
        while (ticket := jobs.get()) is not None:
            ticket.run()

    def submit(self, work: LayerWork) -> Ticket:
        if self._closed:
            raise StateError("the transfer scheduler is closed; create a new manager")
        ticket = WorkTicket(work, self._last.get(work.layer))
        self._last[work.layer] = ticket
        self._queues[work.layer % len(self._queues)].put(ticket)
        return ticket

    def drain(self) -> None:
        for ticket in self._last.values():
            ticket._done.wait()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for jobs in self._queues:
            jobs.put(None)
        for thread in self._threads:
            thread.join()
