"""Small segments for tests of the file tier: what is in each follows from its number."""

import random
from functools import cache

from oasiskv.tiers import Outcome, Read, SegmentKey, SegmentLayout

LAYOUT = SegmentLayout(kv_heads=2, num_blocks=4, block_size=8, head_dim=16, dtype="bfloat16")
"""8 slots of 512 bytes."""


def key(number):
    return SegmentKey("model_a", number.to_bytes(16, "big"), number % 5)


@cache
def content(number):
    return random.Random(number).randbytes(LAYOUT.segment_bytes)


async def store_all(store, numbers):
    await store.store([(key(number), memoryview(content(number))) for number in numbers])


async def read(store, number, offset, size):
    buffer = bytearray(size)
    (outcome,) = await store.load([Read(key(number), offset, memoryview(buffer))])
    return outcome, bytes(buffer)


async def whole(store, number):
    """The content of a segment, or how reading it ended."""
    outcome, data = await read(store, number, 0, LAYOUT.segment_bytes)
    return data if outcome is Outcome.HIT else outcome


def disk_bytes(folder):
    """What all files of a folder really take."""
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())
