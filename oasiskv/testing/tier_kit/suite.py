"""What the parts of the kit share: how a suite makes its store, and segments to put into it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from ...tiers import Outcome, Read, SegmentKey, SegmentLayout, TierStore
from ..backends import OnEachBackend

LAYOUT = SegmentLayout(kv_heads=2, num_blocks=3, block_size=4, head_dim=8, dtype="float32")
"""6 slots of 256 bytes."""

POISON = 0xA5
"""What a buffer is full of before a call, and after it when the caller uses it for something else."""


def key(number: int, layer: int = 0) -> SegmentKey:
    """The key of the `number`-th segment of a layer."""
    return SegmentKey("kit", hashlib.blake2b(number.to_bytes(8, "big"), digest_size=16).digest(), layer)


def content(name: SegmentKey, layout: SegmentLayout = LAYOUT, slots: int | None = None) -> bytes:
    """The bytes that belong to a key, a whole segment unless `slots` says otherwise: the same each time."""
    count = layout.segment_bytes if slots is None else slots * layout.slot_bytes
    return random.Random(str(name)).randbytes(count)


def blank(count: int) -> memoryview:
    """A writable buffer of `count` bytes, full of poison."""
    return memoryview(bytearray([POISON]) * count)


class TierSuite(OnEachBackend):
    """Base of the kit's parts. A suite overrides `make`."""

    takes_limit = True
    """Whether `make` can give a store with a size limit. The tests of limits are skipped where it is false."""

    limit_bytes = 8 * LAYOUT.segment_bytes
    """The limit that these tests ask for. It must leave room for 3 segments of 1,536 bytes."""

    patience_s = 60.0
    """How long a test may take. A store that hangs is noticed after that."""

    closing_s = 5.0
    """How long closing may take while calls are under way."""

    quiet_s = 0.02
    """How long a buffer is watched for bytes that are written late."""

    def make(self, folder: Path, layout: SegmentLayout, limit_bytes: int | None) -> TierStore:
        """A store that is not open yet.

        Args:
            folder: an empty folder at first, of this test's own. Stores made for the same folder are the same store, opened
                again or twice; one that keeps nothing in files takes its name.
            layout: of the segments.
            limit_bytes: the size limit, or `None` for a store without one. Only numbers if `takes_limit`.
        """
        raise NotImplementedError("a conformance suite overrides make() to return a store that is not open")

    def damage(self, folder: Path, name: SegmentKey) -> bool:
        """Change what is stored of a segment, behind the store's back: a byte, or the length. Override it for a store whose
        medium can be reached. False, as by default, if it cannot; a test is skipped then."""
        return False

    @asynccontextmanager
    async def opened(
        self, folder: Path, layout: SegmentLayout = LAYOUT, limit_bytes: int | None = None
    ) -> AsyncIterator[TierStore]:
        """An open store, for a test that may not take longer than `patience_s`."""
        with anyio.fail_after(self.patience_s):
            async with self.make(folder, layout, limit_bytes) as store:
                yield store

    async def put(self, store: TierStore, names: Iterable[SegmentKey], slots: int | None = None) -> None:
        """Store what belongs to these keys, in as few calls as the store allows."""
        objects = [(name, memoryview(content(name, store.layout, slots))) for name in names]
        size = store.traits.max_batch or max(1, len(objects))
        for start in range(0, len(objects), size):
            await store.store(objects[start : start + size])

    async def read(self, store: TierStore, reads: Sequence[Read]) -> list[Outcome]:
        """Load, in as few calls as the store allows."""
        size = store.traits.max_batch or max(1, len(reads))
        outcomes: list[Outcome] = []
        for start in range(0, len(reads), size):
            outcomes += await store.load(reads[start : start + size])
        return outcomes

    async def get(self, store: TierStore, name: SegmentKey, start: int = 0, slots: int | None = None) -> bytes | Outcome:
        """The bytes of a range of slots, by default of a whole segment; the outcome if it is no hit."""
        total = self.layout_slots(store.layout)
        into = blank((total - start if slots is None else slots) * store.layout.slot_bytes)
        outcomes = await store.load([Read(name, start * store.layout.slot_bytes, into)])
        assert len(outcomes) == 1, f"one read gave {len(outcomes)} outcomes"
        return bytes(into) if outcomes[0] is Outcome.HIT else outcomes[0]

    @staticmethod
    def layout_slots(layout: SegmentLayout) -> int:
        """Slots of a whole segment."""
        return layout.kv_heads * layout.num_blocks

    async def assert_left_alone(self, store: TierStore, buffers: Iterable[memoryview]) -> None:
        """The caller uses these buffers again as soon as it may, and nobody else does."""
        held = list(buffers)
        while any(store.unsettled(buffer) for buffer in held):
            await anyio.sleep(0.001)
        for buffer in held:
            buffer[:] = bytes([POISON]) * buffer.nbytes
        await anyio.sleep(self.quiet_s)
        for buffer in held:
            assert bytes(buffer) == bytes([POISON]) * buffer.nbytes, "a buffer was written when its call was over"
