"""Draws what `benchmarks.quality` has measured: KL over budget, KL over summary bytes, and coverage by layer and head."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .quality import Cell

BYTES = {"minmax": 16.0, "minmax-int4": 4.5, "defaults": 4.0, "bit2": 32.0, "transform-bit2": 4.0}
"""Device bytes of summaries per token and kv head at head_dim 64 in fp16, by the name of their cells; counted by the tests."""

_SERIES = ("oracle", "exact query", "defaults", "lookahead", "minmax, previous", "random")


def draw(cells: Sequence[Cell], directory: Path) -> list[Path]:
    """Write `budget.svg`, `frontier.svg` and `coverage.svg`, as far as the cells suffice; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    drawn = (_budgets(cells, directory), _frontier(cells, directory), _coverage(cells, directory))
    return [path for path in drawn if path is not None]


def _mean(cells: Sequence[Cell], name: str, budget: int, context: int = 4096) -> tuple[float, float] | None:
    """Mean KL over texts, and its standard error over all spans."""
    spans = [span for cell in cells if (cell.name, cell.budget, cell.context) == (name, budget, context) for span in cell.spans]
    if not spans:
        return None
    values = torch.tensor(spans)
    return float(values.mean()), float(values.std() / len(spans) ** 0.5) if len(spans) > 1 else 0.0


def _budgets(cells: Sequence[Cell], directory: Path) -> Path | None:
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    budgets = sorted({cell.budget for cell in cells})
    lines = 0
    for name in _SERIES:
        found = [(budget, *value) for budget in budgets if (value := _mean(cells, name, budget)) is not None]
        if len(found) > 1:
            axes.errorbar(*zip(*found, strict=True), label=name, marker="o", markersize=4, capsize=2)
            lines += 1
    if not lines:
        plt.close(figure)
        return None
    axes.set(xscale="log", yscale="log", xlabel="budget, tokens per kv head", ylabel="KL to full attention, nats per token")
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.legend(frameon=False)
    axes.set_title("4,096 tokens of context")
    return _save(figure, directory / "budget.svg")


def _frontier(cells: Sequence[Cell], directory: Path) -> Path | None:
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    points = 0
    for name, size in BYTES.items():
        for suffix, marker in (("exact query", "o"), ("", "s")):
            label = ("exact query" if name == "defaults" else f"{name}, exact query") if suffix else name
            value = _mean(cells, label, 512)
            if value is not None:
                axes.errorbar(size, *value, marker=marker, color="C0" if suffix else "C1", capsize=2)
                axes.annotate("transform" if name == "defaults" else name, (size, value[0]), (5, 5), textcoords="offset points")
                points += 1
    if points < 2:
        plt.close(figure)
        return None
    oracle = _mean(cells, "oracle", 512)
    if oracle is not None:
        axes.axhline(oracle[0], color="grey", linestyle=":", label="oracle: the keys themselves")
    axes.plot([], [], "oC0", label="exact query (arrives too late to move anything)")
    axes.plot([], [], "sC1", label="layer-ahead, with correction: the defaults")
    axes.set(
        xscale="log", yscale="log", xlabel="device bytes per token and kv head", ylabel="KL to full attention, nats per token"
    )
    axes.legend(frameon=False)
    axes.set_title("4,096 tokens of context, budget 512")
    return _save(figure, directory / "frontier.svg")


def _coverage(cells: Sequence[Cell], directory: Path) -> Path | None:
    found = [torch.tensor(cell.layers) for cell in cells if (cell.name, cell.budget, cell.context) == ("defaults", 512, 4096)]
    if not found:
        return None
    plt = _pyplot()
    heads = 9
    grid = torch.stack(found).mean(0).view(-1, heads)
    figure, axes = plt.subplots(figsize=(8.5, 3.2), layout="constrained")
    image = axes.imshow(grid.T, aspect="auto", vmin=0.5, vmax=1.0, cmap="viridis")
    axes.set(xlabel="layer", ylabel="query head", title="Share of full attention that the rows saw; budget 512 of 4,096")
    figure.colorbar(image)
    return _save(figure, directory / "coverage.svg")


def _pyplot() -> Any:  # noqa: ANN401 - matplotlib is optional, and untyped here
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'oasiskv[plots]'") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "oasiskv"
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> Path:  # noqa: ANN401 - as above
    figure.savefig(path, metadata={"Date": None})
    _pyplot().close(figure)
    return path


def main() -> None:
    """`python -m benchmarks.quality_plots CELLS... DIR`: draw cells that `benchmarks.quality --cells` wrote."""
    from .quality_tables import read

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("cells", nargs="+", type=Path)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    for path in draw(read(options.cells), options.directory):
        print(path)


if __name__ == "__main__":
    main()
