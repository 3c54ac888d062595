"""Indexes that somebody has broken or made up: refused or read as far as they are good, and never a wrong byte."""

import io
import os
import shutil
import tempfile
from pathlib import Path

import anyio
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from oasiskv.errors import LayoutMismatch
from oasiskv.tiers import Outcome
from oasiskv.tiers import file_index as index
from oasiskv.tiers.file import FileStore

from .tier_files import LAYOUT, content, key, store_all, whole

SEGMENT = LAYOUT.segment_bytes
COUNT = 6


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The files of a store with some segments, one of them deleted."""
    folder = tmp_path_factory.mktemp("original")

    async def fill():
        async with FileStore(LAYOUT, folder) as store:
            await store_all(store, range(COUNT))
            await store.delete([key(COUNT - 1)])

    anyio.run(fill)
    return folder


def open_and_read(folder):
    """How every segment of the original is read in a store that opens `folder`."""

    async def look():
        async with FileStore(LAYOUT, folder, 64 * SEGMENT) as store:
            found = [await whole(store, number) for number in range(COUNT)]
            await store_all(store, [COUNT])
            assert await whole(store, COUNT) == content(COUNT)
            return found

    return anyio.run(look)


def with_files(original, data, index_bytes):
    folder = Path(tempfile.mkdtemp())
    try:
        shutil.copy(original / "oasiskv-00000001.data", folder)
        if data is not None:
            (folder / "oasiskv-00000001.data").write_bytes(data)
        (folder / "oasiskv-00000001.index").write_bytes(index_bytes)
        return open_and_read(folder)
    finally:
        shutil.rmtree(folder)


def nothing_wrong(found):
    return all(result in (content(number), Outcome.MISS, Outcome.CORRUPT) for number, result in enumerate(found))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_change_of_an_index_leads_to_a_wrong_byte(original, data):
    good = bytearray((original / "oasiskv-00000001.index").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(good)))
        kind = data.draw(st.sampled_from(["overwrite", "cut", "insert", "repeat"]))
        some = data.draw(st.binary(min_size=1, max_size=40))
        if kind == "overwrite":
            good[start : start + len(some)] = some
        elif kind == "cut":
            del good[start:]
        elif kind == "insert":
            good[start:start] = some
        else:
            good[start:start] = good[start : start + data.draw(st.integers(1, 400))]
    try:
        assert nothing_wrong(with_files(original, None, bytes(good)))
    except LayoutMismatch:
        assert bytes(good[8:12]) != index.VERSION.to_bytes(4, "little")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=2000), st.booleans())
def test_random_bytes_hold_nothing(original, junk, after_a_good_header):
    found = with_files(original, None, (index.header(LAYOUT) if after_a_good_header else b"") + junk)
    assert found == [Outcome.MISS] * COUNT


_NUMBERS = st.one_of(st.integers(0, 20), st.sampled_from([255, 256, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1]))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([1, 2, 3]),
    st.tuples(_NUMBERS, _NUMBERS, _NUMBERS),
    _NUMBERS | st.integers(0, 40).map(lambda slot: slot * LAYOUT.slot_bytes),
    st.binary(max_size=300),
)
def test_records_that_claim_too_much_are_refused_though_their_checksum_holds(original, kind, lengths, offset, body):
    space, digest, slots = lengths
    head = index._RECORD.pack(kind, space & 255, digest & 255, 3, slots & 0xFFFFFFFF, offset)
    record = head + xxhash.xxh3_64_digest(head + body) + body
    assert nothing_wrong(with_files(original, None, index.header(LAYOUT) + record))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, COUNT * SEGMENT - 1), st.binary(min_size=1, max_size=3 * SEGMENT), st.integers(0, COUNT * SEGMENT))
def test_no_change_of_the_data_leads_to_a_wrong_byte(original, start, some, size):
    data = bytearray((original / "oasiskv-00000001.data").read_bytes())
    data[start : start + len(some)] = some
    assert nothing_wrong(with_files(original, bytes(data[:size]), (original / "oasiskv-00000001.index").read_bytes()))


def test_a_record_is_read_only_as_far_as_both_files_go():
    class Counting(io.BytesIO):
        asked = 0

        def read(self, count=-1):
            self.asked = max(self.asked, count)
            return super().read(count)

    head = index._RECORD.pack(1, 10, 16, 0, 1 << 31, 0)
    file = Counting(index.header(LAYOUT) + head + bytes(8) + bytes(100))
    found, end = index.parse(file, len(file.getvalue()), 1 << 40, LAYOUT)
    assert (found, end) == ({}, index.HEADER_BYTES)
    assert file.asked <= index.HEADER_BYTES


def test_what_was_written_is_parsed_in_order():
    placed = [index.Placed(key(n), n * SEGMENT, 8, SEGMENT, os.urandom(72)) for n in range(500)]
    blob = index.header(LAYOUT) + b"".join(index.placed(one) for one in placed) + index.gone(7 * SEGMENT)
    found, end = index.parse(io.BytesIO(blob), len(blob), 500 * SEGMENT, LAYOUT)
    assert end == len(blob)
    assert list(found) == [n * SEGMENT for n in range(500) if n != 7]
    del placed[7]
    assert [(one.key, one.nbytes, one.checks) for one in found.values()] == [(o.key, o.nbytes, o.checks) for o in placed]
