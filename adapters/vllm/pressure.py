"""Which requests to hand over when device blocks run short: as few as make up what is missing, those first that free most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Candidate:
    """A request that could be handed over now.

    Attributes:
        request_id: its name.
        last: number of the first of its own blocks that it would keep.
        blocks: numbers of the device blocks that it would give up, each with the count of requests that hold it.
        lent: blocks that OasisKV would take for it.
    """

    request_id: str
    last: int
    blocks: Mapping[int, int]
    lent: int

    @cached_property
    def gain(self) -> int:
        """Blocks that are free after a handover of this request alone and were not before."""
        return sum(holders == 1 for holders in self.blocks.values()) - self.lent


def choose(candidates: Sequence[Candidate], missing: int) -> list[Candidate]:
    """The requests to hand over so that `missing` more blocks are free.

    A block that several requests share comes free with the last of them. So if requests do not gain enough one by one, those
    with the most blocks are tried together.

    Returns:
        No request at all if the handover of all candidates is not enough: it would cost speed and bring nothing.
    """
    if missing <= 0:
        return []
    chosen: list[Candidate] = []
    left = missing
    for candidate in sorted(candidates, key=lambda one: one.gain, reverse=True):
        if candidate.gain <= 0:
            break
        chosen.append(candidate)
        left -= candidate.gain
        if left <= 0:
            return chosen
    return _together(candidates, missing)


def _together(candidates: Sequence[Candidate], missing: int) -> list[Candidate]:
    given: Counter[int] = Counter()
    chosen: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda one: len(one.blocks), reverse=True):
        chosen.append(candidate)
        given.update(candidate.blocks.keys())
        missing += candidate.lent - sum(given[block] == holders for block, holders in candidate.blocks.items())
        if missing <= 0:
            return chosen
    return []
