"""Tiny random models of the families that the adapter is tested with."""

import os

import torch
import transformers
from transformers import PreTrainedModel

DEVICE = torch.device(os.environ.get("OASISKV_TEST_DEVICE", "cpu"))
"""Where the adapter's tests run."""

COMMON = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _config(name: str, **settings: object) -> transformers.PreTrainedConfig:
    return getattr(transformers, name)(**{**COMMON, **settings})


CONFIGS = {
    "llama": lambda: _config("LlamaConfig", num_hidden_layers=3, num_key_value_heads=2),
    "llama-mqa": lambda: _config("LlamaConfig", num_hidden_layers=2, num_key_value_heads=1),
    "llama-mha": lambda: _config("LlamaConfig", num_hidden_layers=2, num_key_value_heads=6),
    "qwen3": lambda: _config("Qwen3Config", num_hidden_layers=2, num_key_value_heads=2),
    "qwen3-moe": lambda: _config(
        "Qwen3MoeConfig",
        num_hidden_layers=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "mistral": lambda: _config("MistralConfig", num_hidden_layers=2, num_key_value_heads=3, sliding_window=None),
    "gemma3": lambda: _config(
        "Gemma3TextConfig",
        num_hidden_layers=4,
        num_key_value_heads=2,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "gemma2": lambda: _config(
        "Gemma2Config",
        num_hidden_layers=4,
        num_key_value_heads=2,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=3.0,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "phi3": lambda: _config("Phi3Config", num_hidden_layers=2, num_key_value_heads=2),
}


def tiny(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model; the same one at every call."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[family](), attn_implementation="eager" if family == "gemma2" else "sdpa"
    )
    # The default initialisation gives nearly flat distributions; sharper ones make attention matter.
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            parameter.data.mul_(4)
    return model.to(DEVICE, dtype).eval()


def prompt(batch: int, length: int, seed: int = 3) -> torch.Tensor:
    """Random tokens with repetitions, so that prompt lookup finds drafts."""
    generator = torch.Generator().manual_seed(seed)
    phrase = torch.randint(3, 211, (batch, 24), generator=generator)
    noise = torch.randint(3, 211, (batch, length), generator=generator)
    ids = phrase.repeat(1, length // 24 + 1)[:, :length]
    return torch.where(torch.rand((batch, length), generator=generator) < 0.15, noise, ids).to(DEVICE)
