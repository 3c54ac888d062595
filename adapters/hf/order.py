"""Which sequences of a batch a call of transformers asks for, judged by what it does to the tensors of a stock cache."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch

from oasiskv.errors import BatchIndexError, InputError

_SHOWN = 60
"""Characters of an argument that a message quotes."""


def tokens_removed(tokens_to_remove: SupportsIndex, columns: int) -> int:
    """How many tokens `crop(tokens_to_remove)` takes off the end of a cache of `columns` tokens.

    Raises:
        InputError: no integer, a positive one, or more tokens than there are.
    """
    try:
        count = -operator.index(tokens_to_remove)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"crop({tokens_to_remove!r}): pass a negative integer, how many tokens to remove from the end"
        ) from error
    if count < 0:
        raise InputError(f"crop({-count}): pass a negative number, how many tokens to remove from the end")
    if count > columns:
        raise InputError(f"crop({-count}): the cache holds {columns} tokens")
    return count


def selected(batch: int, indices: object) -> list[int]:
    """The sequences that `keys[indices, ...]` keeps of a batch: integers, negative ones too, or a boolean for each sequence, as
    a tensor, an array or a list; or a slice.

    Raises:
        BatchIndexError: `indices` do not fit the batch, select nothing, or do not give a batch.
    """
    return _order(batch, f"batch_select_indices({_shown(indices)})", lambda rows: rows[_on_host(indices), ...])


def reordered(batch: int, beam_idx: object) -> list[int]:
    """The sequences that `keys.index_select(0, beam_idx)` gives: integers from 0 on, in a tensor, an array or a list.

    Raises:
        BatchIndexError: as `selected`.
    """
    return _order(
        batch, f"reorder_cache({_shown(beam_idx)})", lambda rows: rows.index_select(0, torch.as_tensor(_on_host(beam_idx)))
    )


def repeated(batch: int, repeats: Any, most: int) -> list[int]:  # noqa: ANN401 - a number of any kind, or a tensor
    """The sequences that `keys.repeat_interleave(repeats, 0)` gives: one number for all, or a tensor of one for each.

    Args:
        most: sequences that could ever be held; a longer list is not even made.

    Raises:
        BatchIndexError: negative or other numbers than these, or nothing left.
    """
    name = f"batch_repeat_interleave({_shown(repeats)})"
    if isinstance(repeats, torch.Tensor):
        total = int(repeats.sum()) * (batch if repeats.numel() == 1 else 1)
    else:
        try:
            repeats = operator.index(repeats)
        except TypeError as error:
            raise BatchIndexError(f"{name}: pass how often to repeat each sequence, a positive integer") from error
        total = repeats * batch
    if total > most:
        raise BatchIndexError(f"{name} makes a batch of {total}, of which this machine holds at most {most}; repeat less often")
    return _order(batch, name, lambda rows: rows.repeat_interleave(_on_host(repeats), dim=0))


def _order(batch: int, name: str, select: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
    """What `select` makes of the numbers of all sequences: torch itself says what it takes and what is out of range."""
    try:
        chosen = select(torch.arange(batch))
    except (IndexError, OverflowError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise BatchIndexError(f"{name} does not fit a batch of {batch}: {reason}; pass indices of its sequences") from error
    if chosen.ndim != 1:
        raise BatchIndexError(f"{name} gives {chosen.ndim} dimensions, not a batch; pass a one-dimensional list of indices")
    if not len(chosen):
        raise BatchIndexError(f"{name} keeps none of {batch} sequences; reset() forgets them all")
    order: list[int] = chosen.tolist()
    return order


def _on_host(indices: Any) -> Any:  # noqa: ANN401 - whatever torch takes as an index
    return indices.cpu() if isinstance(indices, torch.Tensor) else indices


def _shown(argument: object) -> str:
    """An argument in a message, in one line and not too long."""
    text = " ".join(repr(argument).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
