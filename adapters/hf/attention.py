"""Attention over a working set in the signature of transformers, and the marks by which a call is known to be ours.

Nothing of a model is patched: `update` of a cache layer marks the key tensor that it returns, the model hands that tensor to
the attention function, and the mark says whose it is. `interfaces.py` makes transformers call `oasis_attention` then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers.masking_utils import causal_mask_function

from oasiskv.errors import InputError, UnsupportedModel

if TYPE_CHECKING:
    from .cache import OasisLayer

_MARK = "_oasiskv_layer"
Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """A function that dynamo does not trace: a compiled model has a graph break there."""
    reason = "an OasisCache is served outside of compiled graphs; compile the model without fullgraph=True"
    disabled: Function = torch.compiler.disable(function, reason=reason)
    return disabled


_UNKNOWN_OPTIONS = {
    "sliding_window": "a window",
    "s_aux": "attention sinks",
    "position_bias": "a bias of the logits by position",
}
"""What a model may pass to its attention that ours does not have."""


class OasisLength(int):
    """A mask length that says it was given by an `OasisCache`; arithmetic makes it a plain number again."""


def marked(keys: torch.Tensor, layer: OasisLayer) -> torch.Tensor:
    """A view of `keys` that carries its cache layer to the attention function."""
    view = keys.view_as(keys)
    setattr(view, _MARK, layer)
    return view


def is_marked(keys: torch.Tensor) -> bool:
    """Whether these keys come from a cache layer of ours."""
    return hasattr(keys, _MARK)


def is_of_cache(keywords: dict[str, Any]) -> bool:
    """Whether a mask function with these arguments is asked for a plain causal mask of a cache of ours."""
    mask_function = keywords.get("mask_function", causal_mask_function)
    return isinstance(keywords["kv_length"], OasisLength) and mask_function is causal_mask_function


@uncompiled
def oasis_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,  # noqa: ANN401 - whatever the model passes on
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over the working set, in the signature of transformers' attention interface.

    `query` is `(batch, query_heads, rows, head_dim)`; `key` and `value` hold the new rows only. `attention_mask` is the 2-d
    padding mask or `None`. Returns `(batch, rows, query_heads, head_dim)`, and no weights.
    """
    layer: OasisLayer = getattr(key, _MARK)
    name = type(module).__name__
    for option, meaning in _UNKNOWN_OPTIONS.items():
        if kwargs.get(option) is not None:
            raise UnsupportedModel(
                f"{name} uses {option} ({meaning}) in a full-attention layer, which attention over a working set does not have"
            )
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UnsupportedModel(
            f"{name} attends to later tokens as well (is_causal is False); only causal attention can be served"
        )
    if kwargs.get("output_attentions"):
        raise UnsupportedModel("output_attentions=True asks for the weights of all tokens, which a working set does not hold")
    if dropout and module.training:
        raise InputError(f"{name} runs with attention dropout {dropout}; call model.eval() before generating")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise UnsupportedModel(
            f"{name} gets an attention mask of {attention_mask.ndim} dimensions; only causal attention with the 2-d padding "
            "mask (0 = padding) can be served"
        )
    return layer.attend(query, key, value, attention_mask, scaling, softcap), None
