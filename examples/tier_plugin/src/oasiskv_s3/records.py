"""How a segment is laid out in an object: each slot is followed by 8 bytes of checksum, so that any range can be checked alone.

The checksum is seeded with the key and the number of the slot. So the right bytes in the wrong place are damage, too.
"""

from __future__ import annotations

import xxhash

from oasiskv.tiers import SegmentKey

CHECKSUM_BYTES = 8
_MASK = (1 << 64) - 1


def pack(key: SegmentKey, data: memoryview, slot_bytes: int) -> bytearray:
    """The object of a segment, `(slots, slot_bytes + 8)` bytes."""
    seed = _seed(key)
    body = bytearray()
    for number, start in enumerate(range(0, data.nbytes, slot_bytes)):
        slot = data[start : start + slot_bytes]
        body += slot
        body += xxhash.xxh3_64_digest(slot, (seed + number) & _MASK)
    return body


def unpack(key: SegmentKey, first: int, body: bytes, into: memoryview, slot_bytes: int) -> bool:
    """Put the records from slot `first` on into a buffer. False if one is damaged; the buffer may have been written then."""
    seed = _seed(key)
    record = slot_bytes + CHECKSUM_BYTES
    view = memoryview(body)
    for number in range(into.nbytes // slot_bytes):
        slot = view[number * record : number * record + slot_bytes]
        checksum = view[number * record + slot_bytes : (number + 1) * record]
        if xxhash.xxh3_64_digest(slot, (seed + first + number) & _MASK) != checksum:
            return False
        into[number * slot_bytes : (number + 1) * slot_bytes] = slot
    return True


def _seed(key: SegmentKey) -> int:
    return xxhash.xxh3_64_intdigest(str(key).encode())
