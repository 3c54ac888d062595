"""Wrong use and broken runs: clear errors, nothing hangs, nothing leaks, and the next run works."""

import _thread
import gc
import threading

import pytest
import torch
import transformers
from transformers import DynamicCache

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache
from oasiskv.errors import ArenaExhausted, InputError, PoolExhausted, StateError, UnsupportedModel, WorkerError

from .families import COMMON, prompt, tiny

NARROW = OasisConfig(budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16)
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def model():
    return tiny("llama")


@pytest.fixture
def cache(model):
    with OasisCache.for_model(model, NARROW) as cache:
        yield cache


def test_the_wrong_keyword_is_no_silent_dense_run(model, cache):
    wrong = "cache" if cache.keyword == "past_key_values" else "kv_cache"
    with pytest.raises(InputError, match=rf"passed as {wrong}=.*pass it as {cache.keyword}="):
        model(prompt(1, 10), **{wrong: cache})


def test_past_key_values_works_in_every_version(model, cache):
    model.generate(prompt(1, 200), past_key_values=cache, **GREEDY)
    assert cache.stats().tokens > 200


def test_another_model(cache):
    other = tiny("llama")
    with OasisCache.for_model(other, NARROW), pytest.raises(InputError, match="made for another LlamaForCausalLM"):
        other(prompt(1, 10), **{cache.keyword: cache})


def test_another_dtype(model, cache):
    model.to(torch.bfloat16)
    with pytest.raises(InputError, match=r"made for torch.float32 on \w+, and gets keys in torch.bfloat16"):
        model(prompt(1, 10), **{cache.keyword: cache})


def test_an_empty_prompt(model, cache):
    with pytest.raises(InputError, match="at least one"):
        model(
            torch.empty((1, 0), dtype=torch.int64),
            position_ids=torch.empty((1, 0), dtype=torch.int64),
            **{cache.keyword: cache},
        )


def test_a_batch_that_changes_size(model, cache):
    model(prompt(2, 50), **{cache.keyword: cache})
    with pytest.raises(InputError, match="batch of 2, and gets one of 3"):
        model(prompt(3, 1), **{cache.keyword: cache})


def test_right_padding(model, cache):
    mask = torch.ones((2, 30), dtype=torch.int64)
    mask[1, -5:] = 0
    with pytest.raises(InputError, match="pad on the left"):
        model(prompt(2, 30), attention_mask=mask, **{cache.keyword: cache})


def test_crop_out_of_range(model, cache):
    model(prompt(1, 50), **{cache.keyword: cache})
    with pytest.raises(InputError, match=r"crop\(5\)"):
        cache.crop(5)
    with pytest.raises(InputError, match=r"crop\(-51\): the cache holds 50 tokens"):
        cache.crop(-51)
    cache.crop(-50)
    assert cache.get_seq_length() == 0


def test_a_pool_that_is_too_small(model):
    with OasisCache.for_model(
        model, OasisConfig(budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16, pool_bytes=40_000)
    ) as cache:
        with pytest.raises(PoolExhausted, match=r"pool_bytes must be at least \d+"):
            model(prompt(4, 200), **{cache.keyword: cache})
        cache.reset()
        cache.manager.check_integrity()


def test_an_arena_that_is_too_small(model):
    config = OasisConfig(budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16, arena_bytes=100_000)
    with OasisCache.for_model(model, config) as cache:
        with pytest.raises(ArenaExhausted, match=r"arena_bytes must be at least \d+"):
            model(prompt(1, 400), **{cache.keyword: cache})
        cache.reset()
        model.generate(prompt(1, 60), **{cache.keyword: cache}, **GREEDY)
        cache.manager.check_integrity()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_lane_that_raises_surfaces_in_generate(model, monkeypatch, workers):
    config = OasisConfig(budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16, workers=workers, correction_blocks=0)
    with OasisCache.for_model(model, config) as cache:
        predictor = cache.manager.rooms.predictor
        calls = iter(range(1000))
        aggregate = predictor.aggregate

        def broken(layer, mass, weights, rows):
            if next(calls) == 7:
                raise ValueError("a broken predictor")
            return aggregate(layer, mass, weights, rows)

        monkeypatch.setattr(predictor, "aggregate", broken)
        ids = prompt(1, 200)
        with pytest.raises(WorkerError, match="a broken predictor") as caught:
            model.generate(ids, **{cache.keyword: cache}, **GREEDY)
        assert isinstance(caught.value.__cause__, ValueError)
        cache.manager.check_integrity()
        cache.reset()
        model.generate(ids, **{cache.keyword: cache}, **GREEDY)
        cache.manager.check_integrity()


def test_a_forward_that_breaks_in_the_middle_can_be_repeated(model, cache):
    ids = prompt(1, 200)
    expected = model.generate(ids, **{cache.keyword: cache}, **GREEDY)
    cache.reset()
    model(ids[:, :150], **{cache.keyword: cache})
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("broken layer")))
    with pytest.raises(RuntimeError, match="broken layer"):
        model(ids[:, 150:], **{cache.keyword: cache})
    handle.remove()
    assert cache.get_seq_length() == 150
    assert torch.equal(model.generate(ids, **{cache.keyword: cache}, **GREEDY), expected)
    cache.manager.check_integrity()


