"""How close codes of keys and values are, on those of the small model: `python -m benchmarks.codecs`.

What the library codes with, and beside it one scale per slot, per token, and per token and 32 channels, at the same bits.
Queries are Gaussian, of norm 32: enough to make attention narrow, and the same for all.
Needs the small model (see CONTRIBUTING.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from benchmarks.core import tokens_of
from benchmarks.report import Row, at_most, run
from oasiskv.testing.models import load_smollm2
from oasiskv.tiers import SegmentLayout
from oasiskv.tiers.codecs import CODECS, Codec

_BLOCK = 16
_BARS = {"fp8": (0.09, 0.025), "int8": (0.015, 0.006), "int4": (0.11, 0.06)}
_DIMS: dict[str, tuple[int, ...]] = {"slot": (3, 4), "token": (4,), "channel": (3,), "group32": (5,)}


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Change of the output of attention, as a share of its norm, when the keys or the values have been coded."""
    keys, values = _keys_and_values(256 if options.quick else 1024)
    queries = 4 * torch.randn(*keys.shape[:2], 8, keys.shape[-1], generator=torch.Generator().manual_seed(0))
    right = _attend(queries, keys, values)

    def change(output: torch.Tensor) -> float:
        return float((output - right).norm() / right.norm())

    for name, codec in CODECS.items():
        coded_keys, coded_values = _there_and_back(codec, keys, values)
        for what, output, bar in (
            ("keys", _attend(queries, coded_keys, values), _BARS[name][0]),
            ("values", _attend(queries, keys, coded_values), _BARS[name][1]),
        ):
            yield at_most(f"{name}-{what}", f"{name}, {what} coded: change of the output", change(output), "share", bar)
    for bits in (8, 4):
        for scale in ("slot", "token", "group32", "channel"):
            for what, output in (
                ("keys", _attend(queries, _rounded(keys, bits, scale), values)),
                ("values", _attend(queries, keys, _rounded(values, bits, scale))),
            ):
                title = f"for comparison: {bits} bits, least value and scale per {scale}, {what}"
                yield at_most(f"{bits}-{scale}-{what}", title, change(output), "share", 1.0)
    output = _attend(queries, _rounded(keys, 4, "channel", symmetric=True), values)
    yield at_most("4-symmetric-keys", "for comparison: 4 bits, scale per channel alone, keys", change(output), "share", 1.0)


def _keys_and_values(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    model, tokenizer = load_smollm2()
    ids = tokens_of(tokenizer, "argparse", tokens)
    with torch.no_grad():
        layers = model(ids, use_cache=True).past_key_values.layers
    return torch.stack([layer.keys[0] for layer in layers]), torch.stack([layer.values[0] for layer in layers])


def _attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    weights = (queries @ keys.transpose(-1, -2) * keys.shape[-1] ** -0.5).softmax(-1)
    attended: torch.Tensor = weights @ values
    return attended


def _there_and_back(codec: Codec, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.stack([keys, values], 2).unflatten(3, (-1, _BLOCK)).transpose(2, 3).contiguous()
    layout = SegmentLayout(keys.shape[1], blocks.shape[2], _BLOCK, keys.shape[-1], "float32")
    into = bytearray(blocks.nbytes)
    coded = codec.encode(memoryview(blocks.flatten().numpy().tobytes()), layout)
    codec.decode(memoryview(coded), memoryview(into), layout)
    back = torch.frombuffer(into, dtype=torch.float32).view(blocks.shape).transpose(2, 3).flatten(3, 4)
    return back[:, :, 0], back[:, :, 1]


def _rounded(values: torch.Tensor, bits: int, scale: str, symmetric: bool = False) -> torch.Tensor:
    blocks = values.unflatten(2, (-1, _BLOCK))
    if scale == "group32":
        blocks = blocks.unflatten(4, (-1, 32))
    dims = _DIMS[scale]
    most = blocks.abs().amax(dims, keepdim=True) if symmetric else blocks.amax(dims, keepdim=True)
    least = torch.zeros_like(most) if symmetric else blocks.amin(dims, keepdim=True)
    step = ((most - least) / (2 ** (bits - symmetric) - 1)).clamp_min(1e-30)
    back: torch.Tensor = (((blocks - least) / step).round() * step + least).reshape(values.shape)
    return back


if __name__ == "__main__":
    raise SystemExit(run("codecs", "How close codes of keys and values are, on those of the small model", measure))
