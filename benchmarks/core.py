"""The main job on the real SmolLM2-135M: identical where it must be, close where it may differ, and small."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache
from oasiskv.adapters.hf.fidelity import teacher_forced
from oasiskv.testing import texts
from oasiskv.testing.models import load_smollm2

from .report import Row, at_least, at_most, run

TEXTS = ("manual", "argparse")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All rows."""
    model, tokenizer = load_smollm2()
    yield from identical(model, tokenizer)
    yield from fidelity(model, tokenizer, tokens=32 if options.quick else 128)
    yield from memory(model, tokenizer)


def tokens_of(tokenizer: Any, name: str, count: int) -> torch.Tensor:  # noqa: ANN401 - tokenizers share no typed base
    """The first `count` tokens of a text, `(1, count)`."""
    ids: torch.Tensor = tokenizer(texts.read(name)[: 10 * count], return_tensors="pt", verbose=False).input_ids[:, :count]
    return ids


def identical(model: PreTrainedModel, tokenizer: Any) -> Iterator[Row]:  # noqa: ANN401 - as above
    """Budget above the context: the tokens and logits of sdpa with a `DynamicCache`."""
    ids = tokens_of(tokenizer, "argparse", 600)
    batch = torch.cat([ids, ids.roll(200, dims=1)])
    mask = torch.ones_like(batch)
    mask[1, :250] = 0
    batch[mask == 0] = tokenizer.pad_token_id
    cases: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
        "greedy": (ids, {}),
        "beam search, 3 beams": (ids, {"num_beams": 3}),
        "left-padded batch": (batch, {"attention_mask": mask}),
        "prompt lookup": (ids, {"prompt_lookup_num_tokens": 4}),
        "seeded sampling": (ids, {"do_sample": True, "top_k": 40}),
    }
    config = OasisConfig(budget_tokens=1024)
    common: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    for name, (prompt, extra) in cases.items():
        torch.manual_seed(1)
        expected = model.generate(prompt, **{**common, **extra})
        torch.manual_seed(1)
        with OasisCache.for_model(model, config) as cache:
            actual = model.generate(prompt, **{cache.keyword: cache}, **{**common, **extra})
        yield at_least(
            f"identical-{name.split()[0]}", f"budget >= context, {name}: same tokens", torch.equal(actual, expected), "", 1
        )
    yield two_turns(model, ids, config, common)
    with torch.no_grad(), OasisCache.for_model(model, config) as cache:
        parts = [model(part, **{cache.keyword: cache}).logits for part in ids.split([500, 60, *[1] * 40], dim=1)]
        difference = (torch.cat(parts, dim=1) - model(ids).logits).abs().max().item()
    yield at_most("identical-logits", "budget >= context: largest difference of a logit", difference, "", 1e-3)


def two_turns(model: PreTrainedModel, ids: torch.Tensor, config: OasisConfig, common: dict[str, Any]) -> Row:
    """A second prompt on the same cache."""
    answers = []
    with OasisCache.for_model(model, config) as cache:
        for held in (DynamicCache(config=model.config), cache):
            text = model.generate(ids[:, :400], **{cache.keyword: held}, **common)
            text = torch.cat([text, ids[:, 500:560]], dim=1)
            answers.append(model.generate(text, **{cache.keyword: held}, **common))
    return at_least("identical-turns", "budget >= context, two turns: same tokens", torch.equal(*answers), "", 1)


def fidelity(model: PreTrainedModel, tokenizer: Any, tokens: int) -> Iterator[Row]:  # noqa: ANN401 - as above
    """4,096 tokens of context, budget 1,024, defaults, no drafts, teacher-forced."""
    for name in TEXTS:
        ids = tokens_of(tokenizer, name, 4096 + tokens)
        config = OasisConfig(budget_tokens=1024)
        divergence, stats = teacher_forced(model, ids, 4096, config)
        error = divergence.standard_error
        yield at_most(
            f"kl-{name}", f"{name}, 4K, budget 1024, {tokens} tokens: KL (s.e. {error:.4f})", divergence.mean_kl, "nats", 0.015
        )
        yield at_least(f"top1-{name}", f"{name}: same greedy token", divergence.agreement, "", 0.95)
        limit = config.burst_blocks + config.correction_blocks
        most = stats.most_new_blocks + stats.most_corrected_blocks
        yield at_most(f"new-{name}", f"{name}: most new blocks of a head in a step", most, "blocks", limit)


def memory(model: PreTrainedModel, tokenizer: Any) -> Iterator[Row]:  # noqa: ANN401 - as above
    """8,000 tokens of context, budget 512: what is allocated on the device against the full KV."""
    ids = tokens_of(tokenizer, "manual", 8000)
    with torch.no_grad(), OasisCache.for_model(model, OasisConfig(budget_tokens=512)) as cache:
        for piece in ids.split([4000, 3990, *[1] * 10], dim=1):
            model(piece, **{cache.keyword: cache}, logits_to_keep=1)
        stats = cache.stats()
        share = (stats.pool_bytes + stats.summary_bytes) / stats.full_kv_bytes
    yield at_most("device-bytes", "8K, budget 512: pool and summaries / full KV", share, "", 0.1)
    yield at_most("device-bytes-all", "8K, budget 512: with tables", stats.device_bytes / stats.full_kv_bytes, "", 0.1)


if __name__ == "__main__":
    raise SystemExit(run("core", __doc__ or "", measure))
