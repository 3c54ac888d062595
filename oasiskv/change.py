"""`Change`: a change of sequences is complete, is undone, or leaves sequences that refuse to be used."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from .log import event
from .sequence import Sequence

if TYPE_CHECKING:
    from .manager import KVManager


class Change:
    """A context in which sequences are half changed.

    An exception that leaves it, an interrupt included, leaves them *torn*: every call but `KVManager.free` refuses a torn
    sequence. Code that restores the sequences before it raises says so with `restored`.

    After any exception that does not follow `restored`, the manager counts strips, pages and rows anew before its next call
    (`repair`). For that, a change allocates before it lists, and unlists before it releases: what no sequence lists is free.

    Args:
        name: of the call, for the message of the refusal.
        sequences: those that change; those that an outer change has torn are left to it.
    """

    def __init__(self, manager: KVManager, name: str, sequences: Iterable[Sequence] = ()) -> None:
        self._manager = manager
        self._name = name
        self._sequences = [sequence for sequence in sequences if sequence.torn is None]
        self._whole = False

    def restored(self) -> None:
        """The sequences are whole, and nothing has leaked: an exception that follows tears nothing."""
        self._whole = True

    def __enter__(self) -> Change:
        self._manager.open_changes += 1
        for sequence in self._sequences:
            sequence.torn = self._name
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self._whole:
            if self._sequences:
                event(logging.WARNING, "torn", call=self._name, sequences=len(self._sequences), error=error)
            return
        for sequence in self._sequences:
            sequence.torn = None
        self._manager.open_changes -= 1
