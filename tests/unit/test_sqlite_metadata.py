"""The SQLite file among processes, and files that cannot serve."""

import sqlite3
import subprocess
import sys

import anyio
import pytest

from oasiskv.errors import ConfigError, LayoutMismatch, StateError, TierUnavailable
from oasiskv.testing.tier_kit.suite import key
from oasiskv.tiers import Location, sqlite_metadata
from oasiskv.tiers.sqlite_metadata import SqliteMetadata

pytestmark = pytest.mark.anyio

RACE = """
import sys, anyio
from oasiskv.testing.tier_kit.suite import key
from oasiskv.tiers.sqlite_metadata import SqliteMetadata

async def main(path, holder):
    async with SqliteMetadata(path) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        won = []
        for turn in range(50):
            await store.publish([key(turn)], holder, 600.0)
            if (lease := await store.acquire(f"lease-{turn}", holder, 600.0)) is not None:
                won.append(f"{turn}/{lease.fence[0]}/{lease.fence[1]}")
            if await store.claim(f"handoff-{turn}") is not None:
                won.append(f"claim-{turn}")
        print(*won, flush=True)

anyio.run(main, sys.argv[1], sys.argv[2])
"""


def processes(path, count):
    command = [sys.executable, "-c", RACE, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return [subprocess.Popen([*command, f"process-{number}"], **pipes) for number in range(count)]


@pytest.mark.timeout(120)
def test_processes_race_for_leases_and_handoffs(tmp_path):
    async def leave():
        async with SqliteMetadata(path) as store:
            for turn in range(50):
                await store.put(f"handoff-{turn}", b"value", 600.0)

    async def look():
        async with SqliteMetadata(path) as store:
            return await store.locate([key(turn) for turn in range(50)])

    path = tmp_path / "metadata"
    racers = processes(path, 2)  # they make the file, all at once
    try:
        assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 2
        anyio.run(leave)
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        won = [name for racer in racers for name in racer.communicate(timeout=60)[0].split()]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    assert [racer.returncode for racer in racers] == [0, 0]
    claims = [name for name in won if name.startswith("claim")]
    leases = [[int(part) for part in name.split("/")] for name in won if not name.startswith("claim")]
    assert sorted(claims) == sorted(f"claim-{turn}" for turn in range(50))
    assert sorted(turn for turn, _, _ in leases) == list(range(50))
    assert len({(epoch, counter) for _, epoch, counter in leases}) == 50, "each lease has its own fence"
    assert all(sorted(owners) == [f"process-{number}" for number in range(2)] for owners in anyio.run(look))


async def test_what_is_in_the_file_is_found_again(tmp_path):
    async with SqliteMetadata(tmp_path / "metadata") as store:
        await store.publish([key(1)], "a", 600.0)
        await store.put("h", b"value", 600.0)
        lease = await store.acquire("n", "a", 600.0)
    async with SqliteMetadata(tmp_path / "metadata") as store:
        assert await store.locate([key(1)]) == [["a"]]
        assert await store.claim("h") == b"value"
        assert await store.acquire("n", "b", 600.0) is None
        assert await store.release(lease) is True


async def test_a_new_file_has_a_larger_epoch(tmp_path):
    fences = []
    for _ in range(2):
        async with SqliteMetadata(tmp_path / "metadata") as store:
            for _ in range(3):
                lease = await store.acquire("n", "a", 600.0)
                await store.release(lease)
                fences.append(lease.fence)
        (tmp_path / "metadata").unlink()
    assert fences == sorted(set(fences))
    assert fences[3][1] == 1, "the counter begins anew, and the epoch makes up for it"


async def test_a_lease_of_another_file_cannot_be_given_up(tmp_path):
    async with SqliteMetadata(tmp_path / "one") as one, SqliteMetadata(tmp_path / "other") as other:
        lease = await one.acquire("n", "a", 600.0)
        await other.acquire("n", "a", 600.0)
        assert await other.release(lease) is False


async def test_what_runs_out_leaves_the_file(tmp_path):
    now = 1e9
    async with SqliteMetadata(tmp_path / "metadata", clock=lambda: now) as store:
        await store.publish([key(1)], "a", 10.0)
        await store.put("h", b"value", 10.0)
        await store.acquire("n", "a", 10.0)
        now += 10
        await store.publish([key(2)], "a", 10.0)
        await store.put("i", b"value", 10.0)
        await store.acquire("m", "a", 10.0)
    with sqlite3.connect(tmp_path / "metadata") as connection:
        counts = [
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("owners", "handoffs", "leases")
        ]
    connection.close()
    assert counts == [1, 1, 1]


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b"no database " * 100), lambda path: path.mkdir()])
async def test_a_file_that_is_none_of_sqlite_cannot_serve(tmp_path, make):
    make(tmp_path / "metadata")
    store = SqliteMetadata(tmp_path / "metadata")
    with pytest.raises(TierUnavailable, match="metadata"):
        await store.open()
    with pytest.raises(StateError):
        await store.locate([key(1)])


async def test_a_folder_that_is_not_there_cannot_serve(tmp_path):
    with pytest.raises(TierUnavailable, match="local disk"):
        await SqliteMetadata(tmp_path / "nowhere" / "metadata").open()


async def test_tables_of_another_version_are_refused(tmp_path):
    connection = sqlite3.connect(tmp_path / "metadata")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(LayoutMismatch, match="version 99"):
        await SqliteMetadata(tmp_path / "metadata").open()


async def test_a_file_that_stays_locked_is_unavailable_and_then_works_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_metadata, "_BUSY_S", 0.1)
    async with SqliteMetadata(tmp_path / "metadata") as store:
        other = sqlite3.connect(tmp_path / "metadata", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        start = anyio.current_time()
        with pytest.raises(TierUnavailable, match="locked"):
            await store.publish([key(1)], "a", 600.0)
        assert anyio.current_time() - start < 5
        assert await store.locate([key(1)]) == [[]], "who reads need not wait for who writes"
        other.execute("ROLLBACK")
        other.close()
        await store.publish([key(1)], "a", 600.0)
        assert await store.locate([key(1)]) == [["a"]]


async def test_a_store_that_is_not_open_says_so(tmp_path):
    with pytest.raises(StateError, match="not open"):
        await SqliteMetadata(tmp_path / "metadata").locate([key(1)])


def test_it_is_made_from_a_location(tmp_path):
    SqliteMetadata.at(Location.parse(f"sqlite:{tmp_path}/metadata"))
    with pytest.raises(ConfigError, match="no path"):
        SqliteMetadata.at(Location.parse("sqlite:"))


async def test_a_file_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    async with SqliteMetadata.at(Location.parse("sqlite:~/metadata")):
        assert (tmp_path / "metadata").is_file()
    assert not (tmp_path / "~").exists()
    with pytest.raises(ConfigError, match="home directory of a user"):
        SqliteMetadata.at(Location.parse("sqlite:~nobody-of-this-name/metadata"))
