"""Models and modes that cannot be served are refused in one line, before anything changes."""

import pytest
import torch
import transformers

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache
from oasiskv.adapters.hf.projection import decoder_layers
from oasiskv.errors import InputError, UnsupportedModel

from .families import COMMON, prompt, tiny

NARROW = OasisConfig(budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16)
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


def test_weights_on_the_meta_device():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, num_hidden_layers=1))
    with pytest.raises(UnsupportedModel, match=r"has weights on the meta device: they are not loaded, or offloaded"):
        OasisCache.for_model(model, NARROW)


def test_one_weight_that_is_offloaded():
    model = tiny("llama")
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(UnsupportedModel, match="load all of them onto one device"):
        OasisCache.for_model(model, NARROW)


def test_weights_of_several_dtypes():
    model = tiny("llama").to(torch.bfloat16)
    model.model.layers[1].self_attn.v_proj.float()
    hook = model.model.layers[1].self_attn.v_proj.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    words = (
        r"makes queries, keys and values in torch.bfloat16, torch.bfloat16 and torch.float32 in layer 1; .*model.to\(dtype\)"
    )
    with pytest.raises(UnsupportedModel, match=words):
        OasisCache.for_model(model, NARROW)
    hook.remove()


def test_weights_of_another_dtype_where_attention_does_not_see_them():
    model = tiny("llama").to(torch.bfloat16)
    model.lm_head.float()
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    expected = model.generate(prompt(1, 40), **GREEDY)
    with OasisCache.for_model(model, OasisConfig(budget_tokens=512, workers=0)) as cache:
        assert cache.shape.dtype == torch.bfloat16
        assert torch.equal(model.generate(prompt(1, 40), **{cache.keyword: cache}, **GREEDY), expected)
    hook.remove()


def test_autocast():
    model, ids = tiny("llama"), prompt(1, 100)
    with OasisCache.for_model(model, NARROW) as cache:
        expected = model(ids, **{cache.keyword: cache}).logits
        for part in (ids[:, :1], ids):
            with (
                torch.autocast("cpu", dtype=torch.bfloat16),
                pytest.raises(
                    InputError, match=r"under torch.autocast in torch.bfloat16, and its cache was made for torch.float32"
                ),
            ):
                model(part, **{cache.keyword: cache})
        assert cache.get_seq_length() == 100
        cache.reset()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            assert torch.equal(model(ids, **{cache.keyword: cache}).logits, expected)


def test_a_cache_made_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UnsupportedModel, match=r"use no autocast"):
        OasisCache.for_model(tiny("llama"), NARROW)


def test_gradient_checkpointing():
    model, ids = tiny("llama"), prompt(1, 100)
    with OasisCache.for_model(model, NARROW) as cache:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        with torch.no_grad():
            expected = model(ids, **{cache.keyword: cache}).logits
            model.train()
            with pytest.raises(InputError, match=r"gradient checkpointing, which runs without a cache; call model.eval\(\)"):
                model(ids[:, :1], **{cache.keyword: cache})
            assert cache.get_seq_length() == 100
            model.eval()
            cache.reset()
            assert torch.equal(model(ids, **{cache.keyword: cache}).logits, expected)


def test_a_second_text_without_a_reset():
    model = tiny("llama")
    with OasisCache.for_model(model, NARROW) as cache:
        first = model.generate(prompt(1, 60), **{cache.keyword: cache}, **GREEDY)
        words = r"no tokens: the cache holds \d+, and generate takes what is behind them.*whole conversation.*cache.reset\(\)"
        with pytest.raises(InputError, match=words):
            model.generate(prompt(1, 20, seed=5), **{cache.keyword: cache}, **GREEDY)
        longer = torch.cat([first, prompt(1, 9)], dim=1)
        assert model.generate(longer, **{cache.keyword: cache}, **GREEDY).shape[1] == longer.shape[1] + 4
        cache.reset()
        assert model.generate(prompt(1, 20, seed=5), **{cache.keyword: cache}, **GREEDY).shape[1] == 24


def test_layers_of_different_shapes():
    model = tiny("llama")
    attention = model.model.layers[2].self_attn
    attention.k_proj, attention.v_proj = (torch.nn.Linear(48, 8, bias=False) for _ in range(2))
    attention.num_key_value_groups = 6
    with pytest.raises(
        UnsupportedModel, match=r"differ: layer 0 has 6 query heads and 2 kv heads .*layer 2 6 query heads and 1 kv"
    ):
        OasisCache.for_model(model, NARROW)


def test_a_model_that_changes_values_behind_the_cache(monkeypatch):
    model = tiny("llama")
    module = type(model.model.layers[0].self_attn)
    original = transformers.models.llama.modeling_llama.ALL_ATTENTION_FUNCTIONS

    class Doubled:
        def get_interface(self, name, default):
            function = original.get_interface(name, default)
            return lambda module, query, key, value, *rest, **more: function(module, query, key, value * 2, *rest, **more)

    monkeypatch.setattr(transformers.models.llama.modeling_llama, "ALL_ATTENTION_FUNCTIONS", Doubled())
    assert module.__name__ == "LlamaAttention"
    with pytest.raises(UnsupportedModel, match="changes the values of layer 0 between cache and attention"):
        OasisCache.for_model(model, NARROW)


@pytest.mark.parametrize("training", [False, True])
def test_looking_at_a_model_leaves_it_as_it_was(training):
    model = tiny("gemma3").train(training)
    seen: list[int] = []
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    state, numbers = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    with OasisCache.for_model(model, NARROW):
        pass
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert module.training is training
        assert not module._forward_pre_hooks
    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(lambda *_: seen.append(1))
    with OasisCache.for_model(model, NARROW):
        assert not seen  # what has been seen once is not looked at again


def test_a_model_that_wants_more_than_tokens_is_looked_at_when_it_runs():
    class Picky(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, *, language, **more):
            return super().forward(input_ids, **more)

    model = Picky(transformers.LlamaConfig(**COMMON, num_hidden_layers=1, num_key_value_heads=2)).eval()
    ids = prompt(1, 30)
    expected = model(ids, language=1).logits
    with OasisCache.for_model(model, NARROW) as cache:
        torch.testing.assert_close(model(ids, language=1, past_key_values=cache).logits, expected)


@pytest.mark.parametrize(
    ("family", "turns"), [("llama", True), ("phi3", True), ("gemma3", True), ("cohere", False), ("glm", False)]
)
def test_rotary_angles_are_taken_if_the_keys_are_turned_by_them(family, turns):
    from .all_families import tiny_model

    model = tiny(family) if family in ("llama", "phi3", "gemma3") else tiny_model(family)
    with OasisCache.for_model(model, NARROW) as cache:
        assert (cache.shape.rotary is not None) is turns
