"""What lies below the pool: gathering from the arena, the file tier, and decoding the real SmolLM2 with its KV in a file.

Everything is measured in turns, and medians are compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median

import numpy as np
import torch

from oasiskv import ModelShape, ops
from oasiskv.host_memory import HostMemory

from .file_tier import file_rows
from .report import Row, at_least, run
from .tier_decode import decode_rows

SHAPE = ModelShape(num_layers=1, query_heads=8, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
BLOCK_SIZE = 16
SLOTS = 1 << 16
"""Of 8 KiB: half a GiB, which no cache holds."""


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All rows."""
    yield _gather_row(options)
    yield from file_rows(options)
    if not options.no_model:
        yield from decode_rows(options)


def _gather_row(options: argparse.Namespace) -> Row:
    """Scattered blocks of the arena to a pool on the host, beside `numpy.take`, which is a memcpy for each block."""
    count = 1 << 12
    arena = HostMemory(SHAPE, BLOCK_SIZE, SLOTS).layers[0]
    pool = torch.zeros((count, *arena.shape[1:]), dtype=arena.dtype)
    arena.zero_()
    source, target = arena.view(torch.uint8).flatten(1).numpy(), pool.view(torch.uint8).flatten(1).numpy()
    places = torch.arange(count)[None, None]
    seconds: dict[str, list[float]] = {"memcpy": [], "gather": []}
    torch.set_num_threads(1)
    for turn in range(options.turns + 1):
        chosen = torch.randperm(SLOTS)[:count]
        for kind in sorted(seconds, reverse=bool(turn % 2)):
            start = time.perf_counter()
            if kind == "memcpy":
                np.take(source, chosen.numpy(), axis=0, out=target, mode="clip")
            else:
                ops.copy_blocks(arena, pool, chosen[None, None], places)
            if turn:
                seconds[kind].append(time.perf_counter() - start)
    rate = pool.numel() * pool.itemsize / median(seconds["gather"]) / 1e9
    share = 100 * median(seconds["memcpy"]) / median(seconds["gather"])
    return at_least("host-gather", f"host: gather of 8 KiB blocks at {rate:.1f} GB/s beside memcpy", share, "%", 90)


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", help="where files are written, 1 GiB: on the disk that is to be measured")
    parser.add_argument("--threads", type=int, default=4, help="that read, in the file tier and beside it")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--no-model", action="store_true", help="leave decoding out, which takes some minutes")


if __name__ == "__main__":
    raise SystemExit(run("tiers", __doc__ or "", measure, _more_options))
