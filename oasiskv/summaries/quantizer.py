"""Lloyd-Max quantisers of a unit Gaussian (J. Max, "Quantizing for minimum distortion", 1960, table I), computed on import."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

MAX_BITS = 4
_SAMPLES = 20001
_ROUNDS = 400


@dataclass(frozen=True)
class Quantizer:
    """`2**bits` reconstruction levels, the thresholds between them, and the mean squared error."""

    levels: torch.Tensor
    thresholds: torch.Tensor
    distortion: float


@cache
def lloyd_max(bits: int) -> Quantizer:
    """The quantiser of 1 to `MAX_BITS` bits, by Lloyd's iteration on evenly spaced quantiles."""
    quantiles = (torch.arange(_SAMPLES, dtype=torch.float64) + 0.5) / _SAMPLES
    samples = torch.special.ndtri(quantiles)
    count = 2**bits
    levels = samples[(2 * torch.arange(count) + 1) * _SAMPLES // (2 * count)].clone()
    for _ in range(_ROUNDS):
        cell = torch.bucketize(samples, (levels[1:] + levels[:-1]) / 2)
        total = torch.zeros(count, dtype=torch.float64).index_add_(0, cell, samples)
        levels = total / torch.bincount(cell, minlength=count)
    thresholds = (levels[1:] + levels[:-1]) / 2
    error = samples - levels[torch.bucketize(samples, thresholds)]
    return Quantizer(levels.float(), thresholds.float(), float((error * error).mean()))


@cache
def distortions() -> tuple[float, ...]:
    """Mean squared error of 0 to `MAX_BITS` bits."""
    return (1.0, *(lloyd_max(bits).distortion for bits in range(1, MAX_BITS + 1)))
