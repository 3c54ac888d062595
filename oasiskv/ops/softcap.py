"""Soft caps of attention logits: `softcap * tanh(logit / softcap)`, as Gemma 2 has them (arXiv 2408.00118, section 2)."""

from __future__ import annotations

import math

from torch import Tensor

from ..errors import InputError


def require_softcap(softcap: float | None) -> None:
    """Raise `InputError` unless `softcap` is `None` or a finite number above 0."""
    if softcap is not None and not 0 < softcap < math.inf:
        raise InputError(f"softcap is {softcap}; it must be a finite number above 0, or None for no cap")


def soft_capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits with a soft cap, in place; as they are if it is `None`."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def soft_capped_blocks(logits: Tensor, softcap: float | None, block_size: int) -> Tensor:
    """Block logits of capped logits, estimated from block logits without a cap, in place; as they are if `softcap` is `None`.

    A block logit is that of `block_size` tokens. The estimate is exact where they are all alike, elsewhere
    off by at most `log(block_size)`, and it keeps the order of a query's blocks.
    """
    if softcap is None:
        return logits
    alike = math.log(block_size)
    return soft_capped(logits.sub_(alike), softcap).add_(alike)
