"""The stock layers of a hybrid model: what they can undo, and how they are put back after a change that failed."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from oasiskv.errors import StateError


def new_layers(config: PreTrainedConfig) -> list[CacheLayerMixin]:
    """The cache layers that transformers uses for a model of this configuration, empty."""
    return list(DynamicCache(config=config.get_text_config(decoder=True)).layers)


class Kept:
    """What stock layers hold now. They replace their tensors when they are cropped or reordered, so that the old ones need no
    copy."""

    def __init__(self, layers: list[CacheLayerMixin]) -> None:
        self._kept = [(layer, _state(layer)) for layer in layers]

    def restore(self) -> None:
        """Make the layers what they were."""
        for layer, state in self._kept:
            vars(layer).clear()
            vars(layer).update(state)


def _state(layer: CacheLayerMixin) -> dict[str, Any]:
    """The attributes of a layer; containers are copied, since linear layers keep their tensors in them."""
    return {name: copy.copy(value) if isinstance(value, dict | list) else value for name, value in vars(layer).items()}


def crop_layers(layers: list[CacheLayerMixin], count: int) -> None:
    """Take `count` tokens off the end of stock layers.

    Raises:
        StateError: a layer no longer holds what it would need. Some of the layers may have changed.
    """
    for layer in layers:
        if not _has_seen_tokens(layer):
            continue  # nothing to crop, which stock code trips over
        reason = _lacking(layer, count)
        if reason is not None:
            raise _cannot_go_back(layer, count, reason)
        try:
            layer.crop(-count)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise _cannot_go_back(layer, count, " ".join(str(error).split())) from error


def _cannot_go_back(layer: CacheLayerMixin, count: int, reason: str) -> StateError:
    return StateError(
        f"crop({-count}): a {type(layer).__name__} of this hybrid model cannot go back: {reason}; copy the cache before "
        "(copy.deepcopy), or call activate_past_recording() before the forward that is to be undone"
    )


def _has_seen_tokens(layer: CacheLayerMixin) -> bool:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return any(layer.is_conv_states_initialized.values()) or any(layer.is_recurrent_states_initialized.values())
    return bool(layer.is_initialized)


def _lacking(layer: CacheLayerMixin, count: int) -> str | None:
    """What a layer lacks for a crop that stock code would get wrong without a word; `None` if nothing."""
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized and layer.keys is not None:
        needed = min(layer.get_seq_length() - count, layer.sliding_window - 1)
        if layer.keys.shape[-2] - count < needed:
            return f"it holds {layer.keys.shape[-2]} tokens, and needs {needed} behind the {count} that are removed"
    if isinstance(layer, LinearAttentionCacheLayerMixin) and count:
        if any(layer.is_recurrent_states_initialized.values()):
            return "its recurrent state has seen the tokens"
        for index, states in layer.conv_states.items():
            if states is not None and states.shape[-1] - count < layer.conv_kernel_size[index]:
                return f"it holds the last {states.shape[-1]} inputs of its convolution only"
    return None
