"""Long real texts that every Python installation has."""

from __future__ import annotations

import argparse
import asyncio.base_events
import typing
from pathlib import Path
from pydoc_data.topics import topics

_SOURCES = {"argparse": argparse, "asyncio": asyncio.base_events, "typing": typing}


def names() -> list[str]:
    """Texts that `read` knows."""
    return ["manual", *sorted(_SOURCES)]


def read(name: str) -> str:
    """A text of at least 60,000 characters.

    `manual` is English prose: the chapters of Python's language reference that `help()` shows. The others are source code: the
    modules of the standard library of that name.
    """
    if name == "manual":
        return "\n\n".join(topics[chapter] for chapter in sorted(topics))
    if name not in _SOURCES:
        raise KeyError(f"no text {name!r}; there are {', '.join(names())}")
    return Path(str(_SOURCES[name].__file__)).read_text(encoding="utf-8")
