"""The store: one object per segment, ranged reads, boto3 in worker threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Self, TypeVar

import anyio
import anyio.to_thread
import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from oasiskv.errors import ConfigError, LayoutMismatch, StateError, TierError, TierUnavailable
from oasiskv.tiers import Location, Outcome, Read, SegmentKey, SegmentLayout, TierStore, TierTraits
from oasiskv.tiers.checks import check_objects, check_reads
from oasiskv.tiers.threads import in_thread

from . import records
from .options import Options

_TRAITS = TierTraits(persistent=True, shared=True)
_FORMAT = "oasiskv-s3 1"
_MOST_IN_ONE_DELETE = 1000
_CONFLICTS = 20
_CONFLICT_S = 0.05
_NOT_THERE = ("404", "NoSuchKey")

A = TypeVar("A")
T = TypeVar("T")


class S3Store(TierStore):
    """Segments as objects `prefix/space/layer/digest`; `prefix/layout` says which layout they have.

    An object is put on the condition that there is none of its name, so that it never changes. Its metadata say how many slots
    it has, which tells a range beyond the end from an object that was cut short.
    """

    def __init__(self, layout: SegmentLayout, options: Options) -> None:
        super().__init__(layout)
        self._options = options
        self._record_bytes = layout.slot_bytes + records.CHECKSUM_BYTES
        self._client: Any = None  # boto3 makes the classes of its clients when it runs
        self._connections: anyio.CapacityLimiter | None = None
        self._closed = False

    @classmethod
    def at(cls, location: Location, layout: SegmentLayout) -> Self:
        return cls(layout, Options.at(location))

    @property
    def traits(self) -> TierTraits:
        return _TRAITS

    async def open(self) -> None:
        self._check_open()
        self._connections = anyio.CapacityLimiter(self._options.connections)
        try:
            await anyio.to_thread.run_sync(self._connect, limiter=self._connections)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        self._closed = True
        if self._connections is None:
            return
        # Requests under way end when the server has been silent for too long; those that wait for a thread are not made.
        with anyio.CancelScope(shield=True):
            while self._connections.borrowed_tokens:
                await anyio.sleep(0.005)
            client, self._client = self._client, None
            if client is not None:
                await anyio.to_thread.run_sync(client.close)

    async def store(self, objects: Sequence[tuple[SegmentKey, memoryview]]) -> None:
        self._check_open()
        check_objects(objects, self.layout, _TRAITS)
        await self._each(self._put, objects)

    async def load(self, reads: Sequence[Read]) -> list[Outcome]:
        self._check_open()
        check_reads(reads, self.layout, _TRAITS)
        return await self._each(self._get, reads)

    async def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        self._check_open()
        return await self._each(self._has, keys)

    async def delete(self, keys: Sequence[SegmentKey]) -> None:
        self._check_open()
        starts = range(0, len(keys), _MOST_IN_ONE_DELETE)
        await self._each(self._remove, [keys[start : start + _MOST_IN_ONE_DELETE] for start in starts])

    async def _each(self, work: Callable[[A], T], items: Sequence[A]) -> list[T]:
        """Do this for each item in worker threads, several at a time; results in order. The first error ends the others."""
        results: dict[int, T] = {}
        errors: list[Exception] = []
        waiting = iter(enumerate(items))

        def one(item: A) -> T:
            self._check_open()
            if self._client is None:
                raise StateError(f"the store of {self._options} is not open; enter it by async with, or await open()")
            return work(item)

        async def worker() -> None:
            for number, item in waiting:
                try:
                    results[number] = await in_thread(lambda _, item=item: one(item), self._connections)
                except (TierError, StateError) as error:
                    errors.append(error)
                    tasks.cancel_scope.cancel()
                    return

        async with anyio.create_task_group() as tasks:
            for _ in range(min(len(items), self._options.connections)):
                tasks.start_soon(worker)
        if errors:
            raise errors[0]
        return [results[number] for number in range(len(items))]

    # What follows runs in worker threads.

    def _connect(self) -> None:
        options = self._options
        config = Config(
            connect_timeout=options.timeout_s,
            read_timeout=options.timeout_s,
            retries={"mode": "standard", "total_max_attempts": 2},
            max_pool_connections=options.connections,
            s3={"addressing_style": "path" if options.endpoint else "auto"},
            request_checksum_calculation="when_required",  # servers other than AWS's do not all know the newer checksums
            response_checksum_validation="when_required",
        )
        try:
            session = boto3.session.Session(region_name=options.region or None)
            self._client = session.client("s3", endpoint_url=options.endpoint or None, config=config)
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(f"{options} cannot be reached ({error}); write s3:bucket/prefix?endpoint=http://host") from error
        self._check_layout()

    def _check_layout(self) -> None:
        """Compare the layout with that of the objects here; whoever comes first writes it."""
        name, mine = self._options.name("layout"), f"{_FORMAT} {self.layout.fingerprint.hex()}".encode()
        with self._mapped():
            if self._put_new(name, mine, {}):
                return
            with closing(self._client.get_object(Bucket=self._options.bucket, Key=name)["Body"]) as stream:
                theirs = stream.read()
        if theirs != mine:
            raise LayoutMismatch(
                f"{self._options} holds segments of another layout, or of another version of this plug-in; name another prefix"
            )

    def _put(self, entry: tuple[SegmentKey, memoryview]) -> None:
        key, data = entry
        body = records.pack(key, data, self.layout.slot_bytes)
        with self._mapped():
            self._put_new(self._options.name(str(key)), body, {"slots": str(data.nbytes // self.layout.slot_bytes)})

    def _put_new(self, name: str, body: bytes | bytearray, metadata: dict[str, str]) -> bool:
        """Write an object unless there is one of this name, and say whether there was none."""
        for _ in range(_CONFLICTS):
            try:
                self._client.put_object(Bucket=self._options.bucket, Key=name, Body=body, Metadata=metadata, IfNoneMatch="*")
            except ClientError as error:
                if _code(error) == "PreconditionFailed":
                    return False
                if _code(error) != "ConditionalRequestConflict":
                    raise
                time.sleep(_CONFLICT_S)  # somebody else is writing it at this moment, and may yet fail
            else:
                return True
        raise TierUnavailable(f"{name} is being written by others all the time; try again later")

    def _get(self, read: Read) -> Outcome:
        first, count = read.offset // self.layout.slot_bytes, read.into.nbytes // self.layout.slot_bytes
        begin, size = first * self._record_bytes, count * self._record_bytes
        name = self._options.name(str(read.key))
        with self._mapped():
            try:
                answer = self._client.get_object(
                    Bucket=self._options.bucket, Key=name, Range=f"bytes={begin}-{begin + size - 1}"
                )
            except ClientError as error:
                if _code(error) == "NoSuchKey":
                    return Outcome.MISS
                if _code(error) == "InvalidRange":
                    return self._beyond(name)
                raise
            with closing(answer["Body"]) as stream:
                body = stream.read()
            total = int(answer["ContentRange"].rpartition("/")[2])
            if not self._is_whole(answer["Metadata"], total):
                return self._forget(name)
            if begin + size > total:
                return Outcome.MISS
            if not records.unpack(read.key, first, body, read.into, self.layout.slot_bytes):
                return self._forget(name)
        return Outcome.HIT

    def _beyond(self, name: str) -> Outcome:
        """What it means that an object ends before a range begins: it never had so many slots, or it was cut short."""
        try:
            answer = self._client.head_object(Bucket=self._options.bucket, Key=name)
        except ClientError as error:
            if _code(error) in _NOT_THERE:
                return Outcome.MISS
            raise
        return Outcome.MISS if self._is_whole(answer["Metadata"], answer["ContentLength"]) else self._forget(name)

    def _is_whole(self, metadata: dict[str, str], total: int) -> bool:
        """Whether an object has as many bytes as its writer says."""
        return metadata.get("slots") == str(total // self._record_bytes) and total % self._record_bytes == 0

    def _forget(self, name: str) -> Outcome:
        self._client.delete_object(Bucket=self._options.bucket, Key=name)
        return Outcome.CORRUPT

    def _has(self, key: SegmentKey) -> bool:
        with self._mapped():
            try:  # of one byte, because the answer to a HEAD does not tell a missing bucket from a missing key
                answer = self._client.get_object(
                    Bucket=self._options.bucket, Key=self._options.name(str(key)), Range="bytes=0-0"
                )
            except ClientError as error:
                if _code(error) == "NoSuchKey":
                    return False
                raise
            with closing(answer["Body"]) as stream:
                stream.read()
        return True

    def _remove(self, keys: Sequence[SegmentKey]) -> None:
        names = [{"Key": self._options.name(str(key))} for key in dict.fromkeys(keys)]
        with self._mapped():
            answer = self._client.delete_objects(Bucket=self._options.bucket, Delete={"Objects": names, "Quiet": True})
        if answer.get("Errors"):
            raise TierUnavailable(f"{self._options} does not delete: {answer['Errors'][0]}; check what you may do there")

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"the store of {self._options} is closed; make a new one")

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """Errors of boto3 as those of the contract."""
        try:
            yield
        except (ClientError, BotoCoreError) as error:
            raise TierUnavailable(
                f"{self._options} fails ({error}); check the bucket, the endpoint, and what you may do there"
            ) from error


def _code(error: ClientError) -> str:
    return str(error.response["Error"]["Code"])
