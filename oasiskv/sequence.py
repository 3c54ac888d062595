"""One request's cache: a handle with its length and the places it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from .uncopied import Uncopied

_ACCEPTANCE_RATE = 0.2
"""Weight of a new step in the moving average of the acceptance."""

UNFINISHED = "create"
"""What `torn` says of a sequence that is being made."""


class Phase(Enum):
    """What of a sequence is on the device."""

    DENSE = "dense"
    """Every block, block `b` in place `b`."""

    UNSETTLED = "unsettled"
    """The tail block only: the prompt is in the arena and the working set not chosen yet, since more prompt may come."""

    SPARSE = "sparse"
    """Sinks, window and selected blocks."""

    FREED = "freed"
    """Nothing: the handle is dead."""


@dataclass(eq=False)
class Sequence(Uncopied):
    """Made by `KVManager.create`, and changed by the manager only.

    Attributes:
        row: of the manager's tables.
        length: committed tokens.
        pages: arena pages of the sealed blocks, `length // block_size` of them.
        strips: pool strips, by place.
        summarised: sealed blocks whose summaries are written, counted from the first.
        acceptance: how likely a draft token is accepted if those before it were, by the steps so far.
        finite: whether keys and values of the last layer are finite; if not, the summary is not fitted on this sequence.
        torn: the call that ended in the middle and left the sequence half changed; `None` if it is whole.
    """

    row: int
    length: int = 0
    phase: Phase = Phase.DENSE
    pages: list[int] = field(default_factory=list)
    strips: list[int] = field(default_factory=list)
    summarised: int = 0
    acceptance: float = 0.5
    finite: bool = True
    torn: str | None = None

    def learn_acceptance(self, accepted: int, drafts: int) -> None:
        """A step with `drafts` draft tokens has kept `accepted` of them; those behind the first rejected one tell nothing."""
        self.acceptance += _ACCEPTANCE_RATE * (accepted / min(accepted + 1, drafts) - self.acceptance)
