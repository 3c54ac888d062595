"""The attention and mask functions that transformers calls while a model runs with `attn_implementation="oasis"`.

Nothing of a model is patched: `update` of a cache layer marks the key tensor that it returns, the model hands that tensor to
the attention function, and the mark says whose it is. Calls without a mark (sliding layers, other caches) go to sdpa.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from oasiskv.errors import InputError, UnsupportedModel
from oasiskv.ops.softcap import soft_capped

if TYPE_CHECKING:
    from .cache import OasisLayer

NAME = "oasis"
_MARK = "_oasiskv_layer"


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
    layer: OasisLayer | None = getattr(key, _MARK, None)
    name = type(module).__name__
    if layer is None:
        if kwargs.get("s_aux") is not None:
            raise UnsupportedModel(f"{name} uses s_aux (attention sinks), which sdpa leaves out, in a layer that stays stock")
        if softcap is not None:
            return capped_attention(query, key, value, attention_mask, scaling, softcap, dropout), None
        output, weights = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, weights
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


def capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
    dropout: float,
) -> torch.Tensor:
    """What sdpa computes, `(batch, rows, query_heads, head_dim)`, with a soft cap of the logits, which sdpa does not have.

    `mask` is that of `oasis_mask` for a stock layer: boolean, `(batch, 1, rows, tokens)`, or `None` for causal attention.
    """
    batch, kv_heads, tokens, head_dim = key.shape
    rows = query.shape[2]
    grouped = query.view(batch, kv_heads, -1, rows, head_dim)
    logits = (grouped @ key[:, :, None].transpose(3, 4)).float() * (head_dim**-0.5 if scaling is None else scaling)
    if mask is None:
        # As sdpa: one row sees all tokens, and several are the first ones, also of a cache that has room behind them.
        mask = torch.ones((rows, tokens), dtype=torch.bool, device=query.device).tril(0 if rows > 1 else tokens)[None, None]
    logits = soft_capped(logits, softcap).masked_fill(~mask[:, :, None], torch.finfo(torch.float32).min)
    weights = torch.nn.functional.dropout(logits.softmax(-1), dropout).to(value.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2).transpose(1, 2).contiguous()


def oasis_mask(
    *,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,  # noqa: ANN401 - whatever transformers passes on
) -> torch.Tensor | None:
    """The 2-d padding mask as it is for our layers, which mask by position; sdpa's mask for all others.

    A model may make masks that none of its layers uses, so a pattern of its own is refused where it is used: as a 4-d mask.
    """
    if isinstance(kv_length, OasisLength) and mask_function is causal_mask_function:
        return attention_mask
    mask: torch.Tensor | None = sdpa_mask(
        kv_length=kv_length, mask_function=mask_function, attention_mask=attention_mask, **kwargs
    )
    return mask


AttentionInterface.register(NAME, oasis_attention)
AttentionMaskInterface.register(NAME, oasis_mask)
