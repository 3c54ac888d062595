"""Checksums of slots and of stretches: any range of an object is recognised, and nothing else."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasiskv.tiers.file_checks import Checks


@given(st.sampled_from([16 << 10, 20 << 10, 64 << 10, 96 << 10]), st.integers(1, 11), st.data())
def test_every_range_is_recognised_and_a_changed_byte_in_it_is_not(slot_bytes, slots, data):
    checks = Checks(slot_bytes)
    content = random.Random(slots).randbytes(slots * slot_bytes)
    made = checks.of(memoryview(content))
    assert len(made) == checks.size(slots)
    first = data.draw(st.integers(0, slots - 1))
    last = data.draw(st.integers(first + 1, slots))
    part = bytearray(content[first * slot_bytes : last * slot_bytes])
    assert checks.hold(made, memoryview(part), first, slots)
    place = data.draw(st.integers(0, len(part) - 1))
    part[place] ^= 1 << data.draw(st.integers(0, 7))
    assert not checks.hold(made, memoryview(part), first, slots)


def test_a_range_from_elsewhere_is_not_taken_for_it():
    checks = Checks(8192)
    content = random.Random(0).randbytes(32 * 8192)
    made = checks.of(memoryview(content))
    for count in (1, 8, 11):
        for first in range(32 - count):
            assert not checks.hold(made, memoryview(content[first * 8192 : (first + count) * 8192]), first + 1, 32)


@pytest.mark.parametrize(("slot_bytes", "slots", "size"), [(8192, 128, 144), (8192, 9, 11), (65536, 4, 4), (512, 8, 9)])
def test_stretches_add_little(slot_bytes, slots, size):
    assert Checks(slot_bytes).size(slots) == size * 8
