"""A memory store that fails, hangs or stalls when a test says so, and small segments for it."""

from __future__ import annotations

import threading

import anyio

from oasiskv.tiers import Read, SegmentKey, SegmentLayout
from oasiskv.tiers.memory import MemoryStore
from oasiskv.tiers.segments import TierTraits

LAYOUT = SegmentLayout(kv_heads=2, num_blocks=2, block_size=2, head_dim=4)
SLOT = LAYOUT.slot_bytes


def key(number, layer=0):
    return SegmentKey("tests", number.to_bytes(16, "big"), layer)


def segment(number, size=LAYOUT.segment_bytes):
    """Bytes that differ from slot to slot and from segment to segment."""
    return memoryview(bytes((number * 31 + place // SLOT * 7 + place) % 251 for place in range(size)))


def entry(number):
    return (key(number), segment(number))


def buffer(slots=1):
    return memoryview(bytearray(slots * SLOT))


def read(number, slot=0, slots=1):
    return Read(key(number), slot * SLOT, buffer(slots))


class Moody(MemoryStore):
    """`error` is raised by every call; `hang` is waited for and can be cancelled; `block` is waited for in a thread, which
    cannot. `calls` has the name and the size of each call."""

    def __init__(self, layout=LAYOUT, limit_bytes=None, max_batch=None):
        super().__init__(layout, limit_bytes)
        self.error = None
        self.hang = None
        self.block = None
        self.calls = []
        self._max_batch = max_batch

    @property
    def traits(self):
        return TierTraits(max_batch=self._max_batch)

    async def _mood(self, name, entries):
        self.calls.append((name, len(entries)))
        if self.hang is not None:
            await self.hang.wait()
        if self.block is not None:
            await anyio.to_thread.run_sync(self.block.wait, abandon_on_cancel=False)
        if self.error is not None:
            raise self.error

    async def store(self, objects):
        await self._mood("store", objects)
        await super().store(objects)

    async def load(self, reads):
        await self._mood("load", reads)
        return await super().load(reads)

    async def contains(self, keys):
        await self._mood("contains", keys)
        return await super().contains(keys)

    async def delete(self, keys):
        await self._mood("delete", keys)
        await super().delete(keys)


class Hang:
    """Something to wait for that another thread may end; works in any loop."""

    def __init__(self):
        self._over = threading.Event()

    def end(self):
        self._over.set()

    async def wait(self):
        while not self._over.is_set():
            await anyio.sleep(0.002)
