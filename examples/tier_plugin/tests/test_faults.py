"""Damage, and servers that do not answer as they should."""

import socket
import time

import anyio
import pytest
from botocore.exceptions import ClientError
from oasiskv_s3 import S3Store

from oasiskv import registry
from oasiskv.errors import ConfigError, TierUnavailable
from oasiskv.testing.tier_kit.suite import LAYOUT, blank, content, key
from oasiskv.tiers import Location, Outcome, Read, TierStore

from .conftest import BUCKET

pytestmark = pytest.mark.anyio
SLOT = LAYOUT.slot_bytes
RECORD = SLOT + 8


def make(location):
    return S3Store.at(Location.parse(location), LAYOUT)


async def read(store, first, count, name=None):
    into = blank(count * SLOT)
    (outcome,) = await store.load([Read(name or key(1), first * SLOT, into)])
    return bytes(into) if outcome is Outcome.HIT else outcome


def flip(body):
    body[2 * RECORD + 5] ^= 1


def cut(body):
    del body[3 * RECORD :]


def cut_inside(body):
    del body[-1:]


def lengthen(body):
    body += bytes(RECORD)


def swap(body):
    body[RECORD : 2 * RECORD], body[2 * RECORD : 3 * RECORD] = body[2 * RECORD : 3 * RECORD], body[RECORD : 2 * RECORD]


@pytest.mark.parametrize(
    ("damage", "ranges"),
    [
        (flip, [(2, 1), (0, 6)]),
        (swap, [(1, 1), (0, 6)]),
        (cut, [(0, 6), (3, 3), (0, 1)]),
        (cut_inside, [(0, 6), (5, 1)]),
        (lengthen, [(0, 6), (6, 1)]),
    ],
)
async def test_damage_is_noticed_and_forgotten(location, client, tmp_path, damage, ranges):
    name = f"{str(tmp_path).strip('/')}/{key(1)}"
    async with make(location) as store:
        for first, count in ranges:
            await store.store([(key(1), memoryview(content(key(1))))])
            found = client.get_object(Bucket=BUCKET, Key=name)
            with found["Body"] as stream:
                body = bytearray(stream.read())
            damage(body)
            client.put_object(Bucket=BUCKET, Key=name, Body=bytes(body), Metadata=found["Metadata"])
            assert await read(store, first, count) is Outcome.CORRUPT, f"{count} slots from {first}"
            assert await store.contains([key(1)]) == [False]
            assert await read(store, first, count) is Outcome.MISS
        await store.store([(key(1), memoryview(content(key(1))))])
        assert await read(store, 0, 6) == content(key(1))


async def test_damage_elsewhere_does_no_harm(location, client, tmp_path):
    name = f"{str(tmp_path).strip('/')}/{key(1)}"
    async with make(location) as store:
        await store.store([(key(1), memoryview(content(key(1))))])
        found = client.get_object(Bucket=BUCKET, Key=name)
        with found["Body"] as stream:
            body = bytearray(stream.read())
        flip(body)
        client.put_object(Bucket=BUCKET, Key=name, Body=bytes(body), Metadata=found["Metadata"])
        assert await read(store, 3, 3) == content(key(1))[3 * SLOT :]


async def test_the_object_of_another_key_is_damage(location, client, tmp_path):
    prefix = str(tmp_path).strip("/")
    async with make(location) as store:
        await store.store([(key(1), memoryview(content(key(1))))])
        client.copy_object(Bucket=BUCKET, Key=f"{prefix}/{key(2)}", CopySource=f"{BUCKET}/{prefix}/{key(1)}")
        assert await read(store, 0, 6, key(2)) is Outcome.CORRUPT


async def test_a_range_costs_its_own_bytes(location):
    async with make(location) as store:
        await store.store([(key(1), memoryview(content(key(1))))])
        ranges = []
        store._client.meta.events.register(
            "before-send.s3.GetObject", lambda request, **_: ranges.append(request.headers["Range"])
        )
        assert await read(store, 2, 3) == content(key(1))[2 * SLOT : 5 * SLOT]
        assert ranges == [f"bytes={2 * RECORD}-{5 * RECORD - 1}".encode()]


async def test_a_bucket_that_is_not_there_is_unavailable(endpoint):
    with pytest.raises(TierUnavailable, match="no-such-bucket"):
        async with make(f"s3:no-such-bucket/prefix?endpoint={endpoint}"):
            pass


async def test_a_bucket_that_goes_away_is_unavailable(endpoint, client):
    client.create_bucket(Bucket="short-lived")
    async with make(f"s3:short-lived?endpoint={endpoint}") as store:
        client.delete_object(Bucket="short-lived", Key="layout")
        client.delete_bucket(Bucket="short-lived")
        into = blank(SLOT)
        for call in (
            lambda: store.load([Read(key(1), 0, into)]),
            lambda: store.contains([key(1)]),
            lambda: store.store([(key(1), memoryview(content(key(1))))]),
            lambda: store.delete([key(1)]),
        ):
            with pytest.raises(TierUnavailable, match="short-lived"):
                await call()
    with pytest.raises(ClientError):
        client.head_bucket(Bucket="short-lived")


async def test_a_refused_connection_is_unavailable():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(TierUnavailable, match="endpoint"):
            await make(f"s3:{BUCKET}?endpoint=http://127.0.0.1:{taken.getsockname()[1]}").open()


async def test_a_silent_server_is_unavailable_in_bounded_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = make(f"s3:{BUCKET}?endpoint=http://127.0.0.1:{silent.getsockname()[1]}&timeout=0.2")
        start = time.monotonic()
        with pytest.raises(TierUnavailable, match="timeout"):
            await store.open()
        assert time.monotonic() - start < 10


async def test_closing_does_not_wait_for_a_silent_server_for_long(location):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = make(f"{location}&timeout=0.3")
        await store.open()
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}"

        def send_elsewhere(request, **_):
            request.url = silent_url

        store._client.meta.events.register("before-send.s3.GetObject", send_elsewhere)
        into = blank(SLOT)

        async def load():
            with pytest.raises(TierUnavailable):
                await store.load([Read(key(1), 0, into)])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await anyio.sleep(0.05)
            with anyio.fail_after(5):
                await store.aclose()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("s3:", "no bucket"),
        ("s3:/prefix", "no bucket"),
        ("s3:bucket?timeout=soon", "timeout"),
        ("s3:bucket?timeout=0", "timeout"),
        ("s3:bucket?connections=1.5", "connections"),
        ("s3:bucket?limit=1GiB", "no option 'limit'"),
    ],
)
def test_locations_that_cannot_be_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        make(text)


async def test_an_endpoint_that_is_no_address_is_refused():
    with pytest.raises(ConfigError, match="endpoint"):
        await make("s3:bucket?endpoint=nonsense").open()


def test_oasiskv_finds_it_by_name():
    assert registry.load("oasiskv.tier_stores", "s3", TierStore) is S3Store
