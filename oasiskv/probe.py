"""Measures how fast blocks move: out of host memory, to and from a GPU, and through a tier store."""

from __future__ import annotations

import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import anyio
import torch

from . import ops
from .errors import IntegrityError, TierUnavailable
from .tiers import Outcome, Read, SegmentKey, SegmentLayout, TierStore
from .types import ModelShape

SPANS = (1, 4, 16)
"""Blocks per read: adjacent blocks of a head can be read as one, so that larger reads cost fewer of them."""

MOST_CALL_BYTES = 32 << 20
"""Blocks of a call beyond these bytes are left out: they would tell nothing new, and a slow tier would take minutes."""

_ARENA_BYTES = 256 << 20
"""Far more than the processor's caches hold."""

_STORED_BYTES = 128 << 20
"""Most that a tier is given to read from."""

_SEGMENT_BLOCKS = 64
_CLEAN_UP_S = 5
_SPACE = "oasiskv-doctor"


@dataclass(frozen=True)
class Measurement:
    """Calls of one kind, one after another.

    Attributes:
        tier: where blocks come from, or go to.
        direction: "load" or "store", as seen from the GPU.
        read_bytes: of each contiguous piece.
        batch: pieces per call.
        calls: how many were timed.
        bytes_per_s: over all of them.
        median_s, worst_s: of one call.
    """

    tier: str
    direction: str
    read_bytes: int
    batch: int
    calls: int
    bytes_per_s: float
    median_s: float
    worst_s: float


