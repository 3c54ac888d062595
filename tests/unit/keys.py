"""Synthetic keys and queries that look like a model's: most of their variance in a few directions, topics that last."""

from __future__ import annotations

import torch

from oasiskv import ModelShape, OasisConfig
from oasiskv.abc import KeySample, KeySummary

SHAPE = ModelShape(num_layers=2, query_heads=4, kv_heads=2, head_dim=16)
CONFIG = OasisConfig(budget_tokens=40, block_size=4, sink_tokens=4, window_tokens=4, workers=0)
PAGES = 48


def low_rank(num_pages=PAGES, rank=4, noise=0.3, seed=0):
    """Keys `(layers, num_pages, H, B, D)` and queries `(layers, 40, Hq, D)`."""
    torch.manual_seed(seed)
    layers, heads, dim = SHAPE.num_layers, SHAPE.kv_heads, SHAPE.head_dim
    basis = torch.linalg.qr(torch.randn(layers, heads, dim, dim)).Q[..., :rank]
    topic = torch.randn(layers, num_pages, heads, 1, rank) * 2
    inside = topic + torch.randn(layers, num_pages, heads, CONFIG.block_size, rank)
    keys = torch.einsum("lnhbr,lhdr->lnhbd", inside, basis)
    keys = keys + noise * torch.randn_like(keys) + 2 * torch.randn(layers, 1, heads, 1, dim)
    of_query = basis.repeat_interleave(SHAPE.group_size, 1)
    queries = torch.einsum("lthr,lhdr->lthd", torch.randn(layers, 40, SHAPE.query_heads, rank), of_query) * 2
    return keys, queries + noise * torch.randn_like(queries)


def build(kind: type[KeySummary], keys, queries, pages=None):
    """A summary that is fitted and holds all of `keys`, block `n` on page `pages[n]`."""
    summary = kind(SHAPE, CONFIG)
    if not summary.fitted:
        for layer in range(SHAPE.num_layers):
            summary.observe(layer, queries[layer], torch.arange(queries.shape[1]))
        summary.fit(
            KeySample(
                layer, keys[layer].transpose(0, 1).flatten(1, 2), torch.arange(keys[layer].shape[0] * keys[layer].shape[2])
            )
            for layer in range(SHAPE.num_layers)
        )
    pages = torch.arange(keys.shape[1]) if pages is None else pages
    summary.reserve(int(pages.max()) + 1)
    for layer in range(SHAPE.num_layers):
        summary.write(layer, pages, keys[layer])
    return summary


def exact(keys, queries, scale=0.25):
    """Block logits `(R, Hq, N)` of one layer's keys `(N, H, B, D)` for its queries `(R, Hq, D)`, in float64."""
    spread = keys.double().repeat_interleave(SHAPE.group_size, 1)
    return torch.einsum("rhd,nhbd->rhnb", queries.double(), spread).mul(scale).logsumexp(-1)


def correlation(first, second):
    """Mean Pearson correlation over the last dimension."""
    first, second = first.double(), second.double()
    first, second = first - first.mean(-1, keepdim=True), second - second.mean(-1, keepdim=True)
    return float(((first * second).sum(-1) / (first.norm(dim=-1) * second.norm(dim=-1))).mean())
