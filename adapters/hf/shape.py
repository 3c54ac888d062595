"""Reads a `ModelShape` off a transformers model, and refuses what cannot be served."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from oasiskv.errors import UnsupportedModel
from oasiskv.types import ModelShape, Rotary

from .probe import Attention, probe


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
    if _has(config, "kv_lora_rank"):
        raise UnsupportedModel(f"{name} caches a latent instead of keys and values (MLA), which has no kv heads to keep apart")
    if not _attends_by_interface(model):
        raise UnsupportedModel(f"{name} does not call the attention through transformers' attention interface")
    if not model._supports_default_dynamic_cache():
        raise UnsupportedModel(f"{name} manages its own kind of cache and takes no DynamicCache")
    try:
        layers = list(DynamicCache(config=config).layers)
    except Exception as error:  # configs of models in several parts lack what a cache is made from
        reason = str(error).strip().splitlines()
        raise UnsupportedModel(f"{name} has a config that transformers makes no DynamicCache from: {reason[0]}") from error
    full = [number for number, layer in enumerate(layers) if type(layer) is DynamicLayer]
    if not full:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "none"
        raise UnsupportedModel(f"{name} has no full-attention layer to serve; its cache layers are: {kinds}")
    return layers, full


def _attends_by_interface(model: PreTrainedModel) -> bool:
    """Whether transformers can give the model another attention function. What it says may be wrong; then `probe` sees it."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not any(getattr(part, "_can_set_attn_implementation", lambda: True)() for part in parts):
        return False
    return getattr(model, "_supports_attention_backend", True) or getattr(model, "_supports_sdpa", False)


def _has(config: PreTrainedConfig, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None
    except Exception:  # noqa: BLE001 - it differs between layers, and transformers has an error of its own for that
        return True


def model_shape(model: PreTrainedModel, full: list[int]) -> ModelShape:
    """The shape of the model's full-attention layers, see `stock_layers`, as a forward of a few tokens shows it.

    Raises:
        UnsupportedModel: the layers cannot be served, see `probe`, or the model is not whole on one device.
    """
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    devices = {parameter.device for parameter in model.parameters()}
    if any(device.type == "meta" for device in devices):
        raise UnsupportedModel(
            f"{name} has weights on the meta device: they are not loaded, or offloaded to the processor or a disk; load all of "
            "them onto one device, with a device_map that names it alone"
        )
    if len(devices) != 1:
        raise UnsupportedModel(f"{name} is spread over {sorted(map(str, devices))}; put it on one device")
    device, rotary = next(iter(devices)), _rotary(model)
    seen = probe(model, device, full, rotary)
    if seen is None:
        query_heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or query_heads
        seen = Attention(
            query_heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // query_heads, model.dtype
        )
    return ModelShape(
        num_layers=len(full),
        query_heads=seen.query_heads,
        kv_heads=seen.kv_heads,
        head_dim=seen.head_dim,
        dtype=seen.dtype,
        device=device,
        rotary=rotary if seen.turned else None,
    )


def _rotary(model: PreTrainedModel) -> Rotary | None:
    """The angles by which the full-attention layers may turn their keys, if there is a rotary embedding in its usual place."""
    for module in model.modules():
        embedding = getattr(module, "rotary_emb", None)
        for name in ("full_attention_inv_freq", "inv_freq"):
            angles = getattr(embedding, name, None)
            if isinstance(angles, torch.Tensor):
                scaling = getattr(embedding, name.replace("inv_freq", "attention_scaling"), 1.0)
                return Rotary(tuple(angles.flatten().tolist()), float(scaling))
    return None
