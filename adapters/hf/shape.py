"""Reads a `ModelShape` off a transformers model, and refuses what cannot be served."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from oasiskv.errors import UnsupportedModel
from oasiskv.types import ModelShape, Rotary

_INTERLEAVED = ("cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium")
"""Model types whose rotary planes are pairs of neighbours; their summaries do without the planes' speeds."""


def stock_layers(model: PreTrainedModel) -> tuple[list[CacheLayerMixin], list[int]]:
    """The cache layers that transformers itself would use, and which of them hold full attention.

    Raises:
        UnsupportedModel: for a model whose KV cannot be kept per head and block, or that has no full-attention layer.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"{name} is not a transformers PreTrainedModel")
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model; only decoder-only models can be served")
    if getattr(config, "kv_lora_rank", None) is not None:
        raise UnsupportedModel(f"{name} caches a latent instead of keys and values (MLA), which has no kv heads to keep apart")
    if not getattr(model, "_supports_attention_backend", True) and not getattr(model, "_supports_sdpa", False):
        raise UnsupportedModel(f"{name} does not call the attention through transformers' attention interface")
    if not model._supports_default_dynamic_cache():
        raise UnsupportedModel(f"{name} manages its own kind of cache and takes no DynamicCache")
    layers = list(DynamicCache(config=config).layers)
    full = [number for number, layer in enumerate(layers) if type(layer) is DynamicLayer]
    if not full:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "none"
        raise UnsupportedModel(f"{name} has no full-attention layer to serve; its cache layers are: {kinds}")
    return layers, full


def model_shape(model: PreTrainedModel, num_layers: int) -> ModelShape:
    """The shape of the model's full-attention layers."""
    config = model.config.get_text_config(decoder=True)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise UnsupportedModel(f"{type(model).__name__} is spread over {sorted(map(str, devices))}; put it on one device")
    query_heads = config.num_attention_heads
    return ModelShape(
        num_layers=num_layers,
        query_heads=query_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or query_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // query_heads,
        dtype=model.dtype,
        device=next(iter(devices)),
        rotary=_rotary(model, config),
    )


def _rotary(model: PreTrainedModel, config: Any) -> Rotary | None:  # noqa: ANN401 - every model type has its own config class
    """The angles of the full-attention layers, if the model has a rotary embedding in the half-split layout."""
    if config.model_type in _INTERLEAVED:
        return None
    for module in model.modules():
        embedding = getattr(module, "rotary_emb", None)
        for name in ("full_attention_inv_freq", "inv_freq"):
            angles = getattr(embedding, name, None)
            if isinstance(angles, torch.Tensor):
                scaling = getattr(embedding, name.replace("inv_freq", "attention_scaling"), 1.0)
                return Rotary(tuple(angles.flatten().tolist()), float(scaling))
    return None
