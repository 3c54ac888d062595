"""Gathers the statistics of a transformers model that make a transform code for all its texts: `summaries.calibration`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from transformers import PreTrainedModel

from oasiskv import OasisConfig
from oasiskv.abc import KeySample
from oasiskv.summaries.calibration import Calibration, Moments
from oasiskv.summaries.transform import Transform

from .replay import read_prompt


def calibrate(
    model: PreTrainedModel, texts: Iterable[torch.Tensor], max_tokens: int, advance: Callable[[int], None] = lambda _: None
) -> Calibration:
    """Read some texts with full attention.

    Args:
        texts: `(1, num_tokens)` each; a few thousand tokens of several kinds of text do.
        max_tokens: positions that the code shall serve, usually the longest context of the service.
        advance: gets the tokens read.
    """
    config = OasisConfig()
    parts = []
    for ids in texts:
        prompt = read_prompt(model, ids, ["transform"], config)
        parts.append(_moments(prompt.summaries["transform"], prompt.keys, config.sink_tokens))
        advance(int(ids.shape[1]))
    return Calibration.merged(parts, max_tokens)


def _moments(summary: object, keys: list[torch.Tensor], first: int) -> list[Moments]:
    assert isinstance(summary, Transform)
    positions = torch.arange(first, keys[0].shape[1], device=keys[0].device)
    return [summary.moments(KeySample(layer, own[:, first:].float(), positions)) for layer, own in enumerate(keys)]
