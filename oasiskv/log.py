"""Rare events, for the standard `logging`: one logger, `oasiskv`, and no handler but one that does nothing."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("oasiskv")
LOGGER.addHandler(logging.NullHandler())


def event(level: int, name: str, /, **values: object) -> None:
    """Log `name key=value key=value`. The record has `event`, the name, and `values`, the dict, for formatters that want them.

    Nothing that happens in every step may come at `INFO` or above.
    """
    if LOGGER.isEnabledFor(level):
        text = " ".join(f"{key}={_quoted(value)}" for key, value in values.items())
        LOGGER.log(level, "%s %s", name, text, extra={"event": name, "values": values}, stacklevel=2)


def _quoted(value: object) -> str:
    text = str(value)
    return repr(text) if not text or any(part in text for part in (" ", "=", "\n", '"')) else text
