"""A transform code of the keys: a 64th of their fp16 K and V, close to ranking by the keys themselves.

What selection needs of a key is the logit that a query will give it, so the code spends its bits where queries look:

1. Metric: the second moment of the queries, `Sq`. Rotary planes that turn fast cannot rank blocks and are weighted down.
2. Transform: with `A = Sq^(1/2)` and `A Sk A = U L U^T` (`Sk`: covariance of the keys), the components `(k - mean) A U` are
   uncorrelated, and an error of one unit in any of them costs the same in logits. It is the Karhunen-Loeve transform in the
   queries' metric.
3. Bits: reverse water-filling over all components of all heads and layers at once, greedily by the distortion that one more
   bit removes; the scalar quantisers are Lloyd-Max for a Gaussian (Max 1960, table I).
4. Packing: components share nibbles without straddling, so that a score is one look-up in a 16-entry table per nibble.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .. import ops
from ..abc import KeySample, KeySummary
from ..config import OasisConfig
from ..log import event
from ..types import ModelShape
from .calibration import Calibration, Moments
from .growing import grown
from .moments import rotate_mean, rotate_moment, unrotated
from .quantizer import MAX_BITS, lloyd_max
from .water_filling import Layout, water_fill

DIMENSIONS_PER_NIBBLE = 8
"""A token has one nibble for so many dimensions of a kv head, on average over heads and layers: 4 bytes at head_dim 64.

Larger heads hold more to tell apart: at head_dim 256, 4 bytes are too few (`benchmarks.models`).
"""

FEWEST_NIBBLES = 8
"""What small heads have."""

FAST_PLANE_WEIGHT = 0.01
"""Weight in the metric of rotary planes that turn too fast to matter (measured: leaving them out costs nothing)."""

FAST_PLANE_ANGLE = 0.003
"""Radians per token above which a plane is fast: it turns by more than a block's width of phase within a few blocks."""

HORIZON = 1.5
"""A fit is for texts up to this many times as long as its sample."""

QUERY_START = 0.5
"""The queries that matter come from here on, relative to the sample's length."""

RIDGE = 1e-4
"""Added to the metric's diagonal, relative to its mean, so that it can be inverted."""


@dataclass(frozen=True)
class _Codebook:
    """Parameters of one layer, in the shapes of `ops.transform_write` and `ops.transform_score`."""

    mean: torch.Tensor
    encode: torch.Tensor
    decode: torch.Tensor
    thresholds: torch.Tensor
    nibbles: torch.Tensor
    shifts: torch.Tensor
    levels: torch.Tensor
    components: torch.Tensor
    offsets: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(vars(self).values())


