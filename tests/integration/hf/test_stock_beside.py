"""A call without an `OasisCache` is the stock call, whatever the model is set to and whatever is open; copies are stock."""

import copy
import inspect
import json
import pickle

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache
from oasiskv.adapters.hf.binding import _Hook
from oasiskv.errors import UnsupportedModel

from .families import COMMON, prompt, tiny

WIDE = OasisConfig(budget_tokens=512, window_tokens=32, workers=0)
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
calls = []


def counted(*args, **kwargs):
    """An attention function of a user's own."""
    calls.append(1)
    return sdpa_attention_forward(*args, **kwargs)


AttentionInterface.register("counted", counted)
AttentionMaskInterface.register("counted", sdpa_mask)


def padded(batch, length):
    ids = prompt(batch, length)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    return ids, mask


def same_as_stock(model, ids, mask, cache, expected):
    """Whether a dense cache gives the same bits beside an open one, and the open one the same tokens."""
    logits, tokens = expected
    dense = model(ids, attention_mask=mask, **{cache.keyword: DynamicCache(config=model.config)}).logits
    cache.reset()
    ours = model.generate(ids, attention_mask=mask, **{cache.keyword: cache}, **GREEDY)
    again = model.generate(ids, attention_mask=mask, **GREEDY)
    return torch.equal(dense, logits) and torch.equal(again, tokens) and torch.equal(ours, tokens)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention", "counted"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()  # flex attention has no gradients on the CPU
def test_every_implementation_stays_what_it_is(family, implementation):
    model = tiny(family)
    model.set_attn_implementation(implementation)
    ids, mask = padded(2, 70)
    with torch.compiler.set_stance("force_eager"):  # compiling flex attention would take half a minute
        expected = model(ids, attention_mask=mask).logits, model.generate(ids, attention_mask=mask, **GREEDY)
        with OasisCache.for_model(model, WIDE) as cache:
            assert model.config._attn_implementation == implementation
            before = len(calls)
            assert same_as_stock(model, ids, mask, cache, expected)
            assert (len(calls) > before) == (implementation == "counted")
    assert model.config._attn_implementation == implementation
    assert type(model.config._attn_implementation) is str


def test_an_implementation_without_masks():
    """`paged|eager` works with the paged cache of continuous batching, and with ours."""
    model, ids = tiny("llama"), prompt(1, 70)
    tokens = model.generate(ids, **GREEDY)
    model.set_attn_implementation("paged|eager")
    with OasisCache.for_model(model, WIDE) as cache:
        assert torch.equal(model.generate(ids, **{cache.keyword: cache}, **GREEDY), tokens)


def test_attention_weights_of_stock_calls():
    model, ids = tiny("llama"), prompt(1, 40)
    model.set_attn_implementation("eager")
    expected = model(ids, output_attentions=True).attentions
    with OasisCache.for_model(model, WIDE) as cache:
        actual = model(ids, output_attentions=True).attentions
        assert len(actual) == len(expected) == 3
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
        with pytest.raises(UnsupportedModel, match="output_attentions"):
            model(ids, output_attentions=True, **{cache.keyword: cache})


def test_the_implementation_may_be_set_while_a_cache_is_open():
    model = tiny("llama")
    ids, mask = padded(2, 70)
    names = ["sdpa", "eager", "counted", "eager", "sdpa"]
    expected = {}
    for name in names:
        model.set_attn_implementation(name)
        expected[name] = model(ids, attention_mask=mask).logits, model.generate(ids, attention_mask=mask, **GREEDY)
    with OasisCache.for_model(model, WIDE) as cache:
        for name in names:
            model.set_attn_implementation(name)
            assert same_as_stock(model, ids, mask, cache, expected[name])
            assert model.config._attn_implementation == name


def test_what_is_registered_while_a_cache_is_open_is_used_and_stays():
    model, ids = tiny("llama"), prompt(1, 30)
    stock = AttentionInterface()["sdpa"]
    used = []

    def later(*args, **kwargs):
        used.append(1)
        return stock(*args, **kwargs)

    try:
        with OasisCache.for_model(model, WIDE) as cache:
            AttentionInterface.register("sdpa", later)
            expected = model.generate(ids, **GREEDY)
            count = len(used)
            assert count
            assert torch.equal(model.generate(ids, **{cache.keyword: cache}, **GREEDY), expected)
            assert len(used) == count
        assert AttentionInterface()["sdpa"] is later
    finally:
        AttentionInterface.register("sdpa", stock)


