"""What a person sees while the command works: progress on standard error, text and tables on standard output."""

from __future__ import annotations

from types import TracebackType

from rich import progress as bars
from rich.console import Console
from rich.table import Table

_FILE_WIDTH = 200
"""Columns for tables that no terminal wraps; rich would take 80."""


class Progress:
    """One bar at a time, and streamed text between bars."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._errors = Console(stderr=True)
        self._output = Console(highlight=False, markup=False, soft_wrap=True)
        self._bars = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[unit]}"),
            bars.TimeElapsedColumn(),
            console=self._errors,
            transient=True,
            disable=quiet or not self._errors.is_terminal,
        )
        self._task: bars.TaskID | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """A line about what happens."""
        if not self._quiet:
            self._errors.print(text, style="dim")

    def start(self, what: str, total: int, unit: str = "tokens") -> None:
        """Begin a bar of `total` units."""
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(what, total=total, unit=unit)
        self._bars.start()

    def advance(self, amount: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._bars.advance(self._task, amount)

    def finish(self) -> None:
        """End the bar."""
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None
        self._bars.stop()

    def text(self, piece: str) -> None:
        """Stream a piece of the generated text."""
        if not self._quiet:
            self._output.print(piece, end="")


def table(rows: list[tuple[str, ...]]) -> None:
    """Print a table; the first row is its head. In a file or pipe it is as wide as it needs to be."""
    drawn = Table()
    for column in zip(*rows, strict=True):  # words stay whole; rich would cut them to make room for others
        drawn.add_column(column[0], no_wrap=not any(" " in cell for cell in column))
    for row in rows[1:]:
        drawn.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(drawn)
