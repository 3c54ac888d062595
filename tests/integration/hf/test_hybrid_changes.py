"""Changes of caches with sliding, convolution and recurrent layers beside full attention: of all layers, or of none."""

import pytest
import torch
import transformers

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache
from oasiskv.errors import StateError

from .families import DEVICE, prompt
from .judge import HYBRIDS, WIDE, as_stock, continued, read, stock_cache, stop_recording

WINDOW = 32
"""Of the sliding layers."""

KERNEL = 3
"""Inputs that the convolution sees."""


def tiny_hybrid(kind):
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(HYBRIDS[kind](), attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            parameter.data.mul_(4)
    return model.to(DEVICE).eval()


@pytest.fixture(scope="module", params=sorted(HYBRIDS))
def model(request):
    return tiny_hybrid(request.param)


@pytest.fixture(scope="module")
def sliding():
    return tiny_hybrid("sliding")


def after(model, ids):
    """What follows a text, by stock transformers without a cache that was cropped."""
    cache = stock_cache(model)
    read(model, cache, ids)
    return continued(model, cache, len(ids))


def assert_holds(model, cache, ids):
    torch.testing.assert_close(continued(model, cache, len(ids)), after(model, ids), atol=1e-3, rtol=0)


@pytest.mark.parametrize("length", [WINDOW - 12, WINDOW - 1, WINDOW, 3 * WINDOW])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("removed", [0, 5])
def test_crop_of_sliding_layers_that_do_not_record(sliding, length, batch, removed):
    """Stock layers refuse from the window on, when full-attention layers before them have been cropped already."""
    ids = prompt(batch, length)
    expected = "as stock" if length < WINDOW else "refused"
    assert as_stock(sliding, ids, lambda cache: cache.crop(-removed)) == expected


@pytest.mark.parametrize("length", [12, 3 * WINDOW])
@pytest.mark.parametrize("removed", [0, 3, 11])
def test_crop_after_recording(model, length, removed):
    ids = prompt(2, length)
    with OasisCache.for_model(model, WIDE) as cache:
        recurrent, sliding = "Qwen3Next" in type(model).__name__, "Gemma" in type(model).__name__
        cache.activate_past_recording()
        read(model, cache, ids)
        if (recurrent and removed) or (not sliding and length - removed < KERNEL):
            with pytest.raises(StateError, match="recurrent state" if recurrent else "inputs of its convolution only"):
                cache.crop(-removed)
            cache.crop(0)
            removed = 0
        else:
            cache.crop(-removed)
        stop_recording(cache)
        assert cache.get_seq_length() == length - removed
        assert_holds(model, cache, ids[:, : length - removed])


def test_a_crop_beyond_what_was_recorded(sliding):
    """Stock layers cut what they do not hold without a word."""
    ids = prompt(1, 4 * WINDOW)
    with OasisCache.for_model(sliding, WIDE) as cache:
        cache.activate_past_recording()
        read(sliding, cache, ids[:, :-4])
        cache.crop(0)
        read(sliding, cache, ids[:, -4:])
        with pytest.raises(StateError, match=r"holds 35 tokens, and needs 31 behind the 6 that are removed"):
            cache.crop(-6)
        cache.crop(-4)
        stop_recording(cache)
        assert_holds(sliding, cache, ids[:, :-4])


def test_a_crop_that_is_refused_names_the_way_out(sliding):
    with OasisCache.for_model(sliding, WIDE) as cache:
        read(sliding, cache, prompt(1, 2 * WINDOW))
        with pytest.raises(
            StateError, match=r"crop\(-5\): a DynamicSlidingWindowLayer .*copy.deepcopy.*activate_past_recording"
        ):
            cache.crop(-5)


def test_crop_of_a_cache_without_tokens(model):
    with OasisCache.for_model(model, WIDE) as cache:
        cache.crop(0)
        cache.activate_past_recording()
        cache.crop(0)
        ids = prompt(1, 20)
        read(model, cache, ids)
        cache.crop(0)
        assert_holds(model, cache, ids)


@pytest.mark.parametrize("length", [12, 3 * WINDOW])
@pytest.mark.parametrize("order", [[1, 0, 1], [0], [2, 2]])
def test_the_batch_changes_in_all_layers(model, length, order):
    """Stock linear layers have no `batch_select_indices`; what the text itself gives is the judge."""
    ids = prompt(3, length)
    for method, argument in (("batch_select_indices", order), ("reorder_cache", torch.tensor(order))):
        with OasisCache.for_model(model, WIDE) as cache:
            read(model, cache, ids)
            getattr(cache, method)(argument)
            assert_holds(model, cache, ids[order])
    with OasisCache.for_model(model, WIDE) as cache:
        read(model, cache, ids)
        cache.batch_repeat_interleave(2)
        assert_holds(model, cache, ids.repeat_interleave(2, 0))


@pytest.mark.parametrize("method", ["crop", "batch_select_indices"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_a_stock_layer_that_fails_leaves_all_layers_as_they_were(sliding, monkeypatch, method, error):
    """The last layer raises, when the others have changed."""
    ids = prompt(2, WINDOW - 12)
    with OasisCache.for_model(sliding, WIDE) as cache:
        read(sliding, cache, ids)
        last = cache.layers[2]

        def breaking(stock_method):
            def changed(layer, argument):
                if layer is last:
                    raise error("broken layer")
                stock_method(layer, argument)

            return changed

        with monkeypatch.context() as patch:
            for name in ("crop", "reorder_cache"):
                patch.setattr(type(last), name, breaking(getattr(type(last), name)))
            with pytest.raises((error, StateError), match="broken layer"):
                getattr(cache, method)(-3 if method == "crop" else torch.tensor([1, 1]))
        assert [layer.get_seq_length() for layer in cache.layers] == [ids.shape[1]] * 4
        assert_holds(sliding, cache, ids)


@pytest.mark.parametrize("place", ["before full attention", "after full attention", "in the head"])
def test_a_forward_that_breaks_anywhere_is_not_gone_on_with(sliding, place):
    """Wherever it breaks, some layers hold its rows and others do not."""
    module = {
        "before full attention": sliding.model.layers[0].mlp,
        "after full attention": sliding.model.layers[3].mlp,
        "in the head": sliding.lm_head,
    }[place]
    ids = prompt(1, 60)
    with OasisCache.for_model(sliding, WIDE) as cache:
        read(sliding, cache, ids[:, :40])
        handle = module.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("broken layer")))
        with pytest.raises(RuntimeError, match="broken layer"):
            read(sliding, cache, ids[:, 40:])
        handle.remove()
        for call in (
            lambda: read(sliding, cache, ids[:, 40:]),
            lambda: cache.crop(-1),
            lambda: cache.reorder_cache(torch.tensor([0])),
        ):
            with pytest.raises(StateError, match=r"call reset\(\)"):
                call()
        cache.reset()
        read(sliding, cache, ids)
        assert_holds(sliding, cache, ids)


def test_an_interrupt_between_the_layers(sliding):
    """Hooks that run after errors do not run after Ctrl-C."""
    ids = prompt(1, 60)
    with OasisCache.for_model(sliding, WIDE) as cache:
        read(sliding, cache, ids[:, :40])
        handle = sliding.model.layers[0].mlp.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            read(sliding, cache, ids[:, 40:])
        handle.remove()
        with pytest.raises(StateError, match=r"call reset\(\)"):
            cache.crop(-1)
        cache.reset()
        read(sliding, cache, ids)
        assert_holds(sliding, cache, ids)


@pytest.mark.parametrize("kind", ["sliding", "conv"])
def test_assisted_generation(kind):
    """It crops after each forward, in all layers."""
    model = tiny_hybrid(kind)
    ids = prompt(1, 100)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "prompt_lookup_num_tokens": 4}
    expected = model.generate(ids, **options)
    with OasisCache.for_model(model, WIDE) as cache:
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)


def test_a_sparse_sequence_is_cropped_with_its_sliding_layers(sliding):
    """Sequences that are not whole on the device either."""
    narrow = OasisConfig(budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16, workers=0)
    ids = prompt(1, 200)
    with OasisCache.for_model(sliding, narrow) as cache:
        read(sliding, cache, ids)
        read(sliding, cache, ids[:, :1])
        assert cache.stats().sparse_sequences == 1
        with pytest.raises(StateError, match="cannot go back"):
            cache.crop(-50)
        assert {layer.get_seq_length() for layer in cache.layers} == {201}
        assert cache.manager.sequences[0].length == 201
        cache.manager.check_integrity()
