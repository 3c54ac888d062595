"""Transform codebooks made for tests, and what they mean, spelled out component by component."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from oasiskv.summaries.quantizer import lloyd_max
from oasiskv.summaries.water_filling import Layout, water_fill


@dataclass
class Book:
    layout: Layout
    mean: torch.Tensor
    encode: torch.Tensor
    decode: torch.Tensor
    thresholds: torch.Tensor
    levels: torch.Tensor
    components: torch.Tensor

    def codes(self, num_pages: int, block_size: int) -> torch.Tensor:
        return torch.zeros((num_pages, self.layout.num_nibbles, block_size // 2), dtype=torch.uint8)

    def write_arguments(self):
        return self.mean, self.encode, self.thresholds, self.layout.nibbles, self.layout.shifts

    def score_arguments(self):
        return self.mean, self.decode, self.levels, self.components, self.layout.offsets

    def dequantised(self, block: torch.Tensor) -> torch.Tensor:
        """The keys `(H, B, D)` that the code of a block stands for, in float64."""
        result = torch.empty(block.shape, dtype=torch.float64)
        for h in range(block.shape[0]):
            for t in range(block.shape[1]):
                key = self.mean[h].double().clone()
                centred = block[h, t].float() - self.mean[h]
                for c, bits in enumerate(self.layout.bits[h].tolist()):
                    if bits:
                        value = float((centred.double() * self.encode[h, :, c].double()).sum())
                        levels = lloyd_max(bits).levels.double()
                        key += levels[int((levels - value).abs().argmin())] * self.decode[h, c].double()
                result[h, t] = key
        return result


def make_book(variances: torch.Tensor, nibbles: int, head_dim: int) -> Book:
    """A book of one layer for heads with these component variances `(H, C)`, which fall along each head."""
    heads = variances.shape[0]
    (layout,) = water_fill(variances[None], nibbles)
    used = layout.bits.shape[1]
    bases = torch.stack([torch.linalg.qr(torch.randn(head_dim, head_dim)).Q[:, :used] for _ in range(heads)])
    deviation = variances[:, :used].sqrt()
    thresholds = torch.full((heads, used, 15), math.inf)
    levels, components = torch.zeros((layout.num_nibbles, 16, 4)), torch.zeros((layout.num_nibbles, 4), dtype=torch.int64)
    lanes = [0] * layout.num_nibbles
    for h in range(heads):
        for c, bits in enumerate(layout.bits[h].tolist()):
            if not bits:
                continue
            quantizer = lloyd_max(bits)
            thresholds[h, c, : 2**bits - 1] = quantizer.thresholds
            nibble, shift = int(layout.nibbles[h, c]), int(layout.shifts[h, c])
            components[nibble, lanes[nibble]] = h * used + c
            for value in range(16):
                levels[nibble, value, lanes[nibble]] = quantizer.levels[value >> shift & (2**bits - 1)]
            lanes[nibble] += 1
    return Book(
        layout=layout,
        mean=torch.randn(heads, head_dim),
        encode=(bases / deviation[:, None]).contiguous(),
        decode=(bases * deviation[:, None]).transpose(1, 2).contiguous(),
        thresholds=thresholds,
        levels=levels,
        components=components,
    )


def table_error(book: Book, queries: torch.Tensor, scale: float) -> torch.Tensor:
    """How far native scores may be from those of the tables themselves, `(S, R, Hq)`.

    Entries are rounded to steps for which the sum over any 8 nibbles of a head fits 249 steps with an octave to spare, and
    powers of two are read off a line through each octave, which is off by 0.034 nats at most to either side.
    """
    octave = math.log(2)
    heads, group = book.mean.shape[0], queries.shape[2] // book.mean.shape[0]
    ends = [*book.layout.offsets.tolist(), book.layout.num_nibbles]
    error = torch.zeros(queries.shape[:3], dtype=torch.float64)
    for h in range(heads):
        grouped = queries[:, :, h * group : (h + 1) * group].double() * scale
        rotated = grouped @ book.decode[h].double().T
        nibbles = range(ends[h], ends[h + 1])
        spread = torch.zeros((*rotated.shape[:3], max(8, len(nibbles))), dtype=torch.float64)
        for number, nibble in enumerate(nibbles):
            own = (book.components[nibble] - h * rotated.shape[3]).clamp(min=0)
            entries = rotated[..., own] @ book.levels[nibble].double().T
            spread[..., number] = entries.amax(-1) - entries.amin(-1)
        octaves = spread.topk(8).values.sum(-1) / octave
        step = (128 * (octaves + 1) / 249).ceil() * octave / 128
        error[:, :, h * group : (h + 1) * group] = len(nibbles) * step / 2 + 0.034
    return error
