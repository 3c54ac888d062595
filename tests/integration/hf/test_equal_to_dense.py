"""With a budget above the context the cache must not change a token."""

import pytest
import torch
from transformers import DynamicCache

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache

from .families import CONFIGS, prompt, tiny

WIDE = OasisConfig(budget_tokens=512, window_tokens=32, workers=0)
GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(params=sorted(CONFIGS))
def model(request):
    return tiny(request.param)


def same(model, ids, config=WIDE, **options):
    """Tokens of stock generation and of ours, with the same options."""
    options = {**GREEDY, **options}
    torch.manual_seed(11)
    expected = model.generate(ids, **options)
    torch.manual_seed(11)
    with OasisCache.for_model(model, config) as cache:
        actual = model.generate(ids, **{cache.keyword: cache}, **options)
        cache.manager.check_integrity()
    return torch.equal(expected, actual)


def test_greedy(model):
    assert same(model, prompt(1, 200))


def test_batch(model):
    assert same(model, prompt(3, 100))


def test_beam_search(model):
    assert same(model, prompt(2, 90), num_beams=3)


def test_seeded_sampling(model):
    assert same(model, prompt(1, 120), do_sample=True, temperature=0.8, top_k=20)


def test_left_padding(model):
    ids = prompt(3, 120)
    mask = torch.ones_like(ids)
    mask[1, :50], mask[2, :119] = 0, 0
    ids[mask == 0] = 0
    assert same(model, ids, attention_mask=mask)


def test_chunked_prefill_with_padding(model):
    ids = prompt(2, 150)
    mask = torch.ones_like(ids)
    mask[1, :70] = 0
    ids[mask == 0] = 0
    assert same(model, ids, attention_mask=mask, prefill_chunk_size=32)


def test_prompt_lookup(model):
    assert same(model, prompt(1, 200), prompt_lookup_num_tokens=4)


def test_assistant_model(model):
    assistant = tiny("llama")
    assert same(model, prompt(1, 150), assistant_model=assistant)


def test_two_turns(model):
    first, second = prompt(1, 100), prompt(1, 40, seed=9)
    dense = DynamicCache(config=model.config)
    with OasisCache.for_model(model, WIDE) as cache:
        answers = []
        for held in (dense, cache):
            text = model.generate(first, **{cache.keyword: held}, **GREEDY)
            text = torch.cat([text, second], dim=1)
            answers.append(model.generate(text, **{cache.keyword: held}, **GREEDY))
        cache.manager.check_integrity()
    assert torch.equal(*answers)


def test_logits(model):
    ids = prompt(1, 180)
    expected = model(ids).logits
    with OasisCache.for_model(model, WIDE) as cache:
        parts = [model(part, **{cache.keyword: cache}).logits for part in ids.split([150, 1, 1, 10, 18], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype):
    model = tiny("llama", dtype)
    ids = prompt(1, 160)
    expected = model(ids).logits[:, -1].float()
    with OasisCache.for_model(model, WIDE) as cache:
        model(ids[:, :-1], **{cache.keyword: cache})
        actual = model(ids[:, -1:], **{cache.keyword: cache}).logits[:, -1].float()
    torch.testing.assert_close(actual, expected, atol=0.15, rtol=0.05)


def test_background_threads_change_nothing():
    model, ids = tiny("llama"), prompt(1, 300)
    texts = []
    for workers in (0, 1, 2):
        config = OasisConfig(budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16, workers=workers)
        with OasisCache.for_model(model, config) as cache:
            texts.append(model.generate(ids, **{cache.keyword: cache}, **GREEDY))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
