"""The transfer scheduler of a GPU: background work on CUDA streams of its own. No GPU has run it yet.

Work is enqueued in the caller's thread, and the device runs it beside the foreground:

    foreground   attention of the layer, (1) ............................. (3) the layer's attention in the next step
    choosing        (1) predict, select, mark, (2)
    moving                                     (2) transfer, (3)

What keeps memory from being read and written at once:

- Choosing waits until the layer has attended (1), so nothing is taken out of a table that attention still reads. It also waits
  for the layer's work before, which may be moving yet.
- All layers choose on one stream, in the order of submission. Slots that a layer gives up may go to another one: that one
  takes them later on the same stream, and moves into them later still.
- Moving waits for the mark (2): whoever reads the table from then on sees no place that is being filled.
- The foreground waits for the whole (3), or, if it may go on without late work, for the mark. Both are waits of its stream,
  not of the host.
- Summaries grow while work is under way. Before one does, the foreground waits for all choosing (`fence`).
- What a piece of work holds, tensors of the foreground's among it, is kept until the device is done with it: memory that is
  freed on one stream would be handed out again while another one still uses it.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch

from .abc import LayerWork, Ticket, TransferScheduler
from .errors import StateError, WorkerError


class Event(Protocol):
    """As `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has come there."""

    def synchronize(self) -> None:
        """Wait on the host until it has."""


class Queue(Protocol):
    """As `torch.cuda.Stream`."""

    def record_event(self) -> Any:  # noqa: ANN401 (an event of the same library)
        """An event after all that is enqueued."""

    def wait_event(self, event: Any) -> None:  # noqa: ANN401 (as above)
        """Let what is enqueued from now on wait for an event."""


class StreamLibrary(Protocol):
    """The part of `torch.cuda` that is used here; tests bring their own."""

    def Stream(self, device: torch.device, priority: int) -> Queue:
        """A new stream."""

    def current_stream(self, device: torch.device) -> Queue:
        """That of the caller."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:  # noqa: ANN401 (a stream of the same library)
        """Makes a stream the current one."""


class StreamTicket(Ticket):
    """Follows work that has been enqueued. Its stages have run on the host, so an error is known at once."""

    def __init__(self, cuda: StreamLibrary, device: torch.device, work: LayerWork) -> None:
        self._cuda = cuda
        self._device = device
        self._work = work
        self.marked: Event | None = None
        self.done: Event | None = None
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Make the current stream wait until the work is done; the host goes on."""
        self._cuda.current_stream(self._device).wait_event(self.done)
        self._raise()

    def skip(self) -> LayerWork | None:
        """As in the contract, but that work which was enqueued is never cancelled: until its mark the current stream waits."""
        if self.done is None or self.done.query() or self.error is not None:
            self.wait()
            return None
        self._cuda.current_stream(self._device).wait_event(self.marked)
        return self._work

    def _raise(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise WorkerError.of(f"the background work of layer {self._work.layer}", error)


class StreamScheduler(TransferScheduler):
    """Runs work on two streams of the lowest priority. To have the foreground served first, run it on a stream of a higher one:
    torch has none below that of its default stream.

    Args:
        device: of the pool.
        cuda: `torch.cuda`, or what stands for it.
    """

    LOWEST_PRIORITY = 0

    def __init__(self, device: torch.device, cuda: StreamLibrary | None = None) -> None:
        self._cuda = cuda if cuda is not None else cast(StreamLibrary, torch.cuda)
        self._device = device
        self._choosing = self._cuda.Stream(device, priority=self.LOWEST_PRIORITY)
        self._moving = self._cuda.Stream(device, priority=self.LOWEST_PRIORITY)
        self._last: dict[int, StreamTicket] = {}
        self._running: deque[StreamTicket] = deque()
        self._closed = False

    def submit(self, work: LayerWork) -> Ticket:
        """As in the contract; the caller's stream has enqueued what the work builds on."""
        if self._closed:
            raise StateError("the transfer scheduler is closed; create a new manager")
        self._forget_what_is_done()
        ticket = StreamTicket(self._cuda, self._device, work)
        before = self._last.get(work.layer)
        self._choosing.wait_event(self._cuda.current_stream(self._device).record_event())
        if before is not None:
            self._choosing.wait_event(before.done)
            ticket.error, before.error = before.error, None
        try:
            with torch.no_grad():
                self._enqueue(work, ticket)
        except Exception as error:  # noqa: BLE001 - it reaches the waiter
            ticket.error = ticket.error or error
        finally:
            work.end()
            # After an error too: some stages may have been enqueued, and the foreground must not overtake them.
            if ticket.marked is None:
                ticket.marked = self._choosing.record_event()
                self._moving.wait_event(ticket.marked)
            ticket.done = self._moving.record_event()
            self._last[work.layer] = ticket
            self._running.append(ticket)
        return ticket

    def _enqueue(self, work: LayerWork, ticket: StreamTicket) -> None:
        with self._cuda.stream(self._choosing):
            work.predict()
            work.select()
            work.mark()
        ticket.marked = self._choosing.record_event()
        self._moving.wait_event(ticket.marked)
        with self._cuda.stream(self._moving):
            work.transfer()

    def _forget_what_is_done(self) -> None:
        """Moving is in order, so the first that is not done tells of all behind it."""
        while self._running and self._running[0].done is not None and self._running[0].done.query():
            ticket = self._running.popleft()
            if self._last.get(ticket._work.layer) is ticket and ticket.error is None:
                del self._last[ticket._work.layer]

    def fence(self) -> None:
        """Make the current stream wait until all choosing is done: what it frees may be handed out to itself only."""
        self._cuda.current_stream(self._device).wait_event(self._choosing.record_event())

    def drain(self) -> None:
        """Wait on the host until the device has run all work."""
        if self._running and self._running[-1].done is not None:
            self._running[-1].done.synchronize()
        self._forget_what_is_done()

    def close(self) -> None:
        """Drain and stop."""
        if not self._closed:
            self.drain()
            self._closed = True
