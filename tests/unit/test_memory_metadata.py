"""The memory metadata store on a clock of its own."""

import pytest

from oasiskv.testing.tier_kit.suite import key
from oasiskv.tiers.memory_metadata import MemoryMetadata

pytestmark = pytest.mark.anyio


async def test_things_run_out_to_the_moment():
    now = 0.0
    async with MemoryMetadata(clock=lambda: now) as store:
        await store.publish([key(1)], "a", 10.0)
        await store.put("h", b"value", 10.0)
        await store.acquire("n", "a", 10.0)
        now = 9.999
        assert await store.locate([key(1)]) == [["a"]]
        assert await store.acquire("n", "b", 10.0) is None
        now = 10.0
        assert await store.locate([key(1)]) == [[]]
        assert await store.claim("h") is None
        assert (await store.acquire("n", "b", 10.0)).holder == "b"


async def test_what_has_run_out_is_forgotten_in_time():
    now = 0.0
    async with MemoryMetadata(clock=lambda: now) as store:
        for number in range(100):
            await store.publish([key(number)], "a", 1.0)
            await store.put(str(number), b"value", 1.0)
            await store.acquire(str(number), "a", 1.0)
        await store.publish([key(0)], "b", 1000.0)
        now = 100.0
        assert await store.locate([key(0)]) == [["b"]]
        held = [store._owners, store._handoffs, store._grants]
        assert [len(table) for table in held] == [1, 0, 0]
