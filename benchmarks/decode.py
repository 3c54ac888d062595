"""How long a decode step takes on the real SmolLM2-135M in transformers: a working set beside full attention.

Four sequences of one long prompt, budget 2,048. Full attention by sdpa runs over a `DynamicCache`, which copies all keys and
values at every step to append to them, and over a `StaticCache` that was allocated beforehand and copies nothing. The three
take turns; figures are medians over steps, of the whole forward.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache
from oasiskv.testing import texts
from oasiskv.testing.models import load_smollm2

from .report import Row, at_least, run

BATCH = 4


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All rows."""
    model, tokenizer = load_smollm2()
    context, steps = (2048, 5) if options.quick else (8000, 15)
    for budget in (512,) if options.quick else (512, 2048):
        ids = tokenizer(texts.read("argparse"), return_tensors="pt", verbose=False).input_ids[:, : context + steps + 2]
        ours, dynamic, static = _seconds(model, ids, context, OasisConfig(budget_tokens=budget))
        name = f"{BATCH} sequences of {context} tokens, budget {budget}: {ours * 1e3:.0f} ms a step"
        yield at_least(f"dynamic-{budget}", f"{name}; sdpa with DynamicCache takes", dynamic / ours, "times", 3)
        yield at_least(f"static-{budget}", f"{name}; sdpa with StaticCache takes", static / ours, "times", 1)


@torch.no_grad()
def _seconds(model: PreTrainedModel, ids: torch.Tensor, context: int, config: OasisConfig) -> list[float]:
    """Median seconds of a step: ours, with a `DynamicCache`, with a `StaticCache`."""
    dynamic = DynamicCache(config=model.config)
    _read(model, ids[:, :context], dynamic, "past_key_values")
    static = StaticCache(config=model.config, max_cache_len=ids.shape[1])
    for source, target in zip(dynamic.layers, static.layers, strict=True):
        keys, values = (part.repeat_interleave(BATCH, 0) for part in (source.keys, source.values))
        target.update(keys, values, {"cache_position": torch.arange(context)})
    dynamic.batch_repeat_interleave(BATCH)
    with OasisCache.for_model(model, config) as cache:
        _read(model, ids[:, :context], cache, cache.keyword)
        cache.batch_repeat_interleave(BATCH)
        sides: list[tuple[Any, str]] = [(cache, cache.keyword), (dynamic, cache.keyword), (static, cache.keyword)]
        taken: list[list[float]] = [[] for _ in sides]
        for step in range(context, ids.shape[1]):
            token = ids[:, step : step + 1].expand(BATCH, -1)
            for times, (side, keyword) in zip(taken, sides, strict=True):
                start = time.perf_counter()
                model(token, **{keyword: side})
                times.append(time.perf_counter() - start)
    return [statistics.median(times[2:]) for times in taken]


def _read(model: PreTrainedModel, ids: torch.Tensor, cache: Any, keyword: str) -> None:  # noqa: ANN401 - transformers caches
    for piece in ids.split(2048, dim=1):
        model(piece, **{keyword: cache}, logits_to_keep=1)


if __name__ == "__main__":
    raise SystemExit(run("decode", __doc__ or "", measure))
