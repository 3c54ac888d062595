"""The index of a pack: which segment lies where in its data file, and what its checksums are.

A header of 256 bytes, then records, each written after the data that it speaks of. A record counts only if its own checksum
holds, and the first that does not ends the index: it is the torn tail of a write, or damage.

    header  magic 8, version u32, fingerprint of the layout 16, the layout as text 220, checksum 8
    record  kind u8, length of space u8, length of digest u8, 0, layer u16, 0, 0, slots u32, offset u64, checksum 8,
            then space, digest, and the segment's checksums (`file_checks`)

Integers are little-endian, checksums are xxh3 (64 bits) and cover everything else of their header or record.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass

import xxhash

from ..errors import InputError, LayoutMismatch
from .file_checks import CHECK_BYTES, Checks
from .segments import SegmentKey, SegmentLayout

VERSION = 1
HEADER_BYTES = 256

_MAGIC = b"OASISKV\x01"
_HEADER = struct.Struct("<8sI16s220s")
_RECORD = struct.Struct("<BBBxHxxIQ")
_RECORD_BYTES = _RECORD.size + CHECK_BYTES
_PLACED, _GONE = 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A segment in a data file, and its checksums."""

    key: SegmentKey
    offset: int
    slots: int
    nbytes: int
    checks: bytes


def header(layout: SegmentLayout) -> bytes:
    """The first bytes of an index."""
    body = _HEADER.pack(_MAGIC, VERSION, layout.fingerprint, _text(layout))
    return body + xxhash.xxh3_64_digest(body)


def placed(segment: Placed) -> bytes:
    """A record that says that a segment is there."""
    space, digest = segment.key.space.encode(), segment.key.digest
    head = _RECORD.pack(_PLACED, len(space), len(digest), segment.key.layer, segment.slots, segment.offset)
    return _sealed(head, space + digest + segment.checks)


def gone(offset: int) -> bytes:
    """A record that says that the segment at `offset` is there no more."""
    return _sealed(_RECORD.pack(_GONE, 0, 0, 0, 0, offset), b"")


def _sealed(head: bytes, body: bytes) -> bytes:
    return head + xxhash.xxh3_64_digest(head + body) + body


def parse(file: io.BufferedIOBase, index_bytes: int, data_bytes: int, layout: SegmentLayout) -> tuple[dict[int, Placed], int]:
    """Read an index of `index_bytes` whose data file has `data_bytes`.

    Nothing is read or allocated because a record claims it: what it claims must fit into both files first. The index ends
    before a segment that reaches beyond the data file, which has lost its end then.

    Returns:
        The segments by offset, in the order in which they were written, and where the last good record ends; 0 if not even the
        header is good.

    Raises:
        LayoutMismatch: it was written for another layout, or by another version. `str` of it lacks the folder.
    """
    if not _header_is_good(file.read(HEADER_BYTES), layout):
        return {}, 0
    checks = Checks(layout.slot_bytes)
    found: dict[int, Placed] = {}
    end = HEADER_BYTES
    while len(head := file.read(_RECORD_BYTES)) == _RECORD_BYTES:
        kind, space, digest, layer, slots, offset = _RECORD.unpack_from(head)
        body_bytes = space + digest + checks.size(slots)
        if body_bytes > index_bytes - end - _RECORD_BYTES:
            break
        body = file.read(body_bytes)
        if xxhash.xxh3_64_digest(head[: _RECORD.size] + body) != head[_RECORD.size :]:
            break
        if kind == _GONE:
            found.pop(offset, None)
        elif kind == _PLACED and slots and offset % layout.slot_bytes == 0 and offset + slots * layout.slot_bytes <= data_bytes:
            try:
                key = SegmentKey(body[:space].decode("ascii"), body[space : space + digest], layer)
            except (InputError, UnicodeDecodeError):
                break
            found.pop(offset, None)  # a second record for the place is the newer one, in the order of writing too
            found[offset] = Placed(key, offset, slots, slots * layout.slot_bytes, body[space + digest :])
        else:
            break
        end += _RECORD_BYTES + body_bytes
    return found, end


def _header_is_good(data: bytes, layout: SegmentLayout) -> bool:
    if len(data) != HEADER_BYTES:
        return False
    magic, version, fingerprint, text = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        return False
    if version != VERSION:  # before the checksum, which another version may have put elsewhere
        raise LayoutMismatch(f"format version {version}, and this is version {VERSION}")
    if xxhash.xxh3_64_digest(data[: _HEADER.size]) != data[_HEADER.size :]:
        return False
    if fingerprint != layout.fingerprint:
        theirs = text.rstrip(b"\0").decode("ascii", "replace")
        raise LayoutMismatch(f"segments of the layout ({theirs}), and this is ({_text(layout).decode()})")
    return True


def _text(layout: SegmentLayout) -> bytes:
    names = ("kv_heads", "num_blocks", "block_size", "head_dim", "dtype")
    return ", ".join(f"{name}={getattr(layout, name)}" for name in names).encode()[:220]
