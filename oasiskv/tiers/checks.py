"""Refuses arguments that break the contract of tier stores, before a byte is moved."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import InputError
from .segments import Read, SegmentKey, SegmentLayout, TierTraits


def check_objects(objects: Sequence[tuple[SegmentKey, memoryview]], layout: SegmentLayout, traits: TierTraits) -> None:
    """Raises `InputError` unless these can be stored."""
    _check_batch(len(objects), traits)
    slot_bytes = layout.slot_bytes
    for key, data in objects:
        _check_buffer("object of", key, data, slot_bytes)


def check_reads(reads: Sequence[Read], layout: SegmentLayout, traits: TierTraits) -> None:
    """Raises `InputError` unless these can be read."""
    _check_batch(len(reads), traits)
    slot_bytes = layout.slot_bytes
    for read in reads:
        _check_buffer("buffer for", read.key, read.into, slot_bytes)
        if read.into.readonly:
            raise InputError(f"the buffer for {read.key} is read-only; pass a writable memoryview")
        if read.offset < 0 or read.offset % slot_bytes:
            raise InputError(f"offset is {read.offset} in {read.key}; it must be a multiple of slot_bytes, {slot_bytes}")


def check_ttl(ttl_s: float) -> None:
    """Raises `InputError` unless this can be a time to live."""
    if not 0 < ttl_s < math.inf:
        raise InputError(f"ttl_s is {ttl_s!r}; it must be a positive number of seconds")


def _check_batch(count: int, traits: TierTraits) -> None:
    if traits.max_batch is not None and count > traits.max_batch:
        raise InputError(f"a call has {count} entries; this store takes at most {traits.max_batch} (traits.max_batch)")


def _check_buffer(what: str, key: SegmentKey, buffer: memoryview, slot_bytes: int) -> None:
    if not isinstance(buffer, memoryview) or not buffer.c_contiguous or buffer.itemsize != 1:
        raise InputError(f"the {what} {key} is {buffer!r}; it must be a contiguous memoryview of bytes")
    if not buffer.nbytes or buffer.nbytes % slot_bytes:
        raise InputError(f"the {what} {key} has {buffer.nbytes} bytes; it must be a multiple of slot_bytes, {slot_bytes}")
