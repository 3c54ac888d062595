"""`oasiskv calibrate`: fit the transform code of a model once, for all its texts."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import InputError
from .inputs import check_device, load_session, read_file, read_sample

DEFAULT_MAX_TOKENS = 32768
"""Where a model names no longest context."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "calibrate",
        help="fit the transform code of a model once, for all texts",
        description="Read texts with full attention, and write the statistics from which OasisConfig(calibration=FILE) makes "
        "its code. Without a calibration the code is fitted on the first text that turns sparse.",
    )
    parser.add_argument("--model", required=True, help="directory or hub name of a causal language model, or 'smollm2'")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, action="append", metavar="FILE", help="a text, UTF-8; may be repeated")
    source.add_argument(
        "--sample-text", action="append", metavar="NAME", help="an installed text, such as manual; may be repeated"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the calibration, ending in .npz")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens read of each text, from its start (%(default)s)")
    parser.add_argument("--max-tokens", type=int, help="longest text that the code shall serve (the model's longest context)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the model (%(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="where the model runs (%(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    if options.output.suffix != ".npz":
        raise InputError(f"--output is {options.output}; the file's name must end in .npz")
    if not options.output.absolute().parent.is_dir():
        raise InputError(f"--output is {options.output}, and there is no directory {options.output.absolute().parent}")
    for name, least in (("tokens", 256), ("max_tokens", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    check_device(options.device)
    texts = [read_sample(name) for name in options.sample_text or []] + [
        read_file(path, "--text") for path in options.text or []
    ]
    from ..adapters.hf.calibrate import calibrate
    from .progress import Progress

    with Progress(quiet=False) as progress:
        progress.say(f"loading {options.model}")
        session = load_session(options.model, options.dtype, options.device)
        ids = [session.encode(text, None, options.tokens) for text in texts]
        short = min(int(own.shape[1]) for own in ids)
        if short < 256:
            raise InputError(f"a text has {short} tokens; statistics need at least 256 of each")
        config = session.model.config.get_text_config(decoder=True)
        longest = options.max_tokens or getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_TOKENS
        progress.start("reading with full attention", sum(int(own.shape[1]) for own in ids))
        calibration = calibrate(session.model, ids, longest, progress.advance)
        progress.finish()
    calibration.save(options.output)
    read = sum(int(own.shape[1]) for own in ids)
    print(f"{options.output}: {len(calibration.layers)} layers, {len(ids)} texts, {read} tokens; for texts of {longest} tokens")
    return 0
