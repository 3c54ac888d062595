"""Figures of a replay against full attention: how far, how much moved, how much is held.

    spans = Spans.read(model, ids, context=4096, tokens=64, count=4, summaries=["transform"], config=config)
    figures = spans.measure(config)

The spans are read once and may be measured under many configurations. Those share what the summaries were made with:
`block_size` and `sink_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from oasiskv import OasisConfig
from oasiskv.errors import InputError

from .replay import Replayed, full_attention, read_prompt, replay
from .replay_cache import Prompt


@dataclass(frozen=True)
class Figures:
    """Of one configuration on some spans; tensors are `(spans, tokens)` where not said otherwise.

    Standard errors are those of the means over spans: the tokens of a span are no independent samples. They are 0 for a single
    span, and too small if spans overlap.

    Attributes:
        kl: Kullback-Leibler divergence from full attention's next-token distribution to ours, in nats.
        agrees: whether both have the same most likely token.
        nll_difference: how much less likely, in nats, the true next token is than under full attention.
        coverage: mean share of full attention's weights that the rows saw, `(layers, query_heads)`.
        loaded: blocks moved into the working set, `(layers, n)`: one number per span, step and kv head.
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
        """Of `mean_kl`."""
        return _standard_error(self.kl)

    @property
    def agreement(self) -> float:
        """Share of tokens with the same greedy choice."""
        return float(self.agrees.float().mean())

    @property
    def agreement_error(self) -> float:
        """Standard error of `agreement`."""
        return _standard_error(self.agrees.float())

    @property
    def mean_nll_difference(self) -> float:
        """In nats per token; below 0 where the working set happens to predict better than full attention."""
        return float(self.nll_difference.mean())

    @property
    def nll_error(self) -> float:
        """Standard error of `mean_nll_difference`."""
        return _standard_error(self.nll_difference)

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity on the true tokens over that of full attention."""
        return math.exp(self.mean_nll_difference)

    @property
    def mean_coverage(self) -> float:
        """Share of full attention's weights that the rows saw, over all layers and heads."""
        return float(self.coverage.mean())

    @property
    def moved(self) -> float:
        """Blocks moved per kv head and step, without in-place reads."""
        return float(self.loaded.float().mean())

    @property
    def read_in_place(self) -> float:
        """Blocks read in place per kv head and step."""
        return float(self.corrected.float().mean())


def _standard_error(values: torch.Tensor) -> float:
    """Of the mean of `(spans, tokens)`, over spans; 0 for a single one."""
    means = values.mean(1)
    return float(means.std() / len(means) ** 0.5) if len(means) > 1 else 0.0


@dataclass
class Spans:
    """Some continuations of prompts of one length, with full attention's answer to each.

    Attributes:
        model: that has read them.
        prompts: one per span.
        ids: `(spans, tokens)`, the tokens that are fed to a replay: the last one of the prompt, and all but the last that are
            predicted.
        targets: `(spans, tokens)`, the tokens that are predicted.
        full: full attention's log-probabilities, `(spans, tokens, vocab_size)`.
    """

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

        Each has `context` tokens of prompt, of which the last one is decoded, and `tokens` more that are predicted.
        They overlap where the text is too short for all of them, and are fewer where no two could differ.

        Args:
            summaries: names of those that configurations will rank by.
            config: says how these are made.
            advance: gets the tokens read; `context + tokens - 1` per span, `count` spans at most.

        Raises:
            InputError: the text is too short for one span, or a number is too small.
        """
        for name, value, least in (("context", context, 2), ("tokens", tokens, 1), ("count", count, 1)):
            if value < least:
                raise InputError(f"{name} is {value}; it must be at least {least}")
        needed = context + tokens
        spare = ids.shape[1] - needed
        if spare < 0:
            raise InputError(f"the text has {ids.shape[1]} tokens; {context} of context and {tokens} to predict need {needed}")
        count = min(count, spare + 1)
        starts = [spare * number // max(1, count - 1) for number in range(count)]
        prompts, rows, targets, full = [], [], [], []
        for start in starts:
            piece = ids[:, start : start + needed]
            prompt = read_prompt(model, piece[:, : context - 1], summaries, config, advance=advance)
            prompts.append(prompt)
            rows.append(piece[:, context - 1 : -1])
            targets.append(piece[:, context:])
            full.append(full_attention(model, [prompt], rows[-1]))
            advance(tokens)
        return Spans(model, prompts, torch.cat(rows), torch.cat(targets), torch.cat(full))

    @staticmethod
    def join(parts: Sequences[Spans]) -> Spans:
        """The spans of several texts side by side; all of one model, and of as many tokens."""
        first = parts[0]
        if len({(prompt.length, part.ids.shape[1]) for part in parts for prompt in part.prompts}) != 1:
            raise InputError("spans that are joined have the same context and as many tokens to predict")
        return Spans(
            first.model,
            [prompt for part in parts for prompt in part.prompts],
            torch.cat([part.ids for part in parts]),
            torch.cat([part.targets for part in parts]),
            torch.cat([part.full for part in parts]),
        )

    def measure(self, config: OasisConfig, at_once: int = 8) -> Figures:
        """Replay all spans without drafts under one configuration, `at_once` side by side; one by one if the model is a hybrid.

        Raises:
            InputError: the budget holds the context, or the spans were read without the configuration's summary.
        """
        names = sorted(self.prompts[0].summaries)
        if config.summary not in names:
            raise InputError(f"the spans were read for {', '.join(names)}, not for the summary {config.summary!r}")
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
            coverage=torch.stack(
                [torch.cat([part[layer].coverage.flatten(0, 1) for part in reports]).mean(0) for layer in layers]
            ),
            loaded=torch.stack([torch.cat([part[layer].loaded.flatten() for part in reports]) for layer in layers]),
            corrected=torch.stack([torch.cat([part[layer].corrected.flatten() for part in reports]) for layer in layers]),
            device_share=config.budget_tokens / prompt.length + per_token / full_bytes,
            summary_share=per_token / (4 * head_dim),
        )
