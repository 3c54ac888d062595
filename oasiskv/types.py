"""Plain value types that more than one room uses."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .errors import ConfigError

EMPTY = -1
"""Marks an unused entry in a block or slot table (tensors cannot hold `None`)."""

MAX_STEP_ROWS = 16
"""Query rows per sequence that one decode or verify step may hold; more rows are a prefill."""

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding as the summaries need it: how fast each plane turns.

    `angles` holds radians per token, one per plane, in the model's order; plane `i` of the half-split layout spans the
    dimensions `i` and `i + len(angles)` of a key. Dimensions beyond `2 * len(angles)` do not turn (partial rotary). `scaling`
    multiplies what turns (YaRN's attention factor).
    """

    angles: tuple[float, ...]
    scaling: float = 1.0

    def turning(self, head_dim: int) -> torch.Tensor:
        """Radians per token of every key dimension, shape `(head_dim,)`, zero where nothing turns."""
        planes = torch.tensor(self.angles, dtype=torch.float32)
        both = torch.cat([planes, planes])
        if both.numel() > head_dim:
            raise ConfigError(
                f"Rotary.angles holds {len(self.angles)} planes, but head_dim {head_dim} has room for {head_dim // 2}"
            )
        return torch.cat([both, both.new_zeros(head_dim - both.numel())])

    def turns(self, positions: torch.Tensor) -> torch.Tensor:
        """Cosines and sines of every plane at positions `(...)`, times `scaling`: `(..., 2, planes)` in float32."""
        angle = positions[..., None] * torch.tensor(self.angles, dtype=torch.float32, device=positions.device)
        return torch.stack([angle.cos(), angle.sin()], dim=-2) * self.scaling

    def rotate(self, vectors: torch.Tensor, positions: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        """Turn `(..., heads, head_dim)` by its positions `(...)`, or back; computed in float32."""
        cosine, sine = self.turns(positions)[..., None, :, :].unbind(-2)
        if inverse:
            cosine, sine = cosine / self.scaling**2, -sine / self.scaling**2
        return turn(vectors.float(), cosine, sine)


def turn(vectors: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn the planes of vectors `(..., head_dim)` by angles `(..., planes)`; dimensions beyond the planes stay."""
    planes = cosine.shape[-1]
    first, second = vectors[..., :planes], vectors[..., planes : 2 * planes]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, vectors[..., 2 * planes :]], dim=-1)


@dataclass(frozen=True)
class ModelShape:
    """What the core knows of a model: the attention layers whose KV it manages.

    Attributes:
        num_layers: managed (full-attention) layers, numbered from 0.
        query_heads: query heads per layer; a multiple of `kv_heads` (MHA, GQA and MQA alike).
        kv_heads: key/value heads per layer.
        head_dim: dimensions of a key and of a value.
        dtype: of keys and values.
        device: where queries arrive and the pool lives.
        rotary: see `Rotary`; `None` when unknown. Summaries that use it do without.
    """

    num_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rotary: Rotary | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "query_heads", "kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"ModelShape.{name} is {value!r}; it must be a positive integer")
        if self.query_heads % self.kv_heads:
            raise ConfigError(
                f"ModelShape.query_heads is {self.query_heads}, not a multiple of kv_heads {self.kv_heads}; "
                "pass the numbers of one tensor-parallel rank, both divided alike"
            )
        if self.dtype not in SUPPORTED_DTYPES:
            supported = ", ".join(map(str, SUPPORTED_DTYPES))
            raise ConfigError(f"ModelShape.dtype is {self.dtype}; supported are {supported}")
        object.__setattr__(self, "device", torch.device(self.device))

    @property
    def group_size(self) -> int:
        """Query heads that share one kv head."""
        return self.query_heads // self.kv_heads

    def slot_bytes(self, block_size: int) -> int:
        """Bytes of one slot: K and V of one block of one kv head in one layer."""
        return 2 * block_size * self.head_dim * self.dtype.itemsize

    def token_bytes(self) -> int:
        """Bytes of K and V of one token over all kv heads and layers."""
        return self.num_layers * self.kv_heads * self.slot_bytes(1)
