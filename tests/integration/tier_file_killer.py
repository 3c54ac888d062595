"""Kills a process that writes to a file tier, at random moments, and looks at what the next one finds.

`python -m tests.integration.tier_file_killer FOLDER ROUNDS SEED`. Each round is a forked child that writes and is killed, and
another one that checks; this process itself starts no thread, so that it may fork.
"""

import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

import anyio

from oasiskv.tiers import Outcome, Read, SegmentKey, SegmentLayout
from oasiskv.tiers.file import FileStore

LAYOUT = SegmentLayout(kv_heads=2, num_blocks=4, block_size=16, head_dim=64, dtype="float16")
SEGMENT = LAYOUT.segment_bytes
LIMIT = 96 * SEGMENT
_NUMBER = struct.Struct("<Q")


def key(number):
    return SegmentKey("killed", number.to_bytes(16, "big"), 0)


def content(number):
    return random.Random(number).randbytes(SEGMENT)


def make(folder):
    return FileStore(LAYOUT, folder, LIMIT, pack_bytes=12 * SEGMENT)


async def write(folder, first, report):
    """Store and delete until killed. Each number is reported when its `store` has returned."""
    chance = random.Random(first)
    async with make(folder) as store:
        os.write(report, b"open....")
        number = first
        while True:
            count = chance.randrange(1, 5)
            await store.store([(key(n), memoryview(content(n))) for n in range(number, number + count)])
            os.write(report, b"".join(_NUMBER.pack(n) for n in range(number, number + count)))
            number += count
            if chance.random() < 0.3:  # what is gone is not missed; the last 8 always stay
                await store.delete([key(chance.randrange(max(0, number - 60), max(1, number - 8)))])


async def check(folder, stored):
    """The last stored numbers are there, and whatever is there is right."""
    async with make(folder) as store:
        keys = [key(number) for number in range(stored + 8)]
        held = [number for number, there in enumerate(await store.contains(keys)) if there]
        assert set(range(max(0, stored - 8), stored)) <= set(held), f"of the last before {stored} there are only {held[-8:]}"
        assert len(held) * SEGMENT == store.used_bytes, "what the store counts is not what it holds"
        buffers = [bytearray(SEGMENT) for _ in held]
        outcomes = await store.load([Read(keys[n], 0, memoryview(into)) for n, into in zip(held, buffers, strict=True)])
        for number, into, outcome in zip(held, buffers, outcomes, strict=True):
            assert outcome is Outcome.HIT, f"{number} was found and is {outcome.value}"
            assert into == content(number), f"wrong bytes for {number}"
    taken = sum(path.stat().st_blocks * 512 for path in Path(folder).iterdir())
    assert taken < 1.3 * LIMIT + 64 * 4096, f"{taken} bytes on the disk"


def child(work):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except Exception as error:  # noqa: BLE001 - the parent sees the exit code, and people the line
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def main(folder, rounds, seed):
    chance = random.Random(seed)
    stored = 0
    for turn in range(rounds):
        reading, report = os.pipe()
        first = stored
        pid = child(lambda: anyio.run(write, folder, first, report))  # noqa: B023 - the child runs it at once
        os.close(report)
        # A third of the kills hit the opening, which clears up after the kill before.
        if chance.random() < 0.67:
            assert os.read(reading, 8) == b"open....", f"round {turn} did not open"
        time.sleep(chance.random() * 0.05)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reported = b""
        while part := os.read(reading, 1 << 16):
            reported += part
        os.close(reading)
        reported = reported.removeprefix(b"open....")
        if len(reported) >= 8:
            stored = _NUMBER.unpack(reported[len(reported) // 8 * 8 - 8 : len(reported) // 8 * 8])[0] + 1
        now = stored
        _, status = os.waitpid(child(lambda: anyio.run(check, folder, now)), 0)  # noqa: B023 - the child runs it at once
        assert status == 0, f"round {turn}: see above"
    print(f"{rounds} kills, {stored} segments")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
