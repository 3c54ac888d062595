"""Figures of a replay against full attention: how far, how much moved, how much is held.

texts = Spans.read(model, ids, context=4096, tokens=64, count=4, summaries=["transform"], config=config)
figures = texts.measure(config)
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from oasiskv import OasisConfig
from oasiskv.errors import InputError

from .replay import Prompt, Replayed, full_attention, read_prompt, replay


@dataclass(frozen=True)
class Figures:
    """Of one configuration on some spans; tensors are `(spans, tokens)` where not said otherwise.

    Attributes:
        kl: divergence from full attention's next-token distribution to ours, in nats.
        agrees: whether both have the same most likely token.
        nll_difference: how much less likely, in nats, the true next token is than under full attention.
        coverage: mean share of full attention's weights that the rows saw, `(layers, query_heads)`.
        loaded: blocks moved into the working set, `(layers, spans, steps, kv_heads)`.
        corrected: blocks read in place, the same.
        device_share: device bytes of working set and summaries over those of the full KV.
        summary_share: device bytes of summaries over those of the full KV in fp16.
    """

    kl: torch.Tensor
    agrees: torch.Tensor
    nll_difference: torch.Tensor
    coverage: torch.Tensor
    loaded: torch.Tensor
    corrected: torch.Tensor
    device_share: float
    summary_share: float

    @property
    def mean_kl(self) -> float:
        """In nats per token."""
        return float(self.kl.mean())

    @property
    def standard_error(self) -> float:
        """Of `mean_kl`, over spans; 0 for a single one."""
        means = self.kl.mean(1)
        return float(means.std() / len(means) ** 0.5) if len(means) > 1 else 0.0

    @property
    def agreement(self) -> float:
        """Share of tokens with the same greedy choice."""
        return float(self.agrees.float().mean())

    @property
    def moved(self) -> float:
        """Blocks moved per kv head and step, without in-place reads."""
        return float(self.loaded.float().mean())

    @property
    def read_in_place(self) -> float:
        """Blocks read in place per kv head and step."""
        return float(self.corrected.float().mean())


@dataclass
class Spans:
    """Some continuations of prompts of one length, with full attention's answer to each."""

    model: PreTrainedModel
    prompts: list[Prompt]
    ids: torch.Tensor
    targets: torch.Tensor
    full: torch.Tensor

    @staticmethod
    def read(
        model: PreTrainedModel,
        ids: torch.Tensor,
        context: int,
        tokens: int,
        count: int,
        summaries: Sequences[str],
        config: OasisConfig,
        advance: Callable[[int], None] = lambda _: None,
    ) -> Spans:
        """Cut `count` spans out of `(1, num_tokens)`, evenly spread, and read them with full attention.

        Each has `context` tokens of prompt, of which the last one is decoded, and `tokens` more that are predicted. `advance` gets
        the tokens read.

        Raises:
            InputError: the text is too short for one span.
        """
        needed = context + tokens
        spare = ids.shape[1] - needed
        if spare < 0:
            raise InputError(f"the text has {ids.shape[1]} tokens; {context} of context and {tokens} to predict need {needed}")
        count = count if spare else 1
        starts = [spare * number // max(1, count - 1) for number in range(count)]
        prompts, rows, targets, full = [], [], [], []
        for start in starts:
            piece = ids[:, start : start + needed]
            prompt = read_prompt(model, piece[:, : context - 1], summaries, config)
            prompts.append(prompt)
            rows.append(piece[:, context - 1 : -1])
            targets.append(piece[:, context:])
            full.append(full_attention(model, [prompt], rows[-1]))
            advance(needed)
        return Spans(model, prompts, torch.cat(rows), torch.cat(targets), torch.cat(full))

    @staticmethod
    def join(parts: Sequences[Spans]) -> Spans:
        """The spans of several texts side by side."""
        first = parts[0]
        return Spans(
            first.model,
            [prompt for part in parts for prompt in part.prompts],
            torch.cat([part.ids for part in parts]),
            torch.cat([part.targets for part in parts]),
            torch.cat([part.full for part in parts]),
        )

    def measure(self, config: OasisConfig, at_once: int = 8) -> Figures:
        """Replay all spans without drafts under one configuration, `at_once` side by side."""
        if self.prompts[0].stock:
            at_once = 1
        replays = [
            replay(self.model, self.prompts[first : first + at_once], self.ids[first : first + at_once], config)
            for first in range(0, len(self.prompts), at_once)
        ]
        return self.compare(replays, config)

    def compare(self, replays: Sequences[Replayed], config: OasisConfig) -> Figures:
        """Figures of replays that together hold all spans, in order."""
        ours = torch.cat([part.log_probabilities for part in replays])
        reports = [part.layers for part in replays]
        layers = range(len(reports[0]))
        summary = self.prompts[0].summaries[config.summary]
        prompt = self.prompts[0]
        head_dim = prompt.keys[0].shape[2]
        full_bytes = 2 * head_dim * prompt.keys[0].itemsize
        per_token = summary.bytes_per_token
        return Figures(
            kl=(self.full.exp() * (self.full - ours)).sum(-1),
            agrees=self.full.argmax(-1) == ours.argmax(-1),
            nll_difference=(self.full - ours).gather(2, self.targets[..., None])[..., 0],
            coverage=torch.stack([torch.cat([part[layer].coverage for part in reports]).mean((0, 1)) for layer in layers]),
            loaded=torch.stack([torch.cat([part[layer].loaded for part in reports]) for layer in layers]),
            corrected=torch.stack([torch.cat([part[layer].corrected for part in reports]) for layer in layers]),
            device_share=config.budget_tokens / prompt.length + per_token / full_bytes,
            summary_share=per_token / (4 * head_dim),
        )
