"""The picture of `oasiskv eval`: how far each budget is from full attention, and which layers miss what."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    from ..adapters.hf.measure import Figures

FORMATS = (".png", ".svg")
"""Endings of files that can be drawn."""

_LEAST_KL = 1e-7
"""Nats that stand for 0, which a logarithmic axis has no place for."""


def check(path: Path) -> None:
    """Raise an error now if `draw` would raise it later.

    Raises:
        InputError: the file has another ending, or no directory to lie in.
        ImportError: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"--plot is {path}; it must end in {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise InputError(f"--plot is {path}, and there is no directory {path.parent}; make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot draws with matplotlib, which is not installed: pip install matplotlib")


def draw(figures: dict[int, Figures], path: Path) -> None:
    """Draw the figures of each budget into a file."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    budgets = list(figures)
    names = [str(budget) for budget in budgets]
    drawing = Figure(figsize=(10, 4), layout="constrained")
    left, right = drawing.subplots(1, 2)

    kl = [max(own.mean_kl, _LEAST_KL) for own in figures.values()]
    left.errorbar(budgets, kl, yerr=[own.standard_error for own in figures.values()], marker="o", capsize=3)
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xticks(budgets, names)
    left.xaxis.set_minor_formatter(NullFormatter())
    left.set_xlabel("budget, tokens per head")
    left.set_ylabel("KL to full attention, nats per token")
    left.grid(which="both", alpha=0.3)

    rows = [own.coverage.mean(1).tolist() for own in figures.values()]
    image = right.imshow(list(zip(*rows, strict=True)), aspect="auto", vmax=1.0, cmap="viridis", interpolation="nearest")
    right.set_xticks(range(len(budgets)), names)
    right.set_xlabel("budget, tokens per head")
    right.set_ylabel("full-attention layer")
    right.yaxis.get_major_locator().set_params(integer=True)
    drawing.colorbar(image, ax=right, label="share of full attention that was seen")
    drawing.savefig(path, dpi=150)
