"""How fast the model's keys turn with their position, read off vLLM's rotary embedding."""

from __future__ import annotations

import torch
from vllm.model_executor.layers import rotary_embedding

from oasiskv.types import Rotary


def rotary_of_model(head_dim: int) -> Rotary | None:
    """The angles of the planes of a key, if all layers share one embedding in the half-split layout; `None` otherwise, and
    summaries do without.

    vLLM keeps the embeddings that it has made, each with a table of cosines and sines. The row of position 1 tells the angles,
    which are below a half turn, and that of position 0 the scaling.
    """
    made = {id(module): module for module in getattr(rotary_embedding, "_ROPE_DICT", {}).values()}
    if len(made) != 1:
        return None
    module = next(iter(made.values()))
    table = getattr(module, "cos_sin_cache", None)
    if table is None or table.ndim != 2 or table.shape[0] < 2 or not getattr(module, "is_neox_style", False):
        return None
    cosine, sine = table[1].float().cpu().chunk(2)
    if len(cosine) * 2 > head_dim:
        return None
    scaling = float(table[0, : len(cosine)].float().mean())
    return Rotary(tuple(torch.atan2(sine, cosine).tolist()), scaling)
