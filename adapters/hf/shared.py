"""What an `OasisCache` and its copies have in common, and who ends it: one manager, one binding, one residual stream."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from oasiskv import KVManager, Sequence, Step
from oasiskv.errors import StateError

from .batch import Batch, discard
from .binding import Binding
from .projection import ResidualStream

if TYPE_CHECKING:
    from .cache import OasisCache


class Shared:
    """Caches that share a manager take turns: their forwards follow one another, and a step that waits for `crop` is committed
    when another cache begins. Each owns its sequences. The last one that leaves closes the manager.

    Attributes:
        stream: shows the residual stream to the cache whose forward runs, if the predictor uses it.
    """

    def __init__(self, manager: KVManager, binding: Binding) -> None:
        self.manager = manager
        self.stream: ResidualStream | None = None
        self._binding = binding
        self._batches: list[Batch] = []
        self._left: list[Batch] = []
        self._stepping: Batch | None = None
        self._thread: int | None = None
        self._running: weakref.ref[OasisCache] | None = None

    # Who takes part

    def join(self, hybrid: bool) -> Batch:
        """The sequences of one more cache; none yet."""
        batch = Batch(self.manager, hybrid)
        self._batches.append(batch)
        return batch

    def leave(self, batch: Batch) -> None:
        """A cache is closed or gone. Garbage collection calls this at any moment, also while another cache runs, so only the
        last cache acts at once: the sequences of others are freed by the next call that finds the manager at rest."""
        if batch not in self._batches:
            return
        self._batches.remove(batch)
        self._left.append(batch)
        if not self._batches:
            self.drop_stream()
            self._binding.detach()
            self.manager.close()

    def claim(self, batch: Batch) -> None:
        """Called before anything is done with the sequences of a cache.

        Raises:
            StateError: the cache is closed, or the forward of one that shares its manager runs in another thread.
        """
        if batch not in self._batches:
            raise StateError("the OasisCache is closed; make a new one with OasisCache.for_model, or copy one that is open")
        if self._runs_elsewhere:
            raise StateError(
                "a copy of this OasisCache is in the middle of a forward in another thread, and copies take turns; make a "
                "cache for each thread with OasisCache.for_model"
            )
        self.sweep()

    @property
    def _runs_elsewhere(self) -> bool:
        thread = self._thread
        return thread not in (None, threading.get_ident()) and any(other.ident == thread for other in threading.enumerate())

    def sweep(self) -> None:
        """Free the sequences of caches that are gone, unless a forward runs in another thread."""
        while self._left and not self.manager.closed and not self._runs_elsewhere:
            batch = self._left[0]
            if self._stepping is batch:
                self._abort()
            discard(self.manager, batch.sequences)
            self._left.remove(batch)

    # Forwards and steps

    def enter(self, cache: OasisCache) -> None:
        """The forward of a cache begins."""
        self._thread, self._running = threading.get_ident(), weakref.ref(cache)

    def exit(self) -> None:
        """It has ended."""
        self._thread, self._running = None, None

    def show(self, target: int, hidden: torch.Tensor) -> None:
        """Hand what enters a decoder layer, `(batch, rows, hidden_size)`, to the cache whose forward runs."""
        cache = self._running() if self._running is not None else None
        if cache is not None:
            cache._show(target, hidden)

    def drop_stream(self) -> None:
        """Go without hints from now on."""
        if self.stream is not None:
            self.stream.detach()
            self.stream = None

    def begin_step(self, batch: Batch, sequences: list[Sequence], num_tokens: list[int], num_drafts: list[int] | None) -> None:
        """Open a step of a cache; see `KVManager.begin_step`."""
        self._stepping = batch
        self.manager.begin_step(sequences, num_tokens, num_drafts)

    def step_of(self, batch: Batch) -> Step | None:
        """The open step, if it is one of this cache."""
        return self.manager.open_step if self._stepping is batch else None

    def finish_step(self) -> None:
        """Commit the open step if its forward came to its end, whichever cache it is of; drop one whose forward did not."""
        step = self.manager.open_step
        if step is None:
            return
        if step.complete:
            step.commit()
        else:
            self._abort()

    def abort_step(self, batch: Batch) -> None:
        """Drop the open step, if it is one of this cache; its stock layers have seen rows that the sequences have not."""
        if self._stepping is batch:
            self._abort()
        batch.cut_short()

    def _abort(self) -> None:
        step = self.manager.open_step
        if step is None:
            return
        step.abort()
        if self._stepping is not None:
            self._stepping.cut_short()

    def reset(self, batch: Batch) -> None:
        """Free all sequences of a cache, listed or not: those of the manager that are not of another one."""
        others = {sequence for other in self._batches if other is not batch for sequence in other.sequences}
        step = self.manager.open_step
        if step is not None and not others.intersection(step.sequences):
            step.abort()
        discard(self.manager, [sequence for sequence in self.manager.sequences if sequence not in others])
