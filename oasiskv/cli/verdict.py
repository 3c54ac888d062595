"""What `oasiskv eval` makes of its figures: a table, an answer, and JSON.

The answer is the smallest budget that stays within `MOST_KL` and `LEAST_AGREEMENT`. They are a rule of thumb: within them a
reader will hardly tell one text from the other. A task may ask for more, or do with less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..adapters.hf.measure import Figures

MOST_KL = 0.02
"""Nats per token below which a budget counts as enough."""

LEAST_AGREEMENT = 0.95
"""Share of tokens with the same greedy choice from which a budget counts as enough."""


@dataclass(frozen=True)
class Text:
    """A text that was measured: what it was called, its tokens, and where its spans begin."""

    name: str
    tokens: int
    spans: int
    overlap: bool


@dataclass(frozen=True)
class Result:
    """What was measured, by budget, and on what."""

    figures: dict[int, Figures]
    texts: list[Text]
    model: dict[str, Any]
    machine: dict[str, Any]
    settings: dict[str, Any]
    seconds: float

    @property
    def enough(self) -> int | None:
        """The smallest budget within `MOST_KL` and `LEAST_AGREEMENT`."""
        close = [budget for budget, own in self.figures.items() if own.mean_kl < MOST_KL and own.agreement >= LEAST_AGREEMENT]
        return min(close, default=None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "budgets": [{"budget_tokens": budget, **_numbers(figures)} for budget, figures in self.figures.items()],
            "enough": self.enough,
            "rule": {"kl_below": MOST_KL, "agreement_at_least": LEAST_AGREEMENT},
            "settings": self.settings,
            "texts": [vars(text) for text in self.texts],
            "model": self.model,
            "machine": self.machine,
            "seconds": self.seconds,
        }

    def rows(self) -> list[tuple[str, ...]]:
        """A table for people, head first."""
        head = ("budget", "KL, nats", "same token", "NLL, PPL", "coverage", "moved", "in place", "device share")
        return [head, *(_row(budget, figures) for budget, figures in self.figures.items())]

    def lines(self) -> list[str]:
        """The answer, and what was measured on what."""
        rule = f"KL below {MOST_KL} and the same token at least {LEAST_AGREEMENT:.0%} of the time"
        if self.enough is not None:
            answer = f"smallest budget with {rule}: {self.enough}"
        else:
            answer = f"none of these budgets has {rule}; try larger ones"
        settings, model, machine = self.settings, self.model, self.machine
        lengths = f"{settings['context']} tokens of context, {settings['span_tokens']} measured per span"
        described = [f"{text.name} ({text.tokens} tokens, {text.spans} spans)" for text in self.texts]
        lines = [
            answer,
            f"texts: {', '.join(described)}; {lengths}",
            f"model: {model['name']}, {model['type']}, {model['parameters'] / 1e6:.0f}M parameters in {model['dtype']}, "
            f"{model['full_attention_layers']} of {model['layers']} layers with full attention",
            f"settings: {settings['summary']}, {settings['predictor']}, blocks of {settings['block_size']}, "
            f"window {settings['window']}, correction {settings['correction']}",
            f"machine: {machine['device']}, {machine['threads']} threads; torch {machine['torch']}, "
            f"transformers {machine['transformers']}; {self.seconds:.0f} s",
        ]
        if any(text.overlap for text in self.texts):
            lines.append("the spans overlap, so the errors behind ± are too small; take a longer text, or fewer spans")
        return lines


def _numbers(figures: Figures) -> dict[str, Any]:
    several = figures.kl.shape[0] > 1
    return {
        "kl": figures.mean_kl,
        "kl_error": figures.standard_error if several else None,
        "agreement": figures.agreement,
        "agreement_error": figures.agreement_error if several else None,
        "nll_difference": figures.mean_nll_difference,
        "nll_error": figures.nll_error if several else None,
        "perplexity_ratio": figures.perplexity_ratio,
        "coverage": figures.mean_coverage,
        "coverage_by_layer": figures.coverage.mean(1).tolist(),
        "moved_blocks": figures.moved,
        "read_in_place_blocks": figures.read_in_place,
        "device_share": figures.device_share,
        "summary_share": figures.summary_share,
    }


def _row(budget: int, figures: Figures) -> tuple[str, ...]:
    error = f" ± {figures.standard_error:.4f}" if figures.kl.shape[0] > 1 else ""
    return (
        str(budget),
        f"{figures.mean_kl:.4f}{error}",
        f"{figures.agreement:.1%}",
        f"{figures.mean_nll_difference:+.4f} x{figures.perplexity_ratio:.3f}",
        f"{figures.mean_coverage:.1%}",
        f"{figures.moved:.2f}",
        f"{figures.read_in_place:.2f}",
        f"{figures.device_share:.1%}",
    )
