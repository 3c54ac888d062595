"""Gradients through the cache: none is wrong or silently missing; where one is asked for, it is refused."""

import pytest
import torch
from torch.autograd import forward_ad

from oasiskv.adapters.hf import OasisCache
from oasiskv.errors import UnsupportedModel

from .families import prompt, tiny
from .judge import WIDE, stock_cache

REFUSED = "no gradient flows through the attention of an OasisCache; train without a cache"


@pytest.fixture(autouse=True)
def _gradients():
    with torch.enable_grad():
        yield


@pytest.fixture(params=["llama", "gemma3"])
def model(request):
    return tiny(request.param)


@pytest.fixture
def cache(model):
    with OasisCache.for_model(model, WIDE) as cache:
        yield cache


def loss_of(model, cache, ids):
    return model(ids, past_key_values=cache).logits.float().logsumexp(-1).sum()


def only(model, *names):
    """Only parameters whose names hold one of `names` are trained, as with adapters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in names))


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_inference_without_no_grad_goes_on(model, cache):
    ids = prompt(2, 50)
    expected = model(ids).logits
    parts = [model(part, past_key_values=cache).logits for part in ids.split([40, 1, 9], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-3, rtol=0)
    assert not cache.manager.rooms.pool.slots.requires_grad


def test_a_backward_pass_is_refused(model, cache):
    loss = loss_of(model, cache, prompt(1, 20))
    with pytest.raises(UnsupportedModel, match=REFUSED):
        loss.backward()


@pytest.mark.parametrize("trained", ["layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj", "layers.0.mlp", "embed_tokens"])
def test_parameters_before_an_attention(model, cache, trained):
    """What a part of the model contributes through attention would be missing from its gradient."""
    only(model, trained)
    loss = loss_of(model, cache, prompt(1, 20))
    with pytest.raises(UnsupportedModel, match=REFUSED):
        loss.backward()


@pytest.mark.parametrize("trained", ["layers.{last}.mlp", "layers.{last}.self_attn.o_proj", "model.norm"])
def test_parameters_behind_the_last_attention_get_their_gradient(model, cache, trained):
    """No attention lies between them and the loss; the gradient is that of stock training."""
    only(model, trained.format(last=model.config.num_hidden_layers - 1))
    ids = prompt(1, 20)
    loss_of(model, stock_cache(model), ids).backward()
    expected = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    loss_of(model, cache, ids).backward()
    assert expected.keys() == gradients(model).keys() != set()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-3, rtol=1e-4)


def test_the_gradient_of_one_part_may_be_asked_for():
    """As long as no attention lies on the way to it."""
    model = tiny("llama")
    with OasisCache.for_model(model, WIDE) as cache:
        loss = loss_of(model, cache, prompt(1, 20))
        (gradient,) = torch.autograd.grad(loss, [model.lm_head.weight], retain_graph=True)
        (expected,) = torch.autograd.grad(loss_of(model, stock_cache(model), prompt(1, 20)), [model.lm_head.weight])
        torch.testing.assert_close(gradient, expected, atol=1e-3, rtol=1e-4)
        with pytest.raises(UnsupportedModel, match=REFUSED):
            torch.autograd.grad(loss, [model.model.layers[0].self_attn.k_proj.weight])


def test_the_gradient_of_the_input(model, cache):
    only(model)
    embeddings = model.get_input_embeddings()(prompt(1, 20)).detach().requires_grad_()
    output = model(inputs_embeds=embeddings, past_key_values=cache).logits
    with pytest.raises(UnsupportedModel, match=REFUSED):
        output.sum().backward()


def test_a_trained_prompt_that_the_cache_holds(model, cache):
    """A later forward depends on it through the cached keys alone, which stock caches carry the graph of."""
    only(model, "norm.weight")
    soft = model.get_input_embeddings()(prompt(1, 20)).detach().requires_grad_()
    model(inputs_embeds=soft, past_key_values=cache)
    only(model, f"layers.{model.config.num_hidden_layers - 1}.mlp")
    loss = loss_of(model, cache, prompt(1, 4, seed=5))
    with pytest.raises(UnsupportedModel, match=REFUSED):
        loss.backward()
    cache.reset()
    loss_of(model, cache, prompt(1, 4)).backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients_record_nothing(model, cache, mode):
    with mode():
        output = model(prompt(1, 20), past_key_values=cache).logits
    assert not output.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        output.sum().backward()


def test_a_prompt_read_without_gradients_is_no_history(model, cache):
    only(model, "mlp.down_proj")
    with torch.no_grad():
        model(prompt(1, 20), past_key_values=cache)
    only(model, f"layers.{model.config.num_hidden_layers - 1}.mlp")
    loss_of(model, cache, prompt(1, 3)).backward()
    assert gradients(model)


def test_tangents_are_refused():
    model = tiny("llama")
    only(model)
    embeddings = model.get_input_embeddings()(prompt(1, 20))
    with OasisCache.for_model(model, WIDE) as cache, forward_ad.dual_level(), pytest.raises(UnsupportedModel, match=REFUSED):
        model(inputs_embeds=forward_ad.make_dual(embeddings, torch.ones_like(embeddings)), past_key_values=cache)