class Transform(KeySummary):
    """TC32. One codebook per manager, fitted on the keys and queries of the sequences that turn sparse first, and again when
    much longer ones do."""

    def __init__(self, shape: ModelShape, config: OasisConfig) -> None:
        super().__init__(shape, config)
        dim = shape.head_dim
        self._nibbles_per_head = max(FEWEST_NIBBLES, dim // DIMENSIONS_PER_NIBBLE)
        self._moments = [
            torch.zeros((shape.kv_heads, dim, dim), dtype=torch.float32, device=shape.device) for _ in range(shape.num_layers)
        ]
        self._books: list[_Codebook] = []
        self._codes: list[torch.Tensor] = []
        turning = torch.zeros(dim) if shape.rotary is None else shape.rotary.turning(dim)
        self._weights = torch.where(turning > FAST_PLANE_ANGLE, FAST_PLANE_WEIGHT, 1.0).to(shape.device)
        if config.calibration is not None:
            calibration = Calibration.load(config.calibration, shape)
            self._build(calibration.layers, 0, calibration.max_tokens)

    @property
    def fitted(self) -> bool:
        return bool(self._books)

    @property
    def serves(self) -> float:
        return HORIZON

    @property
    def bytes_per_token(self) -> float:
        return self._nibbles_per_head / 2

    def observe(self, layer: int, queries: torch.Tensor, positions: torch.Tensor) -> None:
        """Add to the queries' second moment. Weighted by position: the later a query, the more it resembles those to come."""
        raw = unrotated(queries, positions, self.shape.rotary)
        grouped = raw.view(len(raw), self.shape.kv_heads, -1, self.shape.head_dim).permute(1, 0, 2, 3)
        weighted = grouped * (positions + 1).to(grouped)[None, :, None, None]
        self._moments[layer] += weighted.flatten(1, 2).transpose(1, 2) @ grouped.flatten(1, 2)

    def fit(self, samples: Iterable[KeySample]) -> None:
        length = 0
        moments = []
        for sample in samples:
            moments.append(self.moments(sample))
            length = max(length, int(sample.positions.max()) + 1)
        horizon = int(HORIZON * length)
        self._build(moments, int(QUERY_START * length), horizon)

    def moments(self, sample: KeySample) -> Moments:
        """What a fit needs to know of a layer: moments of the sample's keys and of the queries observed so far."""
        keys = unrotated(sample.keys.transpose(0, 1), sample.positions, self.shape.rotary).transpose(0, 1).double()
        second = keys.transpose(1, 2) @ keys / keys.shape[1]
        return Moments(keys.mean(1), second, self._moments[sample.layer].double())

    def _build(self, moments: list[Moments], query_start: int, horizon: int) -> None:
        """Make the codebooks for keys at positions below `horizon` and queries from `query_start` on."""
        transforms = [self._transform(layer, query_start, horizon) for layer in moments]
        variances = torch.stack([variance for _, _, _, variance in transforms])
        budget = self._nibbles_per_head * variances.shape[0] * variances.shape[1]
        layouts = water_fill(variances.cpu(), budget)
        books = [
            self._book(mean, encode, decode, layout)
            for (mean, encode, decode, _), layout in zip(transforms, layouts, strict=True)
        ]
        half = self.config.block_size // 2
        pages = self._codes[0].shape[0] if self._codes else 0
        codes = [
            torch.zeros((pages, layout.num_nibbles, half), dtype=torch.uint8, device=self.shape.device) for layout in layouts
        ]
        self._books, self._codes = books, codes  # together, whatever interrupts a fit

    def _transform(
        self, moments: Moments, query_start: int, horizon: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean, encoder, decoder and component variances of one layer; the variances are squared logits, up to one factor
        that all layers and heads share, since all have seen the same rows."""
        rotary = self.shape.rotary
        mean = rotate_mean(moments.key_mean.double(), rotary, 0, horizon)
        covariance = rotate_moment(moments.key_second.double(), rotary, 0, horizon) - mean[:, :, None] * mean[:, None]
        weights = self._weights.double()
        metric = rotate_moment(moments.query_second.double(), rotary, query_start, horizon) * weights * weights[:, None]
        ridge = RIDGE * metric.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(torch.float32).tiny)
        metric = metric + ridge[:, None, None] * torch.eye(metric.shape[1], dtype=torch.float64, device=metric.device)
        scales, axes = _eigh(metric)
        scales = scales.clamp(min=torch.finfo(torch.float32).tiny).sqrt()
        root = axes * scales[:, None] @ axes.transpose(1, 2)
        inverse = axes / scales[:, None] @ axes.transpose(1, 2)
        variance, basis = _eigh(root @ covariance @ root)
        variance, basis = variance.flip(-1).clamp(min=torch.finfo(torch.float32).tiny), basis.flip(-1)
        deviation = variance.sqrt()
        encode = (root @ basis) / deviation[:, None]
        decode = ((inverse @ basis) * deviation[:, None]).transpose(1, 2)
        return mean.float(), encode.float(), decode.float(), variance

    def _book(self, mean: torch.Tensor, encode: torch.Tensor, decode: torch.Tensor, layout: Layout) -> _Codebook:
        device = self.shape.device
        heads, used = layout.bits.shape
        thresholds = torch.full((heads, used, 2**MAX_BITS - 1), math.inf)
        levels = torch.zeros((layout.num_nibbles, 16, 4))
        components = torch.zeros((layout.num_nibbles, 4), dtype=torch.int64)
        filled = [0] * layout.num_nibbles
        value = torch.arange(16)
        for head in range(heads):
            for component in range(used):
                bits = int(layout.bits[head, component])
                if bits == 0:
                    continue
                quantizer = lloyd_max(bits)
                thresholds[head, component, : len(quantizer.thresholds)] = quantizer.thresholds
                nibble, shift = int(layout.nibbles[head, component]), int(layout.shifts[head, component])
                lane = filled[nibble]
                filled[nibble] += 1
                levels[nibble, :, lane] = quantizer.levels[(value >> shift) & (2**bits - 1)]
                components[nibble, lane] = head * used + component
        return _Codebook(
            mean=mean.to(device),
            encode=encode[:, :, :used].contiguous().to(device),
            decode=decode[:, :used].contiguous().to(device),
            thresholds=thresholds.to(device),
            nibbles=layout.nibbles.to(device),
            shifts=layout.shifts.to(device),
            levels=levels.to(device),
            components=components.to(device),
            offsets=layout.offsets.to(device),
        )

    def reserve(self, num_pages: int) -> None:
        self._codes = [grown(codes, num_pages) for codes in self._codes]

    def write(self, layer: int, pages: torch.Tensor, keys: torch.Tensor) -> None:
        book = self._books[layer]
        ops.transform_write(self._codes[layer], pages, keys, book.mean, book.encode, book.thresholds, book.nibbles, book.shifts)

    def score(self, layer: int, queries: torch.Tensor, pages: torch.Tensor, scale: float) -> torch.Tensor:
        book = self._books[layer]
        return ops.transform_score(
            self._codes[layer], pages, queries, book.mean, book.decode, book.levels, book.components, book.offsets, scale
        )

    def device_bytes(self) -> int:
        held = [*self._moments, *self._codes, *(tensor for book in self._books for tensor in book.tensors())]
        return sum(tensor.numel() * tensor.itemsize for tensor in held)


def _eigh(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch.linalg.eigh` of `(heads, D, D)`. Where it does not converge, the axes stay as they are: components are then
    correlated, and a code of the same size ranks less well."""
    try:
        values, axes = torch.linalg.eigh(matrices)
    except RuntimeError as error:  # torch's LinAlgError
        event(logging.WARNING, "fit-without-axes", heads=len(matrices), error=error)
        values, order = matrices.diagonal(dim1=1, dim2=2).nan_to_num(0.0, 0.0, 0.0).sort()
        axes = torch.eye(matrices.shape[1], dtype=matrices.dtype, device=matrices.device)[order].mT
    return values, axes