class _Clock:
    """Times calls until there were enough."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds
        self.times: list[float] = []

    def running(self) -> bool:
        """Whether another call is wanted; the first two always are, since the first one is left out."""
        return len(self.times) < 2 or time.perf_counter() < self._end

    def add(self, seconds: float) -> None:
        """Count a call."""
        self.times.append(seconds)

    def measured(self, tier: str, direction: str, read_bytes: int, batch: int) -> Measurement:
        """What the calls come to."""
        # The first call pays for what the others find ready: memory that is mapped, files that are open.
        times = self.times[1:] or self.times
        rate = read_bytes * batch * len(times) / sum(times)
        return Measurement(tier, direction, read_bytes, batch, len(times), rate, statistics.median(times), max(times))


def spans(batch: int) -> Iterator[tuple[int, int]]:
    """Blocks per read, and reads per call, for calls of about `batch` blocks; a single block first, for its latency."""
    yield 1, 1
    for span in SPANS:
        if batch > 1:
            yield span, max(1, batch // span)


def probe_host(shape: ModelShape, block_size: int, batch: int, seconds: float) -> Iterator[Measurement]:
    """Random blocks out of the arena into a pool, both in host memory, as transfers do without a GPU."""
    yield from _probe_copies("host memory", "load", torch.device("cpu"), shape, block_size, batch, seconds, upward=True)


def probe_device(shape: ModelShape, block_size: int, batch: int, seconds: float) -> Iterator[Measurement]:
    """The same between a page-locked arena and a GPU, in both directions."""
    device = torch.device("cuda")
    yield from _probe_copies("host to GPU", "load", device, shape, block_size, batch, seconds, upward=True)
    yield from _probe_copies("GPU to host", "store", device, shape, block_size, batch, seconds, upward=False)


def _probe_copies(
    tier: str,
    direction: str,
    device: torch.device,
    shape: ModelShape,
    block_size: int,
    batch: int,
    seconds: float,
    upward: bool,
) -> Iterator[Measurement]:
    on_gpu = device.type == "cuda"
    for span, reads in spans(batch):
        size = (2, block_size * span, shape.head_dim)
        piece_bytes = shape.slot_bytes(block_size * span)
        places = max(reads, _ARENA_BYTES // piece_bytes)
        arena = torch.zeros((places, *size), dtype=shape.dtype, pin_memory=on_gpu)
        pool = torch.zeros((reads, *size), dtype=shape.dtype, device=device)
        targets = torch.arange(reads, device=device)
        clock = _Clock(seconds)
        while clock.running():
            chosen = torch.randperm(places)[:reads].to(device)
            sides = (arena, pool, chosen, targets) if upward else (pool, arena, targets, chosen)
            clock.add(_timed(partial(ops.copy_blocks, *sides), on_gpu))
        yield clock.measured(tier, direction, piece_bytes, reads)


def _timed(call: Callable[[], None], on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def segment_layout(shape: ModelShape, block_size: int) -> SegmentLayout:
    """Of the segments that a tier is probed with."""
    dtype = str(shape.dtype).removeprefix("torch.")
    return SegmentLayout(shape.kv_heads, _SEGMENT_BLOCKS, block_size, shape.head_dim, dtype)


async def probe_tier(store: TierStore, name: str, batch: int, seconds: float, done: Callable[[Measurement], None]) -> None:
    """Store segments of random bytes, read random blocks of them, and delete them, whatever happens.

    What was stored just now is read: a cache below the tier, such as the page cache under files, may answer.

    Args:
        store: not open yet; it is opened and closed.
        name: for the measurements.
        batch: blocks that are read in a call.
        seconds: for each measurement.
        done: takes the measurements as they are made.

    Raises:
        TierError: of the store; `TierUnavailable` also if it does not find what it has just stored.
        IntegrityError: the store says that it has read what was stored, and it is something else.
    """
    async with store:
        probe = _TierProbe(store, name, batch)
        try:
            done(await probe.store(seconds))
            for span, reads in spans(batch):
                done(await probe.load(span, reads, seconds))
        finally:
            with anyio.move_on_after(_CLEAN_UP_S, shield=True):
                await store.delete(probe.keys)


class _TierProbe:
    def __init__(self, store: TierStore, name: str, batch: int) -> None:
        self.keys: list[SegmentKey] = []
        self._store = store
        self._name = name
        self._layout = store.layout
        self._payload = memoryview(os.urandom(store.layout.segment_bytes))
        # Whole pages, which suits every store's alignment_bytes, and is registered as one region.
        self._region = memoryview(mmap.mmap(-1, self._call_bytes(batch)))
        store.register_buffer(self._region)

    def _call_bytes(self, batch: int) -> int:
        return max(span * reads for span, reads in spans(batch)) * self._layout.slot_bytes

    async def store(self, seconds: float) -> Measurement:
        """One segment per call, until there are enough."""
        clock = _Clock(seconds)
        most = max(1, min(_STORED_BYTES, (self._store.limit_bytes or _STORED_BYTES) // 2) // self._layout.segment_bytes)
        while clock.running() and len(self.keys) < most:
            key = SegmentKey(_SPACE, os.urandom(16), layer=0)
            self.keys.append(key)
            start = time.perf_counter()
            await self._store.store([(key, self._payload)])
            clock.add(time.perf_counter() - start)
        return clock.measured(self._name, "store", self._layout.segment_bytes, 1)

    async def load(self, span: int, reads: int, seconds: float) -> Measurement:
        """Random reads of `span` blocks, `reads` at a time."""
        clock = _Clock(seconds)
        piece = span * self._layout.slot_bytes
        most = self._store.traits.max_batch or reads
        buffers = [self._region[number * piece : (number + 1) * piece] for number in range(reads)]
        while clock.running():
            batch = [Read(random.choice(self.keys), self._offset(span), buffer) for buffer in buffers]
            start = time.perf_counter()
            outcomes = [
                outcome for first in range(0, reads, most) for outcome in await self._store.load(batch[first : first + most])
            ]
            clock.add(time.perf_counter() - start)
            self._check(batch, outcomes)
        return clock.measured(self._name, "load", piece, reads)

    def _offset(self, span: int) -> int:
        head = random.randrange(self._layout.kv_heads)
        return self._layout.offset(head, random.randrange(self._layout.num_blocks - span + 1))

    def _check(self, batch: list[Read], outcomes: list[Outcome]) -> None:
        for read, outcome in zip(batch, outcomes, strict=True):
            if outcome is not Outcome.HIT:
                raise TierUnavailable(
                    f"tier {self._name} answers {outcome.name} for a segment that it has just stored; "
                    "look for a limit below 256 MiB, or a medium that loses data"
                )
            if read.into != self._payload[read.offset : read.offset + read.into.nbytes]:
                raise IntegrityError(f"tier {self._name} gave other bytes than were stored, and called it a hit")
