"""How close a working set comes to full attention: the real SmolLM2-135M on six kinds of text, and on retrieval tasks.

Texts are teacher-forced: both read the true tokens, and their next-token distributions are compared. `--only grid`
measures summaries, predictors, corrections and budgets beside the defaults, which takes hours; `--plots DIR` draws.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from oasiskv import OasisConfig
from oasiskv.adapters.hf.measure import Figures, Spans
from oasiskv.adapters.hf.replay import replay
from oasiskv.adapters.hf.retrieval import Outcome, measure_retrieval
from oasiskv.testing import texts
from oasiskv.testing.models import load_smollm2
from oasiskv.testing.retrieval import documents

from . import drafts
from .report import Row, at_least, at_most, run

DRAFT_TOKENS = 4
LONG_TOKENS = 2048
PARTS = ("short", "long", "generation", "retrieval")
ORACLE = {"predictor": "oracle"}
QUICK_TEXTS = ("manual", "argparse")
"""Texts that need no package of their own."""


def settings(budget: int, **changes: Any) -> OasisConfig:  # noqa: ANN401 - the fields of OasisConfig
    """The defaults at a budget; small budgets have smaller windows."""
    window = 128 if budget >= 512 else budget // 4
    return OasisConfig(**{"budget_tokens": budget, "window_tokens": window, **changes})


@dataclass(frozen=True)
class Cell:
    """One configuration on one text, averaged over its spans and tokens; see `Figures` for the units."""

    text: str
    context: int
    name: str
    budget: int
    kl: float
    kl_error: float
    spans: list[float]
    agreement: float
    nll_difference: float
    coverage: float
    moved: float
    read_in_place: float
    most_moved: list[int]
    device_share: float
    layers: list[float] = field(default_factory=list)

    @staticmethod
    def of(text: str, context: int, name: str, budget: int, figures: Figures) -> Cell:
        """The averages."""
        together = (figures.loaded + figures.corrected).flatten().float()
        return Cell(
            text,
            context,
            name,
            budget,
            figures.mean_kl,
            figures.standard_error,
            figures.kl.mean(1).tolist(),
            figures.agreement,
            figures.mean_nll_difference,
            float(figures.coverage.mean()),
            figures.moved,
            figures.read_in_place,
            [int(together.quantile(q)) for q in (0.5, 0.9, 0.99, 1.0)],
            figures.device_share,
            figures.coverage.flatten().tolist(),
        )


class Table:
    """All cells, with means over texts."""

    def __init__(self, echo: bool) -> None:
        self.cells: list[Cell] = []
        self._echo = echo

    def add(self, cell: Cell) -> None:
        """Keep a cell, and print it."""
        self.cells.append(cell)
        if self._echo:
            print(
                f"    {cell.text:<9} {cell.context:>5} {cell.name:<34} {cell.budget:>5} KL {cell.kl:.4f} ({cell.kl_error:.4f}) "
                f"top-1 {cell.agreement:.3f}  NLL {cell.nll_difference:+.4f}  coverage {cell.coverage:.3f}  "
                f"moved {cell.moved:.2f} + {cell.read_in_place:.2f}",
                flush=True,
            )

    def of(self, context: int, name: str, budget: int) -> list[Cell]:
        """The cells of one configuration, one per text."""
        return [c for c in self.cells if (c.context, c.name, c.budget) == (context, name, budget)]

    def mean(self, context: int, name: str, budget: int, what: str = "kl") -> float:
        """A figure's mean over the texts."""
        values = [getattr(cell, what) for cell in self.of(context, name, budget)]
        return float(sum(values) / len(values))

    def error(self, context: int, name: str, budget: int) -> float:
        """Standard error of the mean KL, over all spans of all texts."""
        spans = torch.tensor([span for cell in self.of(context, name, budget) for span in cell.spans])
        return float(spans.std() / len(spans) ** 0.5)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All rows."""
    model, tokenizer = load_smollm2()
    table = Table(echo=not options.json)
    quick = options.quick
    names = QUICK_TEXTS if quick else tuple(options.texts or texts.QUALITY_TEXTS)
    parts = options.only or (("short",) if quick else PARTS)
    if "short" in parts:
        short = [("defaults", settings(512)), ("defaults", settings(1024)), *_yardsticks(512)]
        _texts(model, tokenizer, table, names, 4096, short, options, with_drafts=not quick)
        yield from _short_rows(table)
        yield from _size_rows()
        if not quick:
            yield from _draft_rows(table)
    if "long" in parts:
        long = [("defaults", settings(512)), ("oracle", settings(512, **ORACLE)), ("defaults", settings(1024))]
        _texts(model, tokenizer, table, names, 8000, long, options)
        yield from _long_context_rows(table)
    if "generation" in parts:
        yield from _long_generation(model, tokenizer, table, names[:2])
    if "retrieval" in parts:
        yield from _retrieval(model, tokenizer)
    if "grid" in parts:
        for context in options.contexts:
            _texts(model, tokenizer, table, names, context, list(_grid(context)), options)
    if options.cells:
        Path(options.cells).write_text("\n".join(json.dumps(asdict(cell)) for cell in table.cells) + "\n")
    if options.plots:
        from .quality_plots import draw

        draw(table.cells, Path(options.plots))


def _yardsticks(budget: int) -> list[tuple[str, OasisConfig]]:
    return [
        ("exact query", settings(budget, predictor="quest")),
        ("oracle", settings(budget, predictor="oracle")),
        ("minmax, previous", settings(budget, summary="minmax", predictor="previous", correction_blocks=0)),
        ("random", settings(budget, predictor="random", correction_blocks=0)),
    ]


def _grid(context: int) -> Iterator[tuple[str, OasisConfig]]:
    """Budgets for the defaults and the yardsticks; at 4K also summaries, predictors and corrections."""
    for budget in (128, 256, 512, 1024, 2048):
        if budget < context:
            yield "defaults", settings(budget)
            yield from _yardsticks(budget)
    if context != 4096:
        return
    for budget in (512, 1024):
        for summary in ("minmax", "minmax-int4", "bit2", "transform-bit2"):
            yield summary, settings(budget, summary=summary)
            yield f"{summary}, exact query", settings(budget, summary=summary, predictor="quest")
        for predictor in ("previous", "ema", "lookahead", "snapkv", "h2o", "scissorhands", "window"):
            yield predictor, settings(budget, predictor=predictor, correction_blocks=0)
            if predictor in ("previous", "ema", "lookahead"):
                yield f"{predictor}, correction 4", settings(budget, predictor=predictor)
        for blocks in (0, 1, 2, 8):
            yield f"correction {blocks}", settings(budget, correction_blocks=blocks)


def _tokens(tokenizer: Any, name: str) -> torch.Tensor:  # noqa: ANN401 - tokenizers share no typed base
    ids: torch.Tensor = tokenizer(texts.read(name), return_tensors="pt", verbose=False).input_ids
    return ids


def _texts(
    model: PreTrainedModel,
    tokenizer: Any,  # noqa: ANN401 - as above
    table: Table,
    names: tuple[str, ...],
    context: int,
    configs: list[tuple[str, OasisConfig]],
    options: argparse.Namespace,
    with_drafts: bool = False,
) -> None:
    """Measure configurations on spans of each text; those that the table has already are left out."""
    configs = [(name, config) for name, config in configs if not table.of(context, name, config.budget_tokens)]
    summaries = sorted({config.summary for _, config in configs})
    for name in names:
        if options.json:
            print(f"{name}, {context} tokens of context", file=sys.stderr, flush=True)
        count, tokens = (2 if context < 8000 else 1, 32) if options.quick else (options.spans, 64)
        spans = Spans.read(model, _tokens(tokenizer, name), context, tokens, count, summaries, settings(512))
        for label, config in configs:
            table.add(Cell.of(name, context, label, config.budget_tokens, spans.measure(config)))
        if with_drafts:
            for label in ("perfect drafts", "prompt lookup"):
                for predictor in ("layer-ahead", "lookahead"):
                    figures = _with_drafts(spans, settings(512, predictor=predictor), label)
                    table.add(Cell.of(name, context, f"{label}, {predictor}", 512, figures))
            table.add(Cell.of(name, context, "no drafts, lookahead", 512, spans.measure(settings(512, predictor="lookahead"))))


def _with_drafts(spans: Spans, config: OasisConfig, kind: str) -> Figures:
    replays = []
    for prompt, ids in zip(spans.prompts, spans.ids.split(1), strict=True):
        if kind == "perfect drafts":
            drafted = drafts.perfect(ids, DRAFT_TOKENS)
        else:
            drafted = drafts.prompt_lookup(prompt.ids, ids, DRAFT_TOKENS)
        replays.append(replay(spans.model, [prompt], drafted.ids, config, drafted.rows, drafted.accepted))
    return spans.compare(replays, config)


def _short_rows(table: Table) -> Iterator[Row]:
    kl, error = table.mean(4096, "defaults", 512), table.error(4096, "defaults", 512)
    exact = table.mean(4096, "exact query", 512)
    yield at_most("kl-4k-512", f"4K, budget 512, defaults: KL (s.e. {error:.4f})", kl, "nats", 0.024)
    yield at_most("ratio-4k-512", "the same over the exact query with the same index", kl / exact, "", 1.2)
    yield at_least("top1-4k-512", "the same greedy token", table.mean(4096, "defaults", 512, "agreement"), "", 0.93)
    kl, error = table.mean(4096, "defaults", 1024), table.error(4096, "defaults", 1024)
    yield at_most("kl-4k-1024", f"4K, budget 1024, defaults: KL (s.e. {error:.4f})", kl, "nats", 0.007)
    yield at_least("top1-4k-1024", "the same greedy token", table.mean(4096, "defaults", 1024, "agreement"), "", 0.965)
    ours, oracle = table.mean(4096, "defaults", 512), table.mean(4096, "oracle", 512)
    paper, random = table.mean(4096, "minmax, previous", 512), table.mean(4096, "random", 512)
    yield at_least("order-oracle", f"budget 512: ours over the oracle ({oracle:.4f})", ours / oracle, "", 1.0)
    yield at_most("order-paper", f"budget 512: ours over minmax and previous ({paper:.4f})", ours / paper, "", 0.3)
    yield at_most("order-random", f"budget 512: minmax and previous over random ({random:.4f})", paper / random, "", 1.0)
    moved, read = (table.mean(4096, "defaults", 512, what) for what in ("moved", "read_in_place"))
    spread = [max(cell.most_moved[q] for cell in table.of(4096, "defaults", 512)) for q in range(4)]
    yield at_most(
        "moved-512",
        f"budget 512: blocks moved {moved:.2f} + read in place {read:.2f} per head and step; p50, p90, p99, max {spread}",
        moved + read,
        "blocks",
        2.5,
    )


def _size_rows() -> Iterator[Row]:
    """What the default summary takes, counted from its tensors after 8,000 tokens."""
    from oasiskv import KVManager, ModelShape

    shape = ModelShape(num_layers=2, query_heads=9, kv_heads=3, head_dim=64, dtype=torch.float16)
    with KVManager(shape, OasisConfig(budget_tokens=512, workers=0)) as manager:
        sequence = manager.create()
        torch.manual_seed(0)
        for count in (8000, 1):
            step = manager.begin_step([sequence], [count])
            for layer in range(2):
                queries, keys, values = (torch.randn(count, heads, 64).half() for heads in (9, 3, 3))
                step.attend(layer, queries, keys, values)
            step.commit()
        codes = sum(codes.numel() for codes in manager.rooms.summary._codes)  # type: ignore[attr-defined]
        share = codes / sequence.length / (2 * 3 * 4 * 64)
    yield at_most("summary-bytes", "device bytes of summaries over fp16 keys and values", share, "", 0.02)


def _draft_rows(table: Table) -> Iterator[Row]:
    for kind in ("perfect drafts", "prompt lookup"):
        for predictor, without in (("layer-ahead", "defaults"), ("lookahead", "no drafts, lookahead")):
            ours, base = table.mean(4096, f"{kind}, {predictor}", 512), table.mean(4096, without, 512)
            pairs = zip(table.of(4096, f"{kind}, {predictor}", 512), table.of(4096, without, 512), strict=True)
            more = torch.tensor([a - b for with_, base_ in pairs for a, b in zip(with_.spans, base_.spans, strict=True)])
            error = float(more.std() / len(more) ** 0.5)
            yield at_most(
                f"{kind.replace(' ', '-')}-{predictor}",
                f"4K, budget 512, {kind}, {predictor}: KL {ours:.4f} less that without ({base:.4f}); bar: 2 s.e.",
                ours - base,
                "nats",
                2 * error,
            )


def _long_context_rows(table: Table) -> Iterator[Row]:
    for budget, bar in ((512, 0.020), (1024, 0.006)):
        kl, error = table.mean(8000, "defaults", budget), table.error(8000, "defaults", budget)
        oracle = f", oracle {table.mean(8000, 'oracle', budget):.4f}" if budget == 512 else ""
        what = f"8K, budget {budget}, defaults: KL (s.e. {error:.4f}{oracle})"
        yield at_most(f"kl-8k-{budget}", what, kl, "nats", bar)


def _long_generation(
    model: PreTrainedModel,
    tokenizer: Any,  # noqa: ANN401 - as above
    table: Table,
    names: tuple[str, ...],
) -> Iterator[Row]:
    """2,048 tokens after a 4K prompt: does fidelity drift, and does the oracle drift alike?"""
    kls: dict[str, list[torch.Tensor]] = {"defaults": [], "oracle": []}
    for name in names:
        spans = Spans.read(model, _tokens(tokenizer, name), 4096, LONG_TOKENS, 1, ["transform"], settings(512))
        for label, config in (("defaults", settings(512)), ("oracle", settings(512, **ORACLE))):
            figures = spans.measure(config)
            kls[label].append(figures.kl)
            table.add(Cell.of(name, 4096 + LONG_TOKENS, f"long, {label}", 512, figures))
    ratios = {label: torch.cat(kl) for label, kl in kls.items()}
    drift = {label: float(kl[:, -512:].mean() / kl[:, :512].mean()) for label, kl in ratios.items()}
    yield at_most(
        "drift",
        f"{LONG_TOKENS} tokens after 4K: KL of the last 512 over the first 512 (oracle: {drift['oracle']:.2f})",
        drift["defaults"],
        "",
        1.2,
    )


def _retrieval(model: PreTrainedModel, tokenizer: Any) -> Iterator[Row]:  # noqa: ANN401 - as above
    """Facts that full attention finds in 4K and 8K documents."""
    prose = texts.read("essays")

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    configs = {"defaults": settings(512), "oracle": settings(512, predictor="oracle")}
    outcomes: list[Outcome] = []
    for length, seeds in ((3900, (1, 2)), (7800, (1,))):
        for seed in seeds:
            outcomes += measure_retrieval(model, tokenizer, configs, documents(prose, length, count, seed))
    for kind in ("passkey", "multi-key", "json", "table"):
        found = [outcome for outcome in outcomes if outcome.full and outcome.kind == kind]
        kept, oracle = (sum(outcome.sparse[name] for outcome in found) for name in ("defaults", "oracle"))
        yield at_least(
            f"retrieval-{kind}",
            f"{kind}: of {len(found)} items that full attention gets (oracle: {oracle})",
            kept,
            "",
            len(found),
        )
    total = sum(outcome.full for outcome in outcomes)
    yield at_least("retrieval-items", "items that full attention gets", total, "", 60)


def options(parser: argparse.ArgumentParser) -> None:
    """More options than every benchmark has."""
    parser.add_argument("--spans", type=int, default=4, help="spans per text (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=(*PARTS, "grid"), help="measure these parts")
    parser.add_argument("--texts", nargs="+", choices=tuple(texts.QUALITY_TEXTS), help="on these texts (all)")
    parser.add_argument("--contexts", nargs="+", type=int, default=(2048, 4096, 8000), help="tokens of context of the grid")
    parser.add_argument("--cells", metavar="FILE", help="write every measured cell, a line of JSON each")
    parser.add_argument("--plots", metavar="DIR", help="draw the plots of the documentation")


if __name__ == "__main__":
    raise SystemExit(run("quality", __doc__ or "", measure, options))
