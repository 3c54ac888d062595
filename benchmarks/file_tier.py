"""The file tier beside raw reads of the same bytes, and what its checksums take: a part of `benchmarks.tiers`.

Each case is measured in turns, one of each kind after the other, and medians are compared. A case is a pattern of reading and
a state:

- *disk*: the page cache forgets the file before each turn. This is what the tier is for.
- *cached*: the page cache has all of it. What is left is the cost per read, as beside a disk that is as fast as memory.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from statistics import median
from unittest.mock import patch

import anyio

from oasiskv.tiers import Outcome, Read, SegmentKey, SegmentLayout
from oasiskv.tiers.file import FileStore
from oasiskv.tiers.file_checks import Checks

from .report import Row, at_least, at_most

LAYOUT = SegmentLayout(kv_heads=8, num_blocks=16, block_size=16, head_dim=128)
"""128 slots of 8 KiB: segments of 1 MiB."""

SEGMENT = LAYOUT.segment_bytes
PATTERNS = {"whole segments in order": SEGMENT, "64 KiB at random": 64 << 10}
BARS = {"disk": (80, 5), "cached": (50, 50)}
"""Least bandwidth beside raw reads, and what checksums may add to the time; per cent."""


@dataclass(frozen=True)
class Plan:
    """How much is measured: segments that are stored, bytes that each turn reads, turns, threads that read."""

    segments: int
    turn_bytes: int
    turns: int
    threads: int


def file_rows(options: argparse.Namespace) -> Iterator[Row]:
    """All of them."""
    plan = Plan(128, 16 << 20, 3, options.threads) if options.quick else Plan(1024, 64 << 20, options.turns, options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        yield from anyio.run(_file_rows, Path(folder), plan)


async def _file_rows(folder: Path, plan: Plan) -> list[Row]:
    rows = []
    async with FileStore(LAYOUT, folder, threads=plan.threads) as store:
        rows += await _store_rows(store, folder, plan)
        (path,) = folder.glob("*.data")  # so that a segment's number says where it lies
        for state in BARS:
            for pattern, size in PATTERNS.items():
                case = _Case(store, path, plan, state == "disk", size)
                seconds = await case.measure()
                rows += _reading_rows(state, pattern, plan, seconds)
    return rows


async def _store_rows(store: FileStore, folder: Path, plan: Plan) -> list[Row]:
    """Segments go to the store and to a file, 8 of them in turns."""
    data = memoryview(os.urandom(SEGMENT))
    seconds = {"raw": 0.0, "tier": 0.0}
    with (folder / "raw").open("wb", buffering=0) as file:
        for first in range(0, plan.segments, 8):
            start = time.perf_counter()
            os.pwritev(file.fileno(), [data] * 8, first * SEGMENT)
            middle = time.perf_counter()
            await store.store([(_key(number), data) for number in range(first, first + 8)])
            seconds["raw"] += middle - start
            seconds["tier"] += time.perf_counter() - middle
    (folder / "raw").unlink()
    raw, tier = (plan.segments * SEGMENT / seconds[kind] / 1e9 for kind in ("raw", "tier"))
    return [
        Row("file-store-raw", "file: writes into the page cache: raw", raw, "GB/s", "", True),
        Row("file-store-tier", "file: writes into the page cache: tier", tier, "GB/s", "", True),
        at_least("file-store-share", "file: writes into the page cache: tier beside raw", 100 * tier / raw, "%", 50),
    ]


def _key(number: int) -> SegmentKey:
    return SegmentKey("bench", number.to_bytes(16, "big"), 0)


class _Case:
    """Reads of one size, done in three ways by the same number of threads."""

    def __init__(self, store: FileStore, path: Path, plan: Plan, forget: bool, size: int) -> None:
        self._store = store
        self._plan = plan
        self._forget = forget
        self._size = size
        self._fd = os.open(path, os.O_RDONLY)
        self._room = memoryview(mmap(-1, plan.turn_bytes))
        self._room[:] = bytes(plan.turn_bytes)  # its pages exist before the first turn
        self._keys = [_key(number) for number in range(plan.segments)]
        self._chance = random.Random(0)

    async def measure(self) -> dict[str, float]:
        """Median seconds per turn by how it was read."""
        seconds: dict[str, list[float]] = {"raw": [], "tier": [], "unverified": []}
        if not self._forget:
            for start in range(0, self._plan.segments * SEGMENT, self._plan.turn_bytes):
                os.preadv(self._fd, [self._room], start)
        with ThreadPoolExecutor(self._plan.threads) as pool:
            for turn in range(self._plan.turns + 1):
                places = self._places()
                kinds = list(seconds)
                for kind in kinds[turn % 3 :] + kinds[: turn % 3]:
                    if self._forget:
                        os.fsync(self._fd)
                        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    took = self._raw(pool, places) if kind == "raw" else await self._tier(places, kind == "tier")
                    if turn:  # the first is for warming up
                        seconds[kind].append(took)
        os.close(self._fd)
        return {kind: median(measured) for kind, measured in seconds.items()}

    def _places(self) -> list[int]:
        """Where in the file the reads of a turn begin."""
        count = self._plan.turn_bytes // self._size
        if self._size == SEGMENT:
            first = self._chance.randrange(self._plan.segments - count + 1)
            return [(first + number) * SEGMENT for number in range(count)]
        return self._chance.sample(range(0, self._plan.segments * SEGMENT, self._size), count)

    def _buffer(self, position: int) -> memoryview:
        return self._room[position * self._size : (position + 1) * self._size]

    def _raw(self, pool: ThreadPoolExecutor, places: Sequence[int]) -> float:
        reads = [(self._buffer(position), place) for position, place in enumerate(places)]
        share = -(-len(reads) // self._plan.threads)
        shares = [reads[start : start + share] for start in range(0, len(reads), share)]

        def read(some: Sequence[tuple[memoryview, int]]) -> None:
            for buffer, place in some:
                if os.preadv(self._fd, [buffer], place) != self._size:
                    raise EOFError(place)

        start = time.perf_counter()
        list(pool.map(read, shares))
        return time.perf_counter() - start

    async def _tier(self, places: Sequence[int], verify: bool) -> float:
        reads = [
            Read(self._keys[place // SEGMENT], place % SEGMENT, self._buffer(position)) for position, place in enumerate(places)
        ]
        with nullcontext() if verify else patch.object(Checks, "hold", lambda *_: True):
            start = time.perf_counter()
            outcomes = await self._store.load(reads)
            took = time.perf_counter() - start
        if outcomes != [Outcome.HIT] * len(reads):
            raise ValueError("what was stored is not there")
        return took


def _reading_rows(state: str, pattern: str, plan: Plan, seconds: dict[str, float]) -> Iterator[Row]:
    name = f"file-{state}-{'segments' if 'segments' in pattern else 'ranges'}"
    what = f"file, {state}, {pattern}"
    least, most = BARS[state]
    yield Row(f"{name}-raw", f"{what}: raw", plan.turn_bytes / seconds["raw"] / 1e9, "GB/s", "", True)
    yield Row(f"{name}-tier", f"{what}: tier", plan.turn_bytes / seconds["tier"] / 1e9, "GB/s", "", True)
    share, unverified = (100 * seconds["raw"] / seconds[kind] for kind in ("tier", "unverified"))
    yield at_least(f"{name}-share", f"{what}: tier beside raw", share, "%", least)
    yield at_least(f"{name}-unverified", f"{what}: the same without checksums", unverified, "%", least)
    yield at_most(f"{name}-checks", f"{what}: what checksums add", 100 * (unverified / share - 1), "%", most)
