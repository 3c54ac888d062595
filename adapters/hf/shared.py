"""What an `OasisCache` and its copies have in common, and who ends it: one manager, one binding, one residual stream."""

from __future__ import annotations

from oasiskv import KVManager, Sequence, Step
from oasiskv.errors import StateError

from .batch import Batch, discard
from .binding import Binding
from .forward import Turn
from .projection import ResidualStream


class Shared:
    """Caches that share a manager take turns: their forwards follow one another, and a step that waits for `crop` is committed
    when another cache begins. Each owns its sequences. The last one that leaves closes the manager.

    Attributes:
        turn: whose forward or other call it is.
        stream: of whichever cache runs, if the predictor uses it.
    """

    def __init__(self, manager: KVManager, binding: Binding) -> None:
        self.manager = manager
        self.turn = Turn()
        self.stream: ResidualStream | None = None
        self._binding = binding
        self._batches: list[Batch] = []
        self._left: list[Batch] = []
        self._stepping: Batch | None = None

    # Who takes part

    def join(self, hybrid: bool) -> Batch:
        """The sequences of one more cache; none yet."""
        batch = Batch(self.manager, hybrid)
        self._batches.append(batch)
        return batch

    def attach(self) -> None:
        """Use the model."""
        self._binding.attach(self, watch=self.stream is not None)

    def leave(self, batch: Batch) -> None:
        """A cache is closed or gone. Garbage collection calls this at any moment, also while another cache runs, so only the
        last cache acts at once: the sequences of others are freed by the next call that finds the manager at rest."""
        if batch not in self._batches:
            return
        self._batches.remove(batch)
        self._left.append(batch)
        if not self._batches:
            self._binding.detach(self)
            self.turn.when_free(self.manager.close)

    def claim(self, batch: Batch) -> None:
        """Called before anything is done with the sequences of a cache.

        Raises:
            StateError: the cache is closed.
        """
        if batch not in self._batches:
            raise StateError("the OasisCache is closed; make a new one with OasisCache.for_model, or copy one that is open")
        self.sweep()

    def sweep(self) -> None:
        """Free the sequences of caches that are gone."""
        while self._left and not self.manager.closed:
            batch = self._left[0]
            if self._stepping is batch:
                self._abort()
            discard(self.manager, batch.sequences)
            self._left.remove(batch)

    # Steps

    def drop_stream(self) -> None:
        """Go without hints from now on."""
        if self.stream is not None:
            self.stream = None
            self._binding.unwatch(self)

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
