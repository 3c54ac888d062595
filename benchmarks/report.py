"""How every benchmark reports: a table for people, one line of JSON for machines."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Row:
    """One measured line: `ok` says whether `value` meets `bar`."""

    id: str
    what: str
    value: float
    unit: str
    bar: str
    ok: bool


def at_most(id_: str, what: str, value: float, unit: str, bar: float) -> Row:
    """A row whose value must not exceed its bar."""
    return Row(id_, what, value, unit, f"<= {bar:g}", value <= bar)


def at_least(id_: str, what: str, value: float, unit: str, bar: float) -> Row:
    """A row whose value must reach its bar."""
    return Row(id_, what, value, unit, f">= {bar:g}", value >= bar)


def machine() -> str:
    """The processor, the threads and the torch that the figures belong to."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return f"{model}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def run(
    name: str,
    description: str,
    measure: Callable[[argparse.Namespace], Iterator[Row]],
    more_options: Callable[[argparse.ArgumentParser], None] = lambda _: None,
) -> int:
    """Parse the options, measure, print. The exit code is 1 if a row misses its bar."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--quick", action="store_true", help="fewer tokens: a check, not a figure to quote")
    more_options(parser)
    options = parser.parse_args()
    rows = []
    if not options.json:
        print(f"{name} on {machine()}")
    for row in measure(options):
        rows.append(row)
        if not options.json:
            mark = "ok" if row.ok else "MISSED"
            print(f"  {row.what:<78} {row.value:>10.4g} {row.unit:<10} {row.bar:<12} {mark}", flush=True)
        else:
            print(f"{row.id}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"benchmark": name, "machine": machine(), "rows": [asdict(row) for row in rows]}))
    return 0 if all(row.ok for row in rows) else 1
