"""Counts anew what sequences hold, after a call that ended in the middle."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from .log import event
from .sequence import UNFINISHED, Phase
from .settling import unsettle

if TYPE_CHECKING:
    from .manager import KVManager


def repair(manager: KVManager) -> None:
    """Make strips, pages and rows that no sequence, adoption or open step lists free, and write the tables of whole sequences
    anew. A sequence that was being made is gone: no caller has its handle. May be interrupted, and is then done again."""
    rooms = manager.rooms
    manager.scheduler.drain()
    for sequence in manager.sequences:
        if sequence.torn == UNFINISHED:
            manager.forget(sequence)
    step = manager.open_step
    holders = Counter(page for sequence in manager.sequences for page in sequence.pages)
    holders.update(page for adoption in manager.adoptions for page in adoption.pages)
    holders.update(step.pages if step is not None else [])
    rooms.pool.recover({strip for sequence in manager.sequences for strip in sequence.strips})
    rooms.arena.recover(holders)
    manager.list_free_rows()
    torn = 0
    for sequence in manager.sequences:
        if sequence.torn is not None:
            torn += 1
            continue
        rooms.sets.set_pages(sequence.row, 0, sequence.pages)
        rooms.sets.set_strips(sequence.row, sequence.strips)
        if sequence.phase is Phase.SPARSE and rooms.summary.fitted and sequence.summarised < len(sequence.pages):
            unsettle(manager, sequence)  # a fit was interrupted; it is digested again before its next step
    manager.open_changes = 0
    event(
        logging.WARNING if torn else logging.DEBUG,
        "repair",
        sequences=len(manager.sequences),
        torn=torn,
        step=manager.step_number,
    )
