"""Compiled models equal stock with an `OasisCache`, and are untouched without. The right values are those of uncompiled."""

import pytest
import torch
import torch._dynamo
from transformers import DynamicCache

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache

from .families import prompt, tiny

WIDE = OasisConfig(budget_tokens=512, window_tokens=32, workers=0)
NARROW = OasisConfig(budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16, workers=0)
GREEDY = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_forward(model, **options):
    model.forward = torch.compile(model.forward, backend="eager", **options)
    return model


def compiled_in_place(model, **options):
    model.compile(backend="eager", **options)
    return model


def wrapped(model, **options):
    return torch.compile(model, backend="eager", **options)


def two_turns(model, cache, keyword):
    """A padded batch, generated, continued by new tokens and generated again: many lengths."""
    first, more = prompt(2, 60), prompt(2, 20, seed=8)
    mask = torch.ones_like(first)
    mask[1, :30] = 0
    text = model.generate(first, attention_mask=mask, **{keyword: cache}, **GREEDY)
    text = torch.cat([text, more], dim=1)
    mask = torch.cat([mask, torch.ones(2, text.shape[1] - mask.shape[1], dtype=mask.dtype)], dim=1)
    return model.generate(text, attention_mask=mask, **{keyword: cache}, **GREEDY)


@pytest.mark.parametrize(
    ("family", "implementation", "way"),
    [
        ("llama", "sdpa", compiled_forward),
        ("llama-mqa", "eager", compiled_forward),
        ("gemma3", "sdpa", compiled_in_place),
    ],
)
def test_turns_of_a_compiled_model(family, implementation, way):
    model = tiny(family)
    model.set_attn_implementation(implementation)
    with OasisCache.for_model(model, WIDE) as cache:
        keyword = cache.keyword
    expected = two_turns(model, DynamicCache(config=model.config), keyword)
    compiled = way(model)
    for _ in range(2 if family == "llama" else 1):  # the second time, everything is compiled
        with OasisCache.for_model(compiled, WIDE) as cache:
            assert torch.equal(two_turns(compiled, cache, keyword), expected)
            assert cache._shared.stream.checked
            assert torch.equal(two_turns(compiled, DynamicCache(config=model.config), keyword), expected)
            cache.manager.check_integrity()


def test_a_sparse_compiled_model_chooses_what_an_uncompiled_one_chooses():
    model, ids = tiny("llama"), prompt(1, 200)
    texts = []
    for way in (lambda model: model, compiled_forward):
        compiled = way(model)
        with OasisCache.for_model(model, NARROW) as cache:
            texts.append(compiled.generate(ids, **{cache.keyword: cache}, **GREEDY))
            assert cache.stats().sparse_sequences == 1
    assert torch.equal(*texts)


@pytest.mark.parametrize("way", [compiled_in_place, wrapped])
@torch.no_grad()
def test_stock_was_compiled_before(way):
    model, ids = tiny("llama-mqa"), prompt(1, 80)
    expected = model(ids).logits
    compiled = way(model)
    assert torch.equal(compiled(ids, use_cache=False).logits, expected)
    with OasisCache.for_model(model, WIDE) as cache:
        keyword = cache.keyword
        compiled(ids, **{keyword: DynamicCache(config=model.config)})
        parts = [compiled(part, **{keyword: cache}).logits for part in ids.split([60, 1, 1, 18], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-3, rtol=0)
        assert torch.equal(compiled(ids, use_cache=False).logits, expected)
    assert torch.equal(compiled(ids, use_cache=False).logits, expected)


@pytest.mark.parametrize(("way", "implementation"), [(compiled_forward, "sdpa"), (compiled_in_place, "eager")])
@torch.no_grad()
def test_the_whole_graph_stock_beside_an_open_cache_and_refused_with_it(way, implementation):
    model, ids = tiny("llama-mqa"), prompt(1, 40)
    model.set_attn_implementation(implementation)
    expected = model(ids).logits
    uncompiled = model.forward
    with OasisCache.for_model(model, WIDE) as cache:
        model(ids, **{cache.keyword: cache})
        compiled = way(model, fullgraph=True)
        dense = compiled(ids, **{cache.keyword: DynamicCache(config=model.config)}).logits
        assert torch.equal(dense, expected)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the model without fullgraph=True"):
            compiled(ids[:, :1], **{cache.keyword: cache})
        # Nothing has changed: the cache goes on uncompiled.
        model.forward, model._compiled_call_impl = uncompiled, None
        assert cache.get_seq_length() == 40
        more = model(torch.cat([ids, ids[:, :1]], dim=1)).logits[:, -1:]
        torch.testing.assert_close(model(ids[:, :1], **{cache.keyword: cache}).logits, more, atol=1e-3, rtol=0)