def test_ctrl_c_in_the_middle(model, cache):
    ids = prompt(1, 200)

    def interrupt(*_):
        if cache.stats().decoded_tokens >= 4:  # again, should one arrive where Python swallows it, as in a finaliser
            _thread.interrupt_main()

    handle = model.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, **{cache.keyword: cache}, **GREEDY)
    handle.remove()
    cache.reset()
    cache.manager.check_integrity()
    assert cache.manager.rooms.arena.used_pages == 0
    model.generate(ids, **{cache.keyword: cache}, **GREEDY)


def test_a_hybrid_model_says_that_it_must_be_reset():
    model = tiny("gemma3")
    with OasisCache.for_model(model, NARROW) as cache:
        handle = model.model.layers[2].mlp.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("broken layer")))
        ids = prompt(1, 200)
        with pytest.raises(RuntimeError, match="broken layer"):
            model(ids, **{cache.keyword: cache})
        handle.remove()
        with pytest.raises(StateError, match=r"call reset\(\)"):
            model(ids, **{cache.keyword: cache})
        cache.reset()
        model(ids, **{cache.keyword: cache})


def test_closing_puts_the_model_back(model):
    caches = [OasisCache.for_model(model, NARROW) for _ in range(2)]
    caches[0].close()
    caches[0].close()
    assert model._forward_pre_hooks
    del caches
    gc.collect()
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("oasiskv")]


def test_a_closed_cache(model, cache):
    cache.close()
    with pytest.raises(StateError, match="closed"):
        cache.manager.create()


def test_other_caches_run_as_with_sdpa(model):
    ids = prompt(2, 60)
    expected = model.generate(ids, **GREEDY)
    hybrid = tiny("gemma3")
    expected_hybrid = hybrid.generate(ids, **GREEDY)
    with OasisCache.for_model(model, NARROW) as cache, OasisCache.for_model(hybrid, NARROW):
        assert torch.equal(model.generate(ids, **GREEDY), expected)
        assert torch.equal(hybrid.generate(ids, **GREEDY), expected_hybrid)
        held = DynamicCache(config=model.config)
        assert torch.equal(model.generate(ids, **{cache.keyword: held}, **GREEDY), expected)


def refused(config):
    return transformers.AutoModelForCausalLM.from_config(config)


def test_latent_attention_is_refused():
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    with pytest.raises(UnsupportedModel, match=r"DeepseekV3ForCausalLM caches a latent"):
        OasisCache.for_model(refused(config))


def test_a_model_without_full_attention_is_refused():
    config = transformers.MistralConfig(**COMMON, num_hidden_layers=2, num_key_value_heads=2, sliding_window=16)
    with pytest.raises(UnsupportedModel, match=r"MistralForCausalLM has no full-attention layer"):
        OasisCache.for_model(refused(config))


def test_an_encoder_decoder_is_refused():
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        OasisCache.for_model(transformers.T5ForConditionalGeneration(config))


def test_static_compilation_is_refused(model, cache):
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(prompt(1, 20), **{cache.keyword: cache}, cache_implementation="static", **GREEDY)
    with pytest.raises(UnsupportedModel, match="compiled"):
        cache.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))


def test_attention_weights_are_refused(model, cache):
    with pytest.raises((UnsupportedModel, ValueError), match="output_attentions"):
        model(prompt(1, 20), **{cache.keyword: cache}, output_attentions=True)


def test_a_cache_in_a_model_without_one_of_its_own(cache):
    with pytest.raises(InputError, match="not made for"):
        tiny("llama")(prompt(1, 10), **{cache.keyword: cache})


def test_a_closed_cache_in_its_model(model, cache):
    model(prompt(1, 10), **{cache.keyword: cache})
    cache.close()
    with pytest.raises(InputError, match="closed"):
        model(prompt(1, 1), **{cache.keyword: cache})


def test_keys_that_lose_their_mark(model, cache, monkeypatch):
    layer = cache.layers[1]
    update = layer.update
    monkeypatch.setattr(layer, "update", lambda *args, **kwargs: tuple(t.clone() for t in update(*args, **kwargs)))
    with pytest.raises(StateError, match="layer 2 attends, but layer 1 is next"):
        model(prompt(1, 10), **{cache.keyword: cache})


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_every_grad_mode(model, mode, workers):
    config = OasisConfig(budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16, workers=workers)
    ids = prompt(1, 230)
    outputs = []
    for manager in (torch.no_grad, mode):
        with OasisCache.for_model(model, config) as cache:
            with manager():
                parts = [model(part, **{cache.keyword: cache}).logits for part in ids.split([200, *[1] * 20, 10], dim=1)]
            outputs.append(torch.cat(parts, dim=1).detach().clone())
            assert not cache.manager.rooms.pool.slots.requires_grad
            # What was allocated inside of the mode is usable outside of it.
            model(ids[:, :1], **{cache.keyword: cache})
            cache.manager.check_integrity()
    assert torch.equal(outputs[0], outputs[1])
