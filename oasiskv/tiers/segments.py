"""What tier stores hold, and the values that their calls take and give."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import Enum
from math import prod

from ..config import OasisConfig
from ..errors import ConfigError, InputError
from ..types import ModelShape

_SPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class SegmentKey:
    """Names a segment for ever: whoever stores it again stores the same bytes.

    Attributes:
        space: keeps segments of different models and layouts apart: 1 to 64 of `A-Z a-z 0-9 _ -`.
        digest: a hash of what the segment holds, usually of its token prefix; 16 to 64 bytes.
        layer: of the model.
    """

    space: str
    digest: bytes
    layer: int

    def __post_init__(self) -> None:
        if not isinstance(self.space, str) or not _SPACE.fullmatch(self.space):
            raise InputError(f"SegmentKey.space is {self.space!r}; it must be 1 to 64 letters, digits, '_' or '-'")
        if not isinstance(self.digest, bytes) or not 16 <= len(self.digest) <= 64:
            raise InputError(f"SegmentKey.digest is {self.digest!r}; it must be 16 to 64 bytes")
        if not isinstance(self.layer, int) or not 0 <= self.layer < 1 << 16:
            raise InputError(f"SegmentKey.layer is {self.layer!r}; it must be an integer from 0 to 65535")

    def __hash__(self) -> int:
        return hash(self.digest) ^ self.layer  # keys are looked up for every read

    def __str__(self) -> str:
        """A name that is fit for a file or an object: `space/layer/digest` in hexadecimal."""
        return f"{self.space}/{self.layer}/{self.digest.hex()}"


@dataclass(frozen=True)
class SegmentLayout:
    """What the bytes of a segment mean: `(kv_heads, num_blocks, 2, block_size, head_dim)`, keys before values, in `dtype`.

    A *slot* is one block of one kv head, the unit of reading: offsets and lengths are multiples of `slot_bytes`.

    Attributes:
        codec: what has coded the slots, with its version, where a store gets them coded; empty if they are plain.
        coded_slot_bytes: what a slot takes then.
    """

    kv_heads: int
    num_blocks: int
    block_size: int
    head_dim: int
    dtype: str = "bfloat16"
    codec: str = ""
    coded_slot_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("kv_heads", "num_blocks", "block_size", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"SegmentLayout.{name} is {value!r}; it must be a positive integer")
        if self.dtype not in _ITEM_BYTES:
            raise ConfigError(f"SegmentLayout.dtype is {self.dtype!r}; it must be one of {', '.join(_ITEM_BYTES)}")
        if bool(self.codec) != (self.coded_slot_bytes > 0):
            raise ConfigError(
                f"SegmentLayout.codec is {self.codec!r} and coded_slot_bytes {self.coded_slot_bytes}; give both or neither"
            )

    @classmethod
    def of(cls, shape: ModelShape, config: OasisConfig) -> SegmentLayout:
        """What a `KVManager` of this shape and configuration stores."""
        dtype = str(shape.dtype).removeprefix("torch.")
        return cls(shape.kv_heads, config.segment_blocks, config.block_size, shape.head_dim, dtype)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Of the whole segment, as a tensor of `dtype`."""
        return (self.kv_heads, self.num_blocks, 2, self.block_size, self.head_dim)

    @property
    def slot_bytes(self) -> int:
        """Bytes of keys and values of one block of one kv head, as a store gets them."""
        return self.coded_slot_bytes or 2 * self.block_size * self.head_dim * _ITEM_BYTES[self.dtype]

    @property
    def segment_bytes(self) -> int:
        """Bytes of a whole segment."""
        return prod(self.shape[:2]) * self.slot_bytes

    def offset(self, head: int, block: int) -> int:
        """Where the slot of a kv head and of the `block`-th block of the segment begins, in bytes."""
        return (head * self.num_blocks + block) * self.slot_bytes

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that differ between layouts; persistent stores keep them beside what they hold."""
        text = f"{self.kv_heads},{self.num_blocks},{self.block_size},{self.head_dim},{self.dtype}"
        if self.codec:
            text += f",{self.codec},{self.coded_slot_bytes}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Read:
    """A range of one segment, and the writable buffer that takes it: `into` says how many bytes."""

    key: SegmentKey
    offset: int
    into: memoryview


class Outcome(Enum):
    """How a read ended. A buffer holds what was asked for after `HIT`, and nothing to be used after any other."""

    HIT = "hit"
    MISS = "miss"
    """The store has no such segment, or not so many bytes of it: it never had, it has forgotten it, even in the middle of the
    read, or it does not have it yet."""
    CORRUPT = "corrupt"
    """There is something, and it is not what was stored: a torn, short or changed copy. The store forgets it."""


@dataclass(frozen=True)
class TierTraits:
    """What a store is like; the same for its whole life.

    Attributes:
        persistent: what it holds is found again by the next process that opens it.
        shared: other processes see what is stored.
        max_batch: most objects or reads in one call; `None` if it takes any number.
        alignment_bytes: buffers that begin at a multiple of this spare the store a copy.
        lossy: what is read may be less precise than what was stored; see `TierStore.variants`.
    """

    persistent: bool = False
    shared: bool = False
    max_batch: int | None = None
    alignment_bytes: int = 1
    lossy: bool = False
