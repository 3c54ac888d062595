"""`oasiskv generate`: continue a long text with a HuggingFace model and a bounded working set."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import OasisConfig
from ..errors import InputError
from ..tiers.location import parse_bytes
from ..trace import Trace
from .inputs import check_device, load_session, read_file, read_sample

if TYPE_CHECKING:
    from ..adapters.hf.run import Report

PREFILL_CHUNK = 1024
"""Prompt tokens per forward: small enough for a progress bar that moves."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    defaults = OasisConfig()
    parser = commands.add_parser(
        "generate",
        help="continue a text from a file",
        description="Continue a text with a HuggingFace model, keeping a fixed number of KV blocks per head on the device.",
    )
    parser.add_argument("--model", required=True, help="directory or hub name of a causal language model, or 'smollm2'")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt-file", type=Path, help="the text to continue, UTF-8; '-' reads standard input")
    source.add_argument("--sample-text", metavar="NAME", help="a text that is installed here, such as manual or argparse")
    parser.add_argument("--max-prompt-tokens", type=int, help="keep only this many tokens of the text, from its start")
    parser.add_argument("--question", help="put after the text, and the whole through the model's chat template")
    parser.add_argument(
        "--budget", type=int, default=defaults.budget_tokens, help="tokens per head on the device (%(default)s)"
    )
    parser.add_argument("--block-size", type=int, default=defaults.block_size, help="tokens per block (%(default)s)")
    parser.add_argument("--window", type=int, default=defaults.window_tokens, help="recent tokens that stay (%(default)s)")
    parser.add_argument("--summary", default=defaults.summary, help="key summary that ranks blocks (%(default)s)")
    parser.add_argument("--predictor", default=defaults.predictor, help="lookahead predictor (%(default)s)")
    parser.add_argument("--correction", type=int, default=defaults.correction_blocks, help="blocks read in place (%(default)s)")
    parser.add_argument("--arena", metavar="SIZE", help="most host memory for KV, such as 512MiB (what the machine has)")
    parser.add_argument(
        "--tier",
        metavar="LOCATION",
        action="append",
        help="a store below it, such as file:/var/cache/kv?limit=20GiB; repeatable",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens to write (%(default)s)")
    parser.add_argument("--draft", metavar="prompt-lookup|MODEL", help="speculate with n-grams of the prompt, or a small model")
    parser.add_argument("--draft-tokens", type=int, default=4, help="draft tokens per step (%(default)s)")
    parser.add_argument("--compare", action="store_true", help="run full attention beside it and report how they differ")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the model (%(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="where the model runs (%(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write what ran when, for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text and table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    config = OasisConfig(
        budget_tokens=options.budget,
        block_size=options.block_size,
        window_tokens=options.window,
        summary=options.summary,
        predictor=options.predictor,
        correction_blocks=options.correction,
        arena_bytes=_size("--arena", options.arena),
        tier=tuple(options.tier) if options.tier else None,
    )
    for name in ("max_new_tokens", "draft_tokens", "max_prompt_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if options.compare and options.draft:
        raise InputError("--compare steps both runs token by token, so it takes no --draft; run them one after the other")
    if options.trace is not None and not options.trace.absolute().parent.is_dir():
        raise InputError(f"--trace is {options.trace}, and there is no directory {options.trace.absolute().parent}")
    if options.trace is not None and options.trace.is_dir():
        raise InputError(f"--trace is {options.trace}, a directory; name a file")
    trace = Trace() if options.trace is not None else None
    check_device(options.device)
    text = _read(options)
    from .progress import Progress

    with Progress(quiet=options.json) as progress:
        progress.say(f"loading {options.model}")
        session = load_session(options.model, options.dtype, options.device, options.draft, options.draft_tokens)
        prompt = session.encode(text, options.question, options.max_prompt_tokens)
        progress.say(f"{prompt.shape[1]} prompt tokens, budget {config.budget_tokens} per head")
        write = session.compare if options.compare else session.generate
        try:
            report = write(prompt, config, options.max_new_tokens, PREFILL_CHUNK, progress, trace)
        finally:  # a run that failed or was interrupted is worth looking at, too
            if trace is not None:
                trace.save(options.trace)
                dropped = f"; {trace.dropped} older slices had no room" if trace.dropped else ""
                progress.say(f"{options.trace}: open it at ui.perfetto.dev{dropped}")
    _print(report, options)
    return 0


def _size(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    size = parse_bytes(text)
    if size is None:
        raise InputError(f"{option} is {text!r}; it must be a size such as 4096, 512MiB or 1.5GiB")
    return size


def _read(options: argparse.Namespace) -> str:
    if options.sample_text is not None:
        return read_sample(options.sample_text)
    return read_file(options.prompt_file, "--prompt-file")


def _print(report: Report, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(report.as_dict()))
        return
    from .progress import table

    table(report.rows())
