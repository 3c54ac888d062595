"""`python -m benchmarks.quality_tables CELLS...`: tables for docs/fidelity.md, from cells that `benchmarks.quality` wrote."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from .quality import Cell


def read(paths: Sequence[Path]) -> list[Cell]:
    """The cells of some files."""
    return [Cell(**json.loads(line)) for path in paths for line in path.read_text().splitlines()]


def overview(cells: Sequence[Cell]) -> Iterator[str]:
    """A Markdown table with a row per context, budget and name: means over texts, the KL's standard error over all spans."""
    yield "| context | budget | | KL (s.e.) | top-1 | NLL | moved + read in place |"
    yield "|---|---|---|---|---|---|---|"
    keys = dict.fromkeys((cell.context, cell.budget, cell.name) for cell in cells)
    for context, budget, name in sorted(keys, key=lambda key: key[:2]):
        own = [cell for cell in cells if (cell.context, cell.budget, cell.name) == (context, budget, name)]
        spans = torch.tensor([span for cell in own for span in cell.spans])
        error = float(spans.std() / len(spans) ** 0.5) if len(spans) > 1 else 0.0

        def mean(what: str, own: list[Cell] = own) -> float:
            return sum(float(getattr(cell, what)) for cell in own) / len(own)

        yield (
            f"| {context:,} | {budget:,} | {name} | {mean('kl'):.4f} ({error:.4f}) | {mean('agreement'):.3f} | "
            f"{mean('nll_difference'):+.4f} | {mean('moved'):.2f} + {mean('read_in_place'):.2f} |"
        )


def by_text(cells: Sequence[Cell], context: int, budget: int) -> Iterator[str]:
    """A Markdown table of KL: a row per name, a column per text."""
    chosen = [cell for cell in cells if (cell.context, cell.budget) == (context, budget)]
    texts = list(dict.fromkeys(cell.text for cell in chosen))
    yield "| | " + " | ".join(texts) + " | mean |"
    yield "|---" * (len(texts) + 2) + "|"
    for name in dict.fromkeys(cell.name for cell in chosen):
        values = {cell.text: cell.kl for cell in chosen if cell.name == name}
        if len(values) == len(texts):
            mean = sum(values.values()) / len(values)
            yield f"| {name} | " + " | ".join(f"{values[text]:.4f}" for text in texts) + f" | {mean:.4f} |"


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", nargs="+", type=Path)
    cells = read(parser.parse_args().cells)
    print(*overview(cells), sep="\n")
    for context, budget in sorted({(cell.context, cell.budget) for cell in cells}):
        print(f"\nKL by text, {context:,} tokens of context, budget {budget:,}\n")
        print(*by_text(cells, context, budget), sep="\n")


if __name__ == "__main__":
    main()
