"""Gemma 2's soft cap of attention logits, with transformers' eager attention as the judge."""

import pytest
import torch

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache
from oasiskv.adapters.hf.measure import Spans

from .families import prompt, tiny

SPARSE = {"block_size": 8, "sink_tokens": 8, "window_tokens": 16, "workers": 0}


def capped_model(cap: float, sharpness: float = 1.0):
    model = tiny("gemma2")
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = cap
        layer.self_attn.q_proj.weight.data.mul_(sharpness)
    return model


@pytest.mark.parametrize("cap", [0.5, 3.0, 50.0])
def test_logits_are_those_of_eager_attention(cap):
    model, ids = capped_model(cap, sharpness=20.0), prompt(1, 120)
    expected = model(ids).logits
    assert model.config._attn_implementation == "eager"
    with OasisCache.for_model(model, OasisConfig(budget_tokens=256, **SPARSE)) as cache:
        parts = [model(part, **{cache.keyword: cache}).logits for part in ids.split([70, 30, *[1] * 20], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-4, rtol=1e-4)
    other = capped_model(cap * 4, sharpness=20.0)(ids).logits
    assert not torch.allclose(expected, other, atol=1e-2)  # the cap is felt


def test_another_cache_beside_an_open_one_keeps_the_cap():
    model, ids = capped_model(0.5), prompt(1, 60)
    expected = model(ids).logits
    with OasisCache.for_model(model, OasisConfig(budget_tokens=256, **SPARSE)):
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cap", [8.0, 20.0])
def test_blocks_are_chosen_nearly_as_well_as_by_their_true_masses(cap):
    """By the share of full attention that is seen: `quest` ranks by summaries, whose estimates know the cap, `oracle` by exact
    masses, and `random` by nothing."""
    model, seen = capped_model(cap, sharpness=20.0), {}
    for predictor in ("oracle", "quest", "random"):
        config = OasisConfig(budget_tokens=128, predictor=predictor, correction_blocks=0, **SPARSE)
        spans = Spans.read(model, prompt(1, 660), 600, 60, 1, [config.summary], config)
        seen[predictor] = spans.measure(config).mean_coverage
    assert seen["quest"] - seen["random"] > 0.85 * (seen["oracle"] - seen["random"])


def test_what_a_step_says_it_has_seen_is_near_what_a_replay_counts():
    """The first is an estimate for the blocks that are not read, of capped logits; the second is exact."""
    model, ids = capped_model(20.0, sharpness=20.0), prompt(1, 660)
    config = OasisConfig(budget_tokens=128, **SPARSE)
    exact = Spans.read(model, ids, 600, 60, 1, [config.summary], config).measure(config).mean_coverage
    with OasisCache.for_model(model, config) as cache:
        model(ids[:, :599], **{cache.keyword: cache})
        for token in ids[:, 599:659].split(1, dim=1):
            model(token, **{cache.keyword: cache})
        assert cache.stats().coverage == pytest.approx(exact, abs=0.15)  # uncapped estimates are off by 0.34
