"""The `oasiskv` command."""

from __future__ import annotations

import argparse
import sys

from .. import __version__
from ..errors import ConfigError, InputError, OasisError, PluginError
from . import calibrate, doctor, evaluate, generate


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code is 0, 1 for an error that the message explains, 2 for an option
    that cannot be right, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="oasiskv", description="Long contexts with a bounded KV working set on the device and the full KV in host memory."
    )
    parser.add_argument("--version", action="version", version=f"oasiskv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate.add_parser(commands)
    evaluate.add_parser(commands)
    calibrate.add_parser(commands)
    doctor.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (OasisError, OSError, ImportError) as error:
        print(f"oasiskv: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, InputError | ConfigError | PluginError) else 1