def test_an_override_of_the_shared_registry_is_served_and_stays():
    model, ids = tiny("llama"), prompt(1, 30)
    expected = model.generate(ids, **GREEDY)
    general = AttentionInterface()["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = counted
    try:
        with OasisCache.for_model(model, WIDE) as cache:
            before = len(calls)
            assert torch.equal(model.generate(ids, **{cache.keyword: cache}, **GREEDY), expected)
            assert len(calls) == before
            model(ids)
            assert len(calls) > before
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is counted
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is general


def test_the_registries_are_as_they_were_after_the_last_cache():
    before = dict(AttentionInterface()), dict(AttentionMaskInterface())
    models = [tiny("llama"), tiny("gemma3")]
    models[1].set_attn_implementation("eager")
    caches = [OasisCache.for_model(model, WIDE) for model in models]
    assert dict(AttentionInterface()) != before[0]
    for cache in caches:
        cache.close()
    assert (dict(AttentionInterface()), dict(AttentionMaskInterface())) == before


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_with_an_open_cache_is_a_stock_model(copied, implementation):
    model, ids = tiny("gemma3"), prompt(1, 50)
    model.set_attn_implementation(implementation)
    logits, tokens = model(ids).logits, model.generate(ids, **GREEDY)
    with OasisCache.for_model(model, WIDE) as cache:
        twin = copied(model)
        assert type(twin.config._attn_implementation) is str
        assert twin.config._attn_implementation == implementation
        assert cache.keyword
    # With no cache open, nothing of ours may be called for the copy.
    assert torch.equal(twin(ids).logits, logits)
    assert torch.equal(twin.generate(ids, **GREEDY), tokens)
    hooks = [
        hook for module in twin.modules() for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    ]
    assert hooks
    assert not any(isinstance(hook, _Hook) for hook in hooks)
    with OasisCache.for_model(twin, WIDE) as cache:
        assert torch.equal(twin.generate(ids, **{cache.keyword: cache}, **GREEDY), tokens)
        assert cache._shared.stream.checked
        assert torch.equal(twin(ids).logits, logits)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_saved_model_carries_nothing_along(tmp_path, implementation):
    model, ids = tiny("llama"), prompt(1, 50)
    model.set_attn_implementation(implementation)
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "before")
    with OasisCache.for_model(model, WIDE) as cache:
        model.generate(ids, **{cache.keyword: cache}, **GREEDY)
        model.save_pretrained(tmp_path / "open")
    for name in ("config.json", "generation_config.json"):
        texts = [(tmp_path / folder / name).read_text() for folder in ("before", "open")]
        assert json.loads(texts[0]) == json.loads(texts[1])
        assert "oasis" not in texts[1]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "open", attn_implementation=implementation)
    assert torch.equal(loaded(ids).logits, expected)


def test_an_eager_model_of_the_same_configuration():
    """Two models that share one configuration object, one with a cache."""
    model, ids = tiny("llama"), prompt(1, 50)
    model.set_attn_implementation("eager")
    other = type(model)(model.config).eval()
    expected = other(ids).logits
    with OasisCache.for_model(model, WIDE), OasisCache.for_model(other, WIDE) as cache:
        assert torch.equal(other(ids).logits, expected)
        torch.testing.assert_close(other(ids, **{cache.keyword: cache}).logits, expected, atol=1e-3, rtol=0)
    assert type(model.config._attn_implementation) is str


def test_an_eager_function_that_cannot_be_told_is_refused(monkeypatch):
    model = tiny("llama")
    model.set_attn_implementation("eager")
    monkeypatch.delitem(inspect.unwrap(type(model.model.layers[0].self_attn).forward).__globals__, "eager_attention_forward")
    with pytest.raises(
        UnsupportedModel, match=r"LlamaAttention runs with attn_implementation='eager'.*set_attn_implementation"
    ):
        OasisCache.for_model(model, WIDE)
    assert not model._forward_pre_hooks
    assert type(model.config._attn_implementation) is str


def test_models_without_sdpa_keep_their_own_eager_function():
    """Gemma 2 has a soft cap in its eager function, which sdpa lacks."""
    config = transformers.Gemma2Config(**COMMON, num_hidden_layers=2, num_key_value_heads=2, attn_logit_softcapping=0.5)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = prompt(1, 50)
    expected = model(ids).logits
    with OasisCache.for_model(model, WIDE):
        assert torch.equal(model(ids).logits, expected)


def test_continuous_batching_beside_an_open_cache():
    settings = pytest.importorskip("transformers.generation.configuration_utils").ContinuousBatchingConfig(
        num_blocks=8, max_batch_tokens=64
    )
    model = tiny("llama")
    texts = [[5, 6, 7], [9, 8, 7, 6]]

    def batch():
        done = model.generate_batch(texts, max_new_tokens=3, do_sample=False, continuous_batching_config=settings)
        return [done[name].generated_tokens for name in sorted(done)]

    expected = batch()
    with OasisCache.for_model(model, WIDE):
        assert batch() == expected
