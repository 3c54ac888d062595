"""`oasiskv doctor`: how fast blocks move on this machine, and whether that is enough for a model."""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from dataclasses import asdict, dataclass
from importlib import metadata

import anyio
import torch

from .. import __version__, ops, probe
from ..config import OasisConfig
from ..demand import BUSY_GPU_BYTES_PER_S, Demand
from ..errors import InputError, IntegrityError, TierError
from ..probe import Measurement
from ..tiers import Location, TierStore
from ..tiers.opening import store_at
from ..topology import Machine, read_machine
from ..types import ModelShape
from .plain import Status, columns, size

MODELS = {"smollm2": (30, 3, 64, "float32"), "llama-8b": (32, 8, 128, "bfloat16")}
"""Layers, kv heads, head_dim and dtype of models that `--model` knows."""

_VERSIONS = ("torch", "numpy", "anyio", "xxhash", "transformers", "prometheus-client", "redis", "mooncake-transfer-engine")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    defaults = OasisConfig()
    parser = commands.add_parser(
        "doctor",
        help="measure what this machine and its tiers can feed",
        description="Measure how fast blocks move on this machine, out of host memory, to a GPU and through tier stores, and "
        "say which of them keep up with decoding.",
    )
    parser.add_argument("--tier", action="append", default=[], metavar="LOCATION", help="measure this tier; may be repeated")
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--model", choices=tuple(MODELS), default="llama-8b", help="its shape (%(default)s); the rest changes it"
    )
    model.add_argument("--layers", type=int, help="full-attention layers")
    model.add_argument("--kv-heads", type=int, help="kv heads per layer")
    model.add_argument("--head-dim", type=int, help="dimensions of a key")
    model.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of keys and values")
    use = parser.add_argument_group("how it is used")
    use.add_argument("--budget", type=int, default=defaults.budget_tokens, help="tokens per head on the device (%(default)s)")
    use.add_argument("--block-size", type=int, default=defaults.block_size, help="tokens per block (%(default)s)")
    use.add_argument("--context", type=int, default=32768, help="tokens of each sequence (%(default)s)")
    use.add_argument("--batch", type=int, default=1, help="sequences that decode together (%(default)s)")
    use.add_argument("--tokens-per-s", type=float, default=20.0, help="that each sequence shall write (%(default)s)")
    use.add_argument(
        "--new-blocks",
        type=float,
        default=float(defaults.max_new_blocks),
        help="blocks that a head loads per step: by default the most that max_new_blocks allows (%(default)s)",
    )
    parser.add_argument("--seconds", type=float, default=0.4, help="for each measurement (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Verdict:
    """Whether a tier keeps up: what it gives in reads of one block, as many as a layer loads in a step."""

    tier: str
    bytes_per_s: float
    tokens_per_s: float
    keeps_up: bool


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 if a tier could not be measured."""
    demand = read_demand(options)
    if not 0 < options.seconds <= 60:
        raise InputError(f"--seconds is {options.seconds}; it must be above 0 and at most 60")
    layout = probe.segment_layout(demand.shape, demand.config.block_size)
    stores = list(zip(tier_names(options.tier), [store_at(text, layout) for text in options.tier], strict=True))
    with Status(quiet=options.json) as status:
        machine = read_machine()
        measured, problems = _measure(demand, stores, options.seconds, status)
    verdicts = judge(demand, [one for one in measured if one.tier not in problems])
    if options.json:
        print(json.dumps(_as_dict(machine, demand, measured, problems, verdicts)))
    else:
        _print(machine, demand, measured, problems, verdicts)
    return 1 if problems else 0


def read_demand(options: argparse.Namespace) -> Demand:
    """What the options ask for. Raises `InputError` or `ConfigError`."""
    layers, kv_heads, head_dim, dtype = MODELS[options.model]
    heads = options.kv_heads if options.kv_heads is not None else kv_heads
    shape = ModelShape(
        num_layers=options.layers if options.layers is not None else layers,
        query_heads=heads,
        kv_heads=heads,
        head_dim=options.head_dim if options.head_dim is not None else head_dim,
        dtype=getattr(torch, options.dtype or dtype),
    )
    config = OasisConfig(budget_tokens=options.budget, block_size=options.block_size)
    return Demand(shape, config, options.context, options.batch, options.tokens_per_s, options.new_blocks)


def tier_names(locations: list[str]) -> list[str]:
    """Locations without their options, which may hold secrets; numbered where that makes two of them the same. Raises
    `ConfigError` for what is no location."""
    names: list[str] = []
    for location in map(Location.parse, locations):
        name = f"{location.name}:{location.path}"
        again = 1 + sum(other.partition(" (")[0] == name for other in names)
        names.append(name if again == 1 else f"{name} ({again})")
    return names


def _measure(
    demand: Demand, stores: list[tuple[str, TierStore]], seconds: float, status: Status
) -> tuple[list[Measurement], dict[str, str]]:
    shape, block_size = demand.shape, demand.config.block_size
    batch = min(demand.reads_per_call, max(1, probe.MOST_CALL_BYTES // demand.slot_bytes))
    measured: list[Measurement] = []
    problems: dict[str, str] = {}

    def done(one: Measurement) -> None:
        measured.append(one)
        status.say(f"{one.tier}: {one.direction} {size(one.read_bytes)} x {one.batch}, {size(one.bytes_per_s)}/s")

    status.say("host memory")
    for one in probe.probe_host(shape, block_size, batch, seconds):
        done(one)
    if torch.cuda.is_available():
        status.say("GPU")
        for one in probe.probe_device(shape, block_size, batch, seconds):
            done(one)
    for name, store in stores:
        status.say(name)
        try:
            anyio.run(probe.probe_tier, store, name, batch, seconds, done)
        except (TierError, IntegrityError) as error:  # what else there is to say about this machine is worth saying
            problems[name] = str(error)
    return measured, problems


def judge(demand: Demand, measured: list[Measurement]) -> list[Verdict]:
    """A verdict for each tier that blocks are loaded from, slowest last."""
    verdicts = []
    for tier in dict.fromkeys(one.tier for one in measured if one.direction == "load"):
        own = [one for one in measured if one.tier == tier and one.direction == "load" and one.read_bytes == demand.slot_bytes]
        rate = max(own, key=lambda one: one.batch).bytes_per_s
        verdicts.append(Verdict(tier, rate, demand.fed_tokens_per_s(rate), rate >= demand.bytes_per_s))
    return sorted(verdicts, key=lambda verdict: -verdict.bytes_per_s)


def _versions() -> dict[str, str]:
    found = {"oasiskv": __version__, "python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # optional, all of them but torch and numpy
    return found


def _as_dict(
    machine: Machine, demand: Demand, measured: list[Measurement], problems: dict[str, str], verdicts: list[Verdict]
) -> dict[str, object]:
    def finite(verdict: Verdict) -> dict[str, object]:
        endless = math.isinf(verdict.tokens_per_s)  # which JSON has no word for
        return {**asdict(verdict), "tokens_per_s": None if endless else verdict.tokens_per_s}

    return {
        "machine": asdict(machine),
        "versions": _versions(),
        "ops": ops.available(),
        "demand": {
            "slot_bytes": demand.slot_bytes,
            "new_blocks": demand.loaded_blocks,
            "reads_per_call": demand.reads_per_call,
            "step_bytes": demand.step_bytes,
            "bytes_per_s": demand.bytes_per_s,
        },
        "measurements": [asdict(one) for one in measured],
        "problems": problems,
        "verdicts": [finite(verdict) for verdict in verdicts],
    }


def _print(
    machine: Machine, demand: Demand, measured: list[Measurement], problems: dict[str, str], verdicts: list[Verdict]
) -> None:
    print("MACHINE")
    print(columns(_machine_rows(machine)))
    print("\nMEASURED, one call after another")
    head = ("tier", "direction", "read", "reads/call", "rate", "median call", "worst call")
    rows = [
        (
            one.tier,
            one.direction,
            size(one.read_bytes),
            str(one.batch),
            f"{one.bytes_per_s / 1e9:.3g} GB/s",
            f"{one.median_s * 1e3:.3g} ms",
            f"{one.worst_s * 1e3:.3g} ms",
        )
        for one in measured
    ]
    print(columns([head, *rows]))
    if not machine.gpus:
        print("no GPU is visible to torch, so nothing was measured to and from one")
    print("\nNEEDED")
    print(f"  {demand.arithmetic()}")
    print(f"  by a layer in a step: {demand.reads_per_call} reads of {size(demand.slot_bytes)}")
    print("\nVERDICT")
    for line in verdict_lines(demand, verdicts):
        print(f"  {line}")
    for name, problem in problems.items():
        print(f"  {name}: could not be measured: {problem}", file=sys.stderr)


def _machine_rows(machine: Machine) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("processor", f"{machine.processor}, {machine.usable_cores} of {machine.cores} cores usable"),
        ("memory", size(machine.memory_bytes)),
    ]
    for node in machine.nodes:
        distances = " ".join(map(str, node.distances))
        rows.append((f"NUMA node {node.number}", f"cores {node.cores}, {size(node.memory_bytes)}, distances {distances}"))
    for gpu in machine.gpus:
        where = f"NUMA node {gpu.numa_node}" if gpu.numa_node is not None else "no NUMA node named"
        rows.append(("GPU", f"{gpu.name}, {size(gpu.memory_bytes)}, {gpu.link or 'link not visible'}, {where}"))
    for device in ("cpu", "cuda") if machine.gpus else ("cpu",):
        served = [one[device] for one in ops.available().values()]
        native = served.count("native")
        rows.append((f"{device} ops", f"{native} native, {len(served) - native} reference"))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in _versions().items())))
    return rows


def verdict_lines(demand: Demand, verdicts: list[Verdict]) -> list[str]:
    """What to make of it, in words."""
    if not demand.step_bytes:
        return [f"{demand.context_tokens} tokens fit the budget of {demand.config.budget_tokens}: nothing is loaded"]
    target = demand.batch * demand.steps_per_s
    lines = []
    for verdict in verdicts:
        rates = f"gives {verdict.bytes_per_s / 1e9:.3g} GB/s where {demand.bytes_per_s / 1e9:.3g} GB/s are needed"
        if verdict.keeps_up:
            lines.append(f"{verdict.tier} keeps up: {rates}")
        else:
            affordable = demand.loaded_blocks * verdict.bytes_per_s / demand.bytes_per_s
            lines.append(
                f"{verdict.tier} CANNOT keep up: {rates}; enough for {verdict.tokens_per_s:,.0f} of {target:,.0f} tokens/s, "
                f"or for {affordable:.2g} new blocks per head and step"
            )
    busy = demand.fed_tokens_per_s(BUSY_GPU_BYTES_PER_S)
    lines.append(
        f"practice: a remote tier below {BUSY_GPU_BYTES_PER_S / 1e9:.0f} GB/s does not feed a busy GPU. In your figures that "
        f"is a GPU that writes {busy:,.0f} tokens/s; you ask for {target:,.0f}"
    )
    return lines
