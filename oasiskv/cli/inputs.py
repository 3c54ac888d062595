"""Texts that commands read."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import InputError


def read_file(path: Path, option: str) -> str:
    """A UTF-8 file, or standard input for '-'.

    Raises:
        InputError: it is empty or not UTF-8.
        OSError: it cannot be read.
    """
    if str(path) == "-":
        text = sys.stdin.read()
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{option} {path} is not UTF-8: {error}") from error
    if not text.strip():
        raise InputError(f"{option} {path} is empty; a prompt needs at least one token")
    return text


def read_sample(name: str) -> str:
    """One of `oasiskv.testing.texts`. Raises `InputError` if there is none of this name."""
    from ..testing import texts

    if name not in texts.names():
        raise InputError(f"--sample-text is {name!r}; there are {', '.join(texts.names())}")
    return texts.read(name)
