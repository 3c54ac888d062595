"""Puts the steps and the background work of a manager into a trace. A manager without one runs none of this."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import TYPE_CHECKING

import torch

from .abc import LayerWork, Ticket, TransferScheduler
from .sequence import Sequence
from .step import Step
from .trace import OpenSlice, Trace, now
from .types import ModelShape

if TYPE_CHECKING:
    from .manager import KVManager

FOREGROUND = "foreground"
WAITS = "waits"


class TracedStep(Step):
    """A step whose parts are slices of the foreground lane; the whole of it is one too, around them."""

    def __init__(
        self,
        trace: Trace,
        manager: KVManager,
        sequences: list[Sequence],
        num_tokens: list[int],
        num_drafts: list[int],
        prompt: list[bool],
    ) -> None:
        self._trace = trace
        self._begun = now()
        self._number = manager.step_number
        try:
            super().__init__(manager, sequences, num_tokens, num_drafts, prompt)
        finally:
            trace.add(FOREGROUND, "begin_step", self._begun, sequences=len(sequences), rows=sum(num_tokens))

    def hint(self, layer: int, hidden: torch.Tensor) -> None:
        """As `Step.hint`."""
        with self._trace.slice(FOREGROUND, f"hint {layer}", layer=layer):
            super().hint(layer, hidden)

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """As `Step.attend`."""
        with self._trace.slice(FOREGROUND, f"attend {layer}", layer=layer, rows=self._total):
            return super().attend(layer, queries, keys, values, scale, softcap)

    def commit(self, accepted: Sequences[int] | None = None) -> None:
        """As `Step.commit`."""
        with self._trace.slice(FOREGROUND, "commit"):
            super().commit(accepted)
        self._end("step")

    def abort(self) -> None:
        """As `Step.abort`."""
        if not self._done:
            super().abort()
            self._end("aborted step")

    def _end(self, name: str) -> None:
        self._trace.add(FOREGROUND, name, self._begun, step=self._number, rows=self._total)


class TracedScheduler(TransferScheduler):
    """Runs work on another scheduler, and shows it: a lane for each stage, and one for the foreground's waits.

    On CUDA the stages only enqueue. Their slices are then times of the host, their lanes say so, and how many blocks were moved
    is left out, since asking would wait for the device.
    """

    def __init__(self, inner: TransferScheduler, trace: Trace, shape: ModelShape, block_size: int) -> None:
        self._inner = inner
        self._trace = trace
        self._slot_bytes = shape.slot_bytes(block_size)
        self._enqueues = shape.device.type == "cuda"
        if self._enqueues:
            trace.note(
                "all times are the host's: lanes marked 'enqueued' show when it enqueued work, not when the device ran it"
            )

    def submit(self, work: LayerWork) -> Ticket:
        """As in the contract, like the methods below."""
        return TracedTicket(self._inner.submit(TracedWork(work, self)), work.layer, self)

    def fence(self) -> None:
        """See `submit`."""
        with self.slice(WAITS, "fence"):
            self._inner.fence()

    def drain(self) -> None:
        """See `submit`."""
        with self.slice(WAITS, "drain"):
            self._inner.drain()

    def close(self) -> None:
        """See `submit`."""
        self._inner.close()

    def slice(self, lane: str, name: str, **values: int) -> OpenSlice:
        """As `Trace.slice`; the lane's name says whether its times are those of the work."""
        return self._trace.slice(f"{lane}, enqueued" if self._enqueues else lane, name, **values)

    def moved(self, work: LayerWork) -> dict[str, int]:
        """What a transfer that has ended has moved."""
        if self._enqueues:
            return {}
        blocks = work.pending_blocks()
        return {"blocks": blocks, "bytes": blocks * self._slot_bytes}


class TracedWork:
    """A `LayerWork` whose stages are slices."""

    def __init__(self, work: LayerWork, scheduler: TracedScheduler) -> None:
        self.layer = work.layer
        self._work = work
        self._scheduler = scheduler

    def predict(self) -> None:
        """As in the contract, like the methods below."""
        with self._slice("predict"):
            self._work.predict()

    def select(self) -> None:
        """See `predict`."""
        with self._slice("select"):
            self._work.select()

    def mark(self) -> None:
        """See `predict`."""
        with self._slice("mark"):
            self._work.mark()

    def transfer(self) -> None:
        """See `predict`."""
        with self._slice("transfer") as values:
            self._work.transfer()
            values |= self._scheduler.moved(self._work)

    def end(self) -> None:
        """See `predict`."""
        self._work.end()

    def pending_blocks(self) -> int:
        """See `predict`."""
        return self._work.pending_blocks()

    def _slice(self, stage: str) -> OpenSlice:
        return self._scheduler.slice(stage, f"{stage} {self.layer}", layer=self.layer)


class TracedTicket(Ticket):
    """A ticket whose waits are slices."""

    def __init__(self, inner: Ticket, layer: int, scheduler: TracedScheduler) -> None:
        self._inner = inner
        self._layer = layer
        self._scheduler = scheduler

    def wait(self) -> None:
        """As in the contract, like `skip`."""
        with self._scheduler.slice(WAITS, f"wait {self._layer}", layer=self._layer):
            self._inner.wait()

    def skip(self) -> LayerWork | None:
        """See `wait`; the slice says whether the work was late."""
        with self._scheduler.slice(WAITS, f"skip {self._layer}", layer=self._layer) as values:
            late = self._inner.skip()
            values["late"] = int(late is not None)
        return late
