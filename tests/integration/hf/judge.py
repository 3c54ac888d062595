"""Stock transformers as the judge of what a call does to a cache."""

import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache
from oasiskv.errors import OasisError

from .families import COMMON, CONFIGS, prompt

WIDE = OasisConfig(budget_tokens=512, window_tokens=32, workers=0)
"""Everything fits, so that the output is that of full attention."""

HYBRIDS = {
    "sliding": CONFIGS["gemma3"],
    "conv": lambda: transformers.Lfm2Config(
        **COMMON, num_hidden_layers=3, num_key_value_heads=2, conv_L_cache=3, layer_types=["conv", "full_attention", "conv"]
    ),
    "recurrent": lambda: transformers.Qwen3NextConfig(
        **COMMON,
        num_hidden_layers=3,
        num_key_value_heads=2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
}
"""Stock layers beside full attention: with a window, with a convolution, with a recurrent state."""


def stock_cache(model):
    return DynamicCache(config=model.config)


def read(model, cache, ids):
    """Logits of the last of some more tokens, `(batch, vocabulary)`."""
    return model(ids, past_key_values=cache).logits[:, -1]


def continued(model, cache, batch):
    """Logits after three more tokens of a batch, which show what a cache holds."""
    return torch.cat([read(model, cache, part) for part in prompt(batch, 3, seed=17).split([1, 2], dim=1)])


def stop_recording(cache):
    """As transformers does after generation. Some versions cannot record over two forwards without a crop in between."""
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False


def outcome(call, *arguments):
    """What a call returns, or what it raises."""
    try:
        return call(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever stock code raises is to be seen
        return error


def as_stock(model, ids, change, before=(), record=False):
    """Whether a change makes of an `OasisCache` what it makes of a stock cache; `"refused"` if it raises and changes nothing.

    Anything else is a failed test.
    """
    caches = []
    for make in (stock_cache, stock_cache, lambda m: OasisCache.for_model(m, WIDE)):
        cache = make(model)
        if record:
            cache.activate_past_recording()
        read(model, cache, ids)
        for call in before:
            call(cache)
        caches.append(cache)
    control, stock, ours = caches
    with ours:
        result = outcome(change, ours)
        if isinstance(result, OasisError):
            assert "\n" not in str(result)
            expected, batch = control, len(ids)
        else:
            assert not isinstance(result, Exception), f"a foreign exception: {result!r}"
            change(stock)
            expected, batch = stock, len(next(layer.keys for layer in stock.layers if isinstance(layer, DynamicLayer)))
        wanted = continued(model, expected, batch)
        torch.testing.assert_close(continued(model, ours, batch), wanted, atol=1e-3, rtol=0)
        ours.manager.check_integrity()
    return "refused" if isinstance(result, OasisError) else "as stock"
