"""Output of commands that must run on a bare installation, without `rich`."""

from __future__ import annotations

import sys
from types import TracebackType

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Status:
    """One line on standard error that says what happens now, on a terminal only."""

    def __init__(self, quiet: bool) -> None:
        self._shown = not quiet and sys.stderr.isatty()

    def say(self, text: str) -> None:
        """Replace the line."""
        if self._shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Status:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.say("")


def columns(rows: list[tuple[str, ...]]) -> str:
    """Rows of one length, as text in columns that are as wide as they need to be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)


def size(count: float) -> str:
    """Bytes in the largest unit that leaves at least 1: `8 KiB`, `1.5 GiB`."""
    power = 0
    while count >= 1024 and power + 1 < len(_UNITS):
        count, power = count / 1024, power + 1
    return f"{count:.3g} {_UNITS[power]}" if count < 1000 else f"{count:.0f} {_UNITS[power]}"
