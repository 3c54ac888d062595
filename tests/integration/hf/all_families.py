"""Tiny random models of every causal language model that the installed transformers knows."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NAMES: dict[str, str] = {
    family: name if isinstance(name, str) else name[0] for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
}
"""The model class of each family, by the name of its config."""

WIDTHS = (
    "hidden_size",
    "n_embd",
    "d_model",
    "embed_dim",
    "dim",
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "shared_intermediate_size",
)
"""Settings of 32."""
HALVES = (
    "head_dim",
    "kv_channels",
    "rotary_dim",
    "moe_intermediate_size",
    "mamba_d_state",
    "patch_size",
    "linear_key_head_dim",
)
"""Settings of 16."""
PAIRS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"),
    *("num_key_value_heads", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
"""Settings of 2."""
SIZES: dict[str, Any] = {
    **dict.fromkeys(WIDTHS, 32),
    **dict.fromkeys(HALVES, 16),
    **dict.fromkeys(PAIRS, 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "n_group", "topk_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    "linear_value_head_dim": 16,
    "image_size": 32,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
"""What is set wherever a config has it."""

DECODERS = (
    *(
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "reformer",
        "rembert",
    ),
    *("roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Encoders that become causal language models by a setting."""

INDEXER = {
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
}
BOTH = ("full_attention", "sliding_attention")
SPECIAL: dict[str, dict[str, Any]] = {
    **{family: {"is_decoder": True} for family in DECODERS},
    **{family: {"sliding_window": None} for family in ("mistral", "mixtral", "phi3", "phimoe", "starcoder2")},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["linear_attention", "full_attention"]},
    "gemma4": {"text_config": {"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8}},
    "gemma4_text": {"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "cohere_compass_text": {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in BOTH}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}},
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["full_attention"] * 3,
        "sliding_window": 512,
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": 32,
        "activation_sparsity_pattern": None,
        "vocab_size_per_layer_input": 99,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 32},
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "qwen4_exp_text": INDEXER,
    "qwen4_exp": {"text_config": INDEXER},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (16, 32)},
    "xmod": {"is_decoder": True, "languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
}
"""What a family needs besides."""


def tiny_config(family: str) -> PreTrainedConfig:
    """A config of a family with two layers, or one of each kind, and a vocabulary of 99."""
    kind = CONFIG_MAPPING[family]
    settings = _sizes(kind)
    try:
        default = kind()
    except Exception:  # noqa: BLE001 - a config that has no default of its own says what it wants in SPECIAL
        default = None
    for part in getattr(kind, "sub_configs", None) or {}:
        own = getattr(default, part, None)
        if isinstance(own, PreTrainedConfig):
            settings[part] = {**_sizes(type(own)), "model_type": own.model_type}
    for part, value in SPECIAL.get(family, {}).items():
        settings[part] = {**settings.get(part, {}), **value} if isinstance(value, dict) else value
    return kind(**settings)


def _sizes(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    sizes = {name: value for name, value in SIZES.items() if name in names}
    if "layer_types" in names:
        try:
            kinds = list(dict.fromkeys(getattr(kind(), "layer_types", None) or ()))
        except Exception:  # noqa: BLE001 - as above
            kinds = []
        if len(kinds) > 1 or "full_attention" in kinds:
            kinds += ["full_attention"] * (len(kinds) == 1)
            sizes.update(layer_types=kinds, num_hidden_layers=len(kinds))
        if "sliding_window" in names and len(kinds) > 1:
            sizes["sliding_window"] = 16
    return sizes


def tiny_model(family: str) -> PreTrainedModel:
    """A random model with weights that make attention matter; the same one at every call."""
    config = tiny_config(family)
    torch.manual_seed(7)
    # Older versions of transformers run a soft cap with sdpa, which leaves it out.
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if capped else None
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(25 if "embed" in name else 8)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model.eval()
