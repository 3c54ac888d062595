"""Codes for slots on their way down: fewer bytes to move and to keep, at a loss.

All scale each channel of the keys, and of the values, over the tokens of its block. On keys and values of SmolLM2 (blocks of 16
tokens, `python -m benchmarks.codecs`) that changes the output of attention less than any other scale of about the same size,
since keys have channels that are large throughout, as KIVI found (Liu et al. 2024, section 3). It does so for values too, where
KIVI scales tokens: a token has as many channels as here, but its block has only 16 tokens to share a scale.

A channel of a block that holds a NaN or an infinity, and for `int4` one that spans more than float32 or bfloat16 can say, comes
back as NaN throughout: never as numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch

from ..errors import ConfigError
from .segments import SegmentLayout

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FP8_MAX = 448.0


class Codec(ABC):
    """Codes slots one by one, so that any range of them can be read. Has no state, and may be used from any thread.

    Attributes:
        name: and version of the format, as persistent stores keep it.
    """

    name: str

    @abstractmethod
    def slot_bytes(self, layout: SegmentLayout) -> int:
        """What a coded slot of this plain layout takes; the same for every slot."""

    @abstractmethod
    def encode(self, data: memoryview, layout: SegmentLayout) -> bytearray:
        """The codes of some plain slots."""

    @abstractmethod
    def decode(self, coded: memoryview, into: memoryview, layout: SegmentLayout) -> None:
        """Fill `into` with the plain slots that `coded` has the codes of."""

    def coded(self, layout: SegmentLayout) -> SegmentLayout:
        """The layout that a store of coded slots is made with. Raises `ConfigError` for one that is coded already."""
        if layout.codec:
            raise ConfigError(f"SegmentLayout.codec is {layout.codec!r}; coded slots cannot be coded again as {self.name!r}")
        return replace(layout, codec=self.name, coded_slot_bytes=self.slot_bytes(layout))


class ChannelCodec(Codec):
    """The common part: codes of `(slots, 2, block_size, head_dim)`, then numbers in bfloat16 per channel, `(2, head_dim)` each.

    bfloat16 has the range of float32, so no scale overflows; codes are chosen for the scale as it is rounded.
    """

    code_bits: int
    channel_numbers: int

    def slot_bytes(self, layout: SegmentLayout) -> int:
        return self._code_bytes(layout) + 2 * self.channel_numbers * 2 * layout.head_dim

    def _code_bytes(self, layout: SegmentLayout) -> int:
        return 2 * layout.block_size * layout.head_dim * self.code_bits // 8

    def encode(self, data: memoryview, layout: SegmentLayout) -> bytearray:
        shape = (-1, 2, layout.block_size, layout.head_dim)
        # Copied, since torch takes no memory that is read-only.
        values = torch.frombuffer(bytearray(data), dtype=_DTYPES[layout.dtype]).view(shape).float()
        codes, *numbers = self._quantize(values)
        parts = [codes, *(number.view(torch.uint8) for number in numbers)]
        coded = bytearray(values.shape[0] * self.slot_bytes(layout))
        rows = torch.frombuffer(coded, dtype=torch.uint8).view(values.shape[0], -1)
        torch.cat([part.reshape(values.shape[0], -1) for part in parts], dim=1, out=rows)
        return coded

    def decode(self, coded: memoryview, into: memoryview, layout: SegmentLayout) -> None:
        dtype = _DTYPES[layout.dtype]
        rows = torch.frombuffer(bytearray(coded), dtype=torch.uint8).view(-1, self.slot_bytes(layout))
        first = self._code_bytes(layout)
        tail = rows[:, first:].flatten().clone().view(torch.bfloat16).float()
        numbers = tail.view(len(rows), self.channel_numbers, 2, 1, layout.head_dim).unbind(1)
        values = self._restore(rows[:, :first].contiguous(), (len(rows), 2, layout.block_size, layout.head_dim), *numbers)
        limit = torch.finfo(dtype).max  # a rounded scale must not make an infinity of a large number
        torch.frombuffer(into, dtype=dtype).copy_(values.clamp_(-limit, limit).flatten())

    @abstractmethod
    def _quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Codes as bytes, and the numbers `(slots, 2, head_dim)` in bfloat16, of float32 `(slots, 2, block_size, head_dim)`."""

    @abstractmethod
    def _restore(self, codes: torch.Tensor, shape: tuple[int, ...], *numbers: torch.Tensor) -> torch.Tensor:
        """Float32 of that shape, from codes `(slots, bytes)` and float32 numbers `(slots, 2, 1, head_dim)`."""


class Fp8(ChannelCodec):
    """Floats of 8 bits (e4m3) and a scale per channel: for those who go on computing in them. Otherwise `int8` is closer."""

    name = "fp8/1"
    code_bits = 8
    channel_numbers = 1

    def _quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = (values.abs().amax(2) / _FP8_MAX).bfloat16()
        codes = _divide(values, scale.float()).clamp_(-_FP8_MAX, _FP8_MAX)
        return codes.to(torch.float8_e4m3fn).view(torch.uint8), scale

    def _restore(self, codes: torch.Tensor, shape: tuple[int, ...], *numbers: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.float8_e4m3fn).view(shape).float() * numbers[0]


class Int8(ChannelCodec):
    """Integers from -127 to 127 and a scale per channel."""

    name = "int8/1"
    code_bits = 8
    channel_numbers = 1

    def _quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = (values.abs().amax(2) / 127).bfloat16()
        codes = _divide(values, scale.float()).round_().clamp_(-127, 127)
        return codes.to(torch.int8).view(torch.uint8), scale

    def _restore(self, codes: torch.Tensor, shape: tuple[int, ...], *numbers: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.int8).view(shape).float() * numbers[0]


class Int4(ChannelCodec):
    """Integers from 0 to 15, two in a byte, a scale and a least value per channel: without the latter the error doubles."""

    name = "int4/1"
    code_bits = 4
    channel_numbers = 2

    def _quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        least = values.amin(2).bfloat16()
        scale = ((values.amax(2) - least.float()) / 15).bfloat16()
        scale[~(scale.isfinite() & least.isfinite())] = torch.nan
        codes = _divide(values - least.float().unsqueeze(2), scale.float()).round_().clamp_(0, 15).to(torch.uint8)
        low, high = codes.reshape(len(codes), -1, 2).unbind(2)
        return low | high << 4, scale, least

    def _restore(self, codes: torch.Tensor, shape: tuple[int, ...], *numbers: torch.Tensor) -> torch.Tensor:
        scale, least = numbers
        pairs = torch.stack([codes & 15, codes >> 4], dim=2)
        return pairs.view(shape).float() * scale + least


CODECS: dict[str, Codec] = {"fp8": Fp8(), "int8": Int8(), "int4": Int4()}
"""By the name that the option `codec` of a location takes."""


def _divide(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """By a scale per channel; 0 where that makes no sense, which is where the scale alone says what comes back."""
    return (values / scale.unsqueeze(2)).nan_to_num_(nan=0.0)
