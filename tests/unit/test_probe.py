"""Measured rates are those of what is measured, and nothing is left behind."""

import anyio
import pytest
import torch

from oasiskv import ModelShape
from oasiskv.errors import IntegrityError, TierUnavailable
from oasiskv.probe import probe_host, probe_tier, segment_layout, spans
from oasiskv.tiers import Outcome
from oasiskv.tiers.memory import MemoryStore

pytestmark = pytest.mark.anyio

SHAPE = ModelShape(num_layers=2, query_heads=2, kv_heads=2, head_dim=16)
LAYOUT = segment_layout(SHAPE, 16)
RATE = 20e6


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


class Throttled(MemoryStore):
    """Moves `RATE` bytes per second, and remembers how it was called."""

    def __init__(self, layout, max_batch=None):
        super().__init__(layout)
        self._max_batch = max_batch
        self.batches, self.regions, self.deleted = [], [], []

    @property
    def traits(self):
        return type(super().traits)(max_batch=self._max_batch)

    def register_buffer(self, region):
        self.regions.append(region.nbytes)

    async def store(self, objects):
        await anyio.sleep(sum(data.nbytes for _, data in objects) / RATE)
        await super().store(objects)

    async def load(self, reads):
        self.batches.append(len(reads))
        await anyio.sleep(sum(read.into.nbytes for read in reads) / RATE)
        return await super().load(reads)

    async def delete(self, keys):
        self.deleted.extend(keys)
        await super().delete(keys)
        assert self.used_bytes == 0


async def probe(store, batch=64, seconds=0.2):
    measured = []
    await probe_tier(store, "slow", batch, seconds, measured.append)
    return measured


async def test_the_rate_of_a_throttled_store_is_found():
    store = Throttled(LAYOUT)
    measured = await probe(store, batch=256)
    assert [(one.direction, one.read_bytes, one.batch) for one in measured] == [
        ("store", LAYOUT.segment_bytes, 1),
        ("load", 2048, 1),
        ("load", 2048, 256),
        ("load", 8192, 64),
        ("load", 32768, 16),
    ]
    assert store.regions == [256 * LAYOUT.slot_bytes]
    for one in measured:
        if one.read_bytes * one.batch > 100_000:  # sleeps of less than 5 ms are mostly overhead
            assert 0.4 * RATE < one.bytes_per_s < 1.02 * RATE
            assert one.worst_s >= one.median_s >= 0.98 * one.read_bytes * one.batch / RATE


async def test_a_call_is_split_where_a_store_takes_fewer():
    store = Throttled(LAYOUT, max_batch=24)
    await probe(store, batch=64)
    assert max(store.batches) == 24
    assert 16 in store.batches  # 64 reads are 24, 24 and 16


async def test_nothing_is_left_in_the_store():
    store = Throttled(LAYOUT)
    await probe(store)
    assert store.deleted


async def test_nothing_is_left_when_it_is_cancelled():
    store = Throttled(LAYOUT)
    with anyio.move_on_after(0.1):
        await probe(store, seconds=30)
    assert store.deleted


class Forgetful(MemoryStore):
    async def load(self, reads):
        return [Outcome.MISS for _ in reads]


class Liar(MemoryStore):
    async def load(self, reads):
        return [Outcome.HIT for _ in reads]


async def test_a_store_that_forgets_is_not_measured():
    with pytest.raises(TierUnavailable, match="tier slow answers MISS"):
        await probe(Forgetful(LAYOUT))


async def test_a_store_that_gives_other_bytes_is_found_out():
    with pytest.raises(IntegrityError, match="other bytes"):
        await probe(Liar(LAYOUT))


async def test_no_more_is_stored_than_half_of_the_limit():
    store = MemoryStore(LAYOUT, 5 * LAYOUT.segment_bytes)
    measured = await probe(store, seconds=0.05)
    assert measured[0].calls <= 2


def test_reads_grow_while_bytes_per_call_stay():
    assert list(spans(64)) == [(1, 1), (1, 64), (4, 16), (16, 4)]
    assert list(spans(1)) == [(1, 1)]


def test_host_memory_is_measured_in_reads_of_every_size():
    measured = list(probe_host(SHAPE, 16, 32, 0.02))
    assert [(one.read_bytes, one.batch) for one in measured] == [(2048, 1), (2048, 32), (8192, 8), (32768, 2)]
    assert all(one.bytes_per_s > 1e6 and one.calls >= 1 for one in measured)


def test_the_layout_of_segments_is_the_models():
    shape = ModelShape(num_layers=1, query_heads=8, kv_heads=4, head_dim=64, dtype=torch.bfloat16)
    assert segment_layout(shape, 16).slot_bytes == shape.slot_bytes(16)
