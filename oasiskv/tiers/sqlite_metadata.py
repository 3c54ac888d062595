"""Who has what, in a SQLite file that the processes of a machine share."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self, TypeVar

import anyio
import anyio.to_thread

from ..errors import ConfigError, LayoutMismatch, StateError, TierUnavailable
from .abc import Lease, MetadataStore
from .checks import check_ttl
from .location import Location, local_path
from .segments import SegmentKey
from .threads import in_thread

_VERSION = 1
_BUSY_S = 2.0

_SCHEMA = """
CREATE TABLE state (epoch INTEGER NOT NULL, counter INTEGER NOT NULL);
CREATE TABLE owners (
  key TEXT NOT NULL, owner TEXT NOT NULL, published INTEGER NOT NULL, ends_at REAL NOT NULL, PRIMARY KEY (key, owner)
) WITHOUT ROWID;
CREATE INDEX owners_by_end ON owners (ends_at);
CREATE TABLE leases (name TEXT PRIMARY KEY, holder TEXT NOT NULL, counter INTEGER NOT NULL, ends_at REAL NOT NULL);
CREATE TABLE handoffs (name TEXT PRIMARY KEY, value BLOB NOT NULL, ends_at REAL NOT NULL);
"""

T = TypeVar("T")


class SqliteMetadata(MetadataStore):
    """Tables in one file on a local disk; `sqlite:/path/to/file`.

    Times in the file are the wall clock's, which all processes and the next boot agree on. Setting the clock changes when
    things run out; what was handed out stays safe by its fence. The epoch of fences is when the file was made, in nanoseconds.

    Args:
        path: of the file, which is made if it is not there; `~` is the home directory. Its folder must be there.
        clock: seconds of the wall clock.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.time) -> None:
        self._path = local_path(path)
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._epoch = 0
        self._turn: anyio.CapacityLimiter | None = None
        self._closed = False

    @classmethod
    def at(cls, location: Location) -> Self:
        location.finish()
        if not location.path:
            raise ConfigError(f"metadata store {location.text!r} has no path; write sqlite:/path/to/file")
        return cls(location.path)

    async def open(self) -> None:
        self._check_open()
        self._turn = anyio.CapacityLimiter(1)
        try:
            await anyio.to_thread.run_sync(self._connect, limiter=self._turn)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        self._closed = True
        if self._turn is not None:
            # A scope that is cancelled is no reason to leave a file open. Calls under way end within the time for a busy file.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._disconnect, limiter=self._turn)

    async def publish(self, keys: Sequence[SegmentKey], owner: str, ttl_s: float) -> None:
        check_ttl(ttl_s)

        def work(connection: sqlite3.Connection) -> None:
            now = self._clock()
            connection.execute("DELETE FROM owners WHERE ends_at <= ?", (now,))
            published = self._next(connection)
            rows = [(str(key), owner, published, now + ttl_s) for key in keys]
            connection.executemany("INSERT OR REPLACE INTO owners (key, owner, published, ends_at) VALUES (?, ?, ?, ?)", rows)

        await self._run(work)

    async def locate(self, keys: Sequence[SegmentKey]) -> list[list[str]]:
        query = "SELECT owner FROM owners WHERE key = ? AND ends_at > ? ORDER BY published DESC"

        def work(connection: sqlite3.Connection) -> list[list[str]]:
            now = self._clock()
            return [[owner for (owner,) in connection.execute(query, (str(key), now))] for key in keys]

        return await self._run(work, begin="BEGIN")

    async def withdraw(self, keys: Sequence[SegmentKey], owner: str) -> None:
        def work(connection: sqlite3.Connection) -> None:
            connection.executemany("DELETE FROM owners WHERE key = ? AND owner = ?", [(str(key), owner) for key in keys])

        await self._run(work)

    async def acquire(self, name: str, holder: str, ttl_s: float) -> Lease | None:
        check_ttl(ttl_s)

        def work(connection: sqlite3.Connection) -> Lease | None:
            now = self._clock()
            connection.execute("DELETE FROM leases WHERE ends_at <= ?", (now,))
            found = connection.execute("SELECT holder, counter FROM leases WHERE name = ?", (name,)).fetchone()
            if found is not None and found[0] != holder:
                return None
            counter: int = self._next(connection) if found is None else found[1]
            row = (name, holder, counter, now + ttl_s)
            connection.execute("INSERT OR REPLACE INTO leases (name, holder, counter, ends_at) VALUES (?, ?, ?, ?)", row)
            return Lease(name, holder, (self._epoch, counter), ttl_s)

        return await self._run(work, durable=True)

    async def release(self, lease: Lease) -> bool:
        epoch, counter = lease.fence

        def work(connection: sqlite3.Connection) -> bool:
            if epoch != self._epoch:
                return False
            query = "DELETE FROM leases WHERE name = ? AND counter = ? AND ends_at > ?"
            return connection.execute(query, (lease.name, counter, self._clock())).rowcount == 1

        return await self._run(work)

    async def put(self, name: str, value: bytes, ttl_s: float) -> None:
        check_ttl(ttl_s)

        def work(connection: sqlite3.Connection) -> None:
            now = self._clock()
            connection.execute("DELETE FROM handoffs WHERE ends_at <= ?", (now,))
            connection.execute(
                "INSERT OR REPLACE INTO handoffs (name, value, ends_at) VALUES (?, ?, ?)", (name, value, now + ttl_s)
            )

        await self._run(work)

    async def claim(self, name: str) -> bytes | None:
        def work(connection: sqlite3.Connection) -> bytes | None:
            found = connection.execute("SELECT value, ends_at FROM handoffs WHERE name = ?", (name,)).fetchone()
            connection.execute("DELETE FROM handoffs WHERE name = ?", (name,))
            return bytes(found[0]) if found is not None and found[1] > self._clock() else None

        return await self._run(work)

    async def _run(self, work: Callable[[sqlite3.Connection], T], begin: str = "BEGIN IMMEDIATE", durable: bool = False) -> T:
        """Do this in one transaction, in a worker thread, after the calls before it."""
        self._check_open()

        def transaction() -> T:
            self._check_open()
            connection = self._connection
            if connection is None:
                raise StateError("the sqlite metadata store is not open; enter it by async with, or await open()")
            with self._mapped():
                if durable:  # a fence that a power cut takes back would be handed out twice
                    connection.execute("PRAGMA synchronous = FULL")
                try:
                    return _in_transaction(connection, begin, work)
                finally:
                    if durable:
                        connection.execute("PRAGMA synchronous = NORMAL")

        return await in_thread(lambda _: transaction(), self._turn)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the sqlite metadata store is closed; make a new one")

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise TierUnavailable(
                f"the metadata store in {self._path} fails ({error}); it must be a SQLite file on a local disk, and writable"
            ) from error

    @staticmethod
    def _next(connection: sqlite3.Connection) -> int:
        """A number that is larger than all before it."""
        connection.execute("UPDATE state SET counter = counter + 1")
        counter: int = connection.execute("SELECT counter FROM state").fetchone()[0]
        return counter

    def _connect(self) -> None:
        with self._mapped():
            connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                _switch_to_wal(connection)
                self._epoch = _in_transaction(connection, "BEGIN IMMEDIATE", self._prepare)
            except BaseException:
                connection.close()
                raise
            self._connection = connection

    def _prepare(self, connection: sqlite3.Connection) -> int:
        """Make the tables if the file is new. Returns the epoch."""
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute("INSERT INTO state VALUES (?, 0)", (time.time_ns(),))
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        elif version != _VERSION:
            raise LayoutMismatch(
                f"{self._path} has version {version} of the metadata tables, and this is version {_VERSION}; name another file"
            )
        epoch: int = connection.execute("SELECT epoch FROM state").fetchone()[0]
        return epoch

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with self._mapped():
                connection.close()


def _in_transaction(connection: sqlite3.Connection, begin: str, work: Callable[[sqlite3.Connection], T]) -> T:
    connection.execute(begin)
    try:
        result = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return result


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Tries again while others open a new file at the same time: here alone, SQLite does not wait for a busy file by itself."""
    connection.execute("PRAGMA synchronous = NORMAL")
    give_up_at = time.monotonic() + _BUSY_S
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.01)
        else:
            if mode != "wal":
                raise sqlite3.OperationalError(f"journal mode is {mode}, not wal")
            return
