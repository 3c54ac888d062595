"""Statistics of a model's keys and queries that fit a transform code for every text, kept in a file.

Without a calibration a manager fits its code on the first texts that turn sparse. With one the code is there before the first
text, the same in every process, and never fitted again: no pause, and nothing of one user's text shapes another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from ..errors import ConfigError
from ..types import ModelShape

_FORMAT = 1


@dataclass(frozen=True)
class Moments:
    """Of one layer, with the rotation undone (see `moments`): `(kv_heads, head_dim)` and `(kv_heads, head_dim, head_dim)`.

    Attributes:
        key_mean, key_second: `E[k]` and `E[k k^T]`.
        query_second: `E[q q^T]` over the query heads of each group, up to one factor that all layers share.
    """

    key_mean: torch.Tensor
    key_second: torch.Tensor
    query_second: torch.Tensor


@dataclass(frozen=True)
class Calibration:
    """The moments of all layers, and the number of positions that the code shall serve."""

    layers: list[Moments]
    max_tokens: int

    @staticmethod
    def merged(parts: Sequence[Sequence[Moments]], max_tokens: int) -> Calibration:
        """The mean over several texts; each weighs the same."""
        layers = []
        scales = [sum(float(layer.query_second.diagonal(dim1=1, dim2=2).sum()) for layer in part) for part in parts]
        for same in zip(*parts, strict=True):
            layers.append(
                Moments(
                    torch.stack([layer.key_mean for layer in same]).mean(0),
                    torch.stack([layer.key_second for layer in same]).mean(0),
                    torch.stack([layer.query_second / scale for layer, scale in zip(same, scales, strict=True)]).mean(0),
                )
            )
        return Calibration(layers, max_tokens)

    def save(self, path: str | PathLike[str]) -> None:
        """Write an `.npz` file."""
        mean, keys, queries = (
            torch.stack([getattr(layer, name) for layer in self.layers]).float().cpu().numpy()
            for name in ("key_mean", "key_second", "query_second")
        )
        with open(path, "wb") as file:
            np.savez(file, format=_FORMAT, max_tokens=self.max_tokens, key_mean=mean, key_second=keys, query_second=queries)

    @staticmethod
    def load(path: str | PathLike[str], shape: ModelShape) -> Calibration:
        """Read what `save` wrote, for a model of this shape.

        Raises:
            ConfigError: no such file, not a calibration, or one of another model.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                found: dict[str, Any] = {name: file[name] for name in file.files}
            if int(found["format"]) != _FORMAT:
                raise ConfigError(f"calibration {path} has format {int(found['format'])}; this version reads {_FORMAT}")
            names = ("key_mean", "key_second", "query_second")
            arrays = [torch.from_numpy(found[name]).to(shape.device) for name in names]
            max_tokens = int(found["max_tokens"])
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            raise ConfigError(
                f"calibration is {str(path)!r}, which cannot be read: {error}; make one with `oasiskv calibrate`"
            ) from error
        expected = (shape.num_layers, shape.kv_heads, shape.head_dim)
        square = (*expected, shape.head_dim)
        if [tuple(array.shape) for array in arrays] != [expected, square, square]:
            raise ConfigError(
                f"calibration {str(path)!r} is for {tuple(arrays[0].shape)} layers, kv heads and head_dim, and the model has "
                f"{expected}; make one for this model with `oasiskv calibrate`"
            )
        return Calibration([Moments(*layer) for layer in zip(*arrays, strict=True)], max_tokens)
