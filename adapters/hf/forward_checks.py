"""Ways to run a model in which a cache cannot work, found before a forward changes anything."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from oasiskv.errors import InputError
from oasiskv.types import ModelShape


def check_mode(model: PreTrainedModel, shape: ModelShape) -> None:
    """Raises `InputError` for gradient checkpointing while training, which drops caches, and for autocast to another dtype than
    that of the cache, which gives queries, keys and values different ones."""
    name, device = type(model).__name__, shape.device.type
    if model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise InputError(
            f"{name} is in training mode with gradient checkpointing, which runs without a cache; call model.eval(), or "
            "model.gradient_checkpointing_disable()"
        )
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != shape.dtype:
        found = torch.get_autocast_dtype(device)
        raise InputError(
            f"{name} runs under torch.autocast in {found}, and its cache was made for {shape.dtype}; leave autocast out, and "
            f"convert the model before the cache is made if it shall run in {found}: model.to({found})"
        )


def check_tokens(inputs: tuple[object, ...], columns: int) -> None:
    """Raises `InputError` for ids or embeddings without tokens: what `generate` leaves of a text that is no longer than what a
    cache of so many columns holds."""
    for tokens in inputs:
        if isinstance(tokens, torch.Tensor) and tokens.ndim > 1 and tokens.shape[1] == 0:
            if not columns:
                raise InputError("the forward has no tokens; a prompt needs at least one")
            raise InputError(
                f"the forward has no tokens: the cache holds {columns}, and generate takes what is behind them in its input: "
                "pass the whole conversation, longer than that, or call cache.reset() before another text"
            )
