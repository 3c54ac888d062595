"""Attention over a working set has no gradient, and says so where one is asked for.

Running a model outside of `torch.no_grad()` is no mistake by itself: who only reads the output asks for no gradient. So the
forward goes on, and its output is tied to a node of the autograd graph that raises in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from oasiskv.errors import UnsupportedModel

_REFUSAL = (
    "no gradient flows through the attention of an OasisCache; train without a cache (use_cache=False), and use this one for "
    "inference (torch.no_grad(), model.generate)"
)


class _Attention(torch.autograd.Function):
    """The attention of one layer, without a backward pass."""

    @staticmethod
    def forward(ctx: Any, attend: Callable[[], torch.Tensor], *_: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - of torch
        return attend()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:  # noqa: ANN401 - of torch
        raise UnsupportedModel(_REFUSAL)


def wants_gradient(*tensors: torch.Tensor) -> bool:
    """Whether autograd records what is computed from `tensors`."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def attend_without_gradient(attend: Callable[[], torch.Tensor], rows: tuple[torch.Tensor, ...], history: bool) -> torch.Tensor:
    """The output of `attend`, through which a backward pass raises `UnsupportedModel` if there is anything that it would miss.

    Args:
        rows: what `attend` computes the output from: queries, keys and values.
        history: whether autograd recorded rows that the cache holds already, so that the output depends on them.

    Raises:
        UnsupportedModel: the rows carry tangents of forward-mode differentiation.
    """
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in rows):
        raise UnsupportedModel(_REFUSAL)
    if wants_gradient(*rows):
        inputs = rows
    elif history and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        inputs = (torch.empty(0, requires_grad=True),)  # stands for the rows of earlier forwards, whose graph is not kept
    else:
        return attend()
    output: torch.Tensor = _Attention.apply(attend, *inputs)
    return output
