"""`oasiskv eval`: is a workload sparse, and what budget does it need?

Spans of the texts are read once with full attention. Every budget is then replayed on them, and its next-token distributions
are compared with those of full attention. `verdict` says what is made of it.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__, registry
from ..abc import KeySummary, Predictor
from ..config import OasisConfig
from ..errors import InputError
from .inputs import check_device, load_session, read_file, read_sample
from .verdict import Result, Text

if TYPE_CHECKING:
    from ..adapters.hf.measure import Figures, Spans
    from ..adapters.hf.run import Session
    from .progress import Progress


BUDGETS = (256, 512, 1024, 2048)
"""Tried if none are named, as far as they are below the context."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    defaults = OasisConfig()
    parser = commands.add_parser(
        "eval",
        help="measure what budget a model and a text need",
        description="Replay budgets on spans of a text, and compare the next-token distributions with those of full attention.",
    )
    parser.add_argument("--model", required=True, help="directory or hub name of a causal language model, or 'smollm2'")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text", type=Path, action="append", metavar="FILE", help="a text, UTF-8; '-' reads standard input; may be repeated"
    )
    source.add_argument(
        "--sample-text", action="append", metavar="NAME", help="a text that is installed here, such as manual or argparse"
    )
    standard = ",".join(map(str, BUDGETS))
    parser.add_argument(
        "--budgets", help=f"tokens per head on the device, with commas between ({standard}, those below the context)"
    )
    parser.add_argument("--context", type=int, default=4096, help="tokens of each span before the measured ones (%(default)s)")
    parser.add_argument("--spans", type=int, default=4, help="spans of each text (%(default)s)")
    parser.add_argument("--span-tokens", type=int, default=64, help="tokens measured in each span (%(default)s)")
    parser.add_argument("--block-size", type=int, default=defaults.block_size, help="tokens per block (%(default)s)")
    parser.add_argument("--window", type=int, default=defaults.window_tokens, help="recent tokens that stay (%(default)s)")
    parser.add_argument("--summary", default=defaults.summary, help="key summary that ranks blocks (%(default)s)")
    parser.add_argument("--predictor", default=defaults.predictor, help="predictor (%(default)s)")
    parser.add_argument("--correction", type=int, default=defaults.correction_blocks, help="blocks read in place (%(default)s)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the model (%(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="where the model runs (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures; FILE ends in .png or .svg")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    _check(options)
    configs = _configs(options)
    check_device(options.device)
    texts = _read(options)
    from ..adapters.hf import measure
    from .progress import Progress

    start = time.perf_counter()
    with Progress(quiet=options.json) as progress:
        progress.say(f"loading {options.model}")
        session = load_session(options.model, options.dtype, options.device)
        ids = _encode(session, texts, options)
        counts = {name: min(options.spans, own.shape[1] - _needed(options) + 1) for name, own in ids.items()}
        progress.start("reading with full attention", sum(counts.values()) * (_needed(options) - 1))
        parts = [
            measure.Spans.read(
                session.model,
                own,
                options.context,
                options.span_tokens,
                counts[name],
                [options.summary],
                configs[0],
                progress.advance,
            )
            for name, own in ids.items()
        ]
        progress.finish()
        figures = _replay(measure.Spans.join(parts), configs, progress)
    result = Result(
        figures=figures,
        texts=[
            Text(name, own.shape[1], counts[name], counts[name] * _needed(options) > own.shape[1]) for name, own in ids.items()
        ],
        model=_model(session, options, len(parts[0].prompts[0].keys)),
        machine=_machine(session),
        settings={
            name: getattr(options, name)
            for name in ("context", "spans", "span_tokens", "summary", "predictor", "block_size", "window", "correction")
        },
        seconds=time.perf_counter() - start,
    )
    if options.plot is not None:
        from .plot import draw

        draw(result.figures, options.plot)
    _print(result, options)
    return 0


def _configs(options: argparse.Namespace) -> list[OasisConfig]:
    """One per budget, smallest first."""
    # The last token of the context is decoded, so it does not count.
    below = options.context - 1
    if options.budgets is None:
        budgets = [budget for budget in BUDGETS if budget < below]
        if not budgets:
            raise InputError(f"--context is {options.context}, and --budgets begins at {BUDGETS[0]}; name smaller --budgets")
    else:
        budgets = _parse(options.budgets)
    large = [str(budget) for budget in budgets if budget >= below]
    if large:
        raise InputError(
            f"--budgets has {', '.join(large)}, and --context is {options.context}: such a budget holds the whole context, and "
            f"nothing would be sparse; take budgets below {below}, or a larger --context"
        )
    return [
        OasisConfig(
            budget_tokens=budget,
            block_size=options.block_size,
            window_tokens=options.window,
            summary=options.summary,
            predictor=options.predictor,
            correction_blocks=options.correction,
        )
        for budget in budgets
    ]


def _parse(budgets: str) -> list[int]:
    try:
        return sorted({int(part) for part in budgets.split(",")})
    except ValueError:
        raise InputError(
            f"--budgets is {budgets!r}; it must be whole numbers with commas between them, such as 256,512,1024"
        ) from None


def _check(options: argparse.Namespace) -> None:
    """What else can be wrong before a model is loaded."""
    for name, least in (("context", 2), ("spans", 1), ("span_tokens", 1)):
        value = getattr(options, name)
        if value < least:
            raise InputError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    registry.load(registry.KEY_SUMMARIES, options.summary, KeySummary)
    registry.load(registry.PREDICTORS, options.predictor, Predictor)
    if options.plot is not None:
        from .plot import check

        check(options.plot)


def _read(options: argparse.Namespace) -> dict[str, str]:
    """The texts, by name."""
    if options.sample_text is not None:
        return {name: read_sample(name) for name in options.sample_text}
    return {str(path): read_file(path, "--text") for path in options.text}


def _needed(options: argparse.Namespace) -> int:
    """Tokens of a span."""
    return int(options.context + options.span_tokens)


def _encode(session: Session, texts: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Token ids of the texts, `(1, num_tokens)`. Raises `InputError` if the model or a text is too short for a span."""
    needed = _needed(options)
    both = f"--context {options.context} and --span-tokens {options.span_tokens} need {needed}"
    longest = getattr(session.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and longest < needed:
        raise InputError(f"the model reads {longest} tokens, and {both}; {_shorter(longest, options)}")
    encoded = {}
    for name, text in texts.items():
        ids = session.tokenizer(text, return_tensors="pt", verbose=False).input_ids
        if ids.shape[1] < needed:
            raise InputError(
                f"the text {name} has {ids.shape[1]} tokens, and {both}; take a longer text, or "
                f"{_shorter(ids.shape[1], options)}"
            )
        encoded[name] = ids.to(session.model.device)
    return encoded


def _shorter(tokens: int, options: argparse.Namespace) -> str:
    """What to do if there are only so many tokens."""
    context = tokens - options.span_tokens
    return f"use --context {context} or less" if context >= 2 else "use a smaller --context and --span-tokens"


def _replay(spans: Spans, configs: Sequence[OasisConfig], progress: Progress) -> dict[int, Figures]:
    figures = {}
    progress.start("replaying", len(configs), unit="budgets")
    for config in configs:
        figures[config.budget_tokens] = spans.measure(config)
        progress.advance(1)
    progress.finish()
    return figures


def _model(session: Session, options: argparse.Namespace, full_attention_layers: int) -> dict[str, Any]:
    config = session.model.config.get_text_config(decoder=True)
    return {
        "name": options.model,
        "type": config.model_type,
        "parameters": session.model.num_parameters(),
        "dtype": options.dtype,
        "layers": config.num_hidden_layers,
        "full_attention_layers": full_attention_layers,
    }


def _machine(session: Session) -> dict[str, Any]:
    import torch
    import transformers

    device = session.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "device": name,
        "system": platform.platform(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "oasiskv": __version__,
    }


def _processor() -> str:
    """The CPU's name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _print(result: Result, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(result.as_dict()))
        return
    from .progress import table

    table(result.rows())
    for line in result.lines():
        print(line)
