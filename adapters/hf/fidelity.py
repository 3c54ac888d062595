"""A working set beside full attention, on the same tokens: how far apart are the next-token distributions?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

import torch
from transformers import DynamicCache, PreTrainedModel

from oasiskv import OasisConfig, Stats, Trace

from .cache import OasisCache


@dataclass
class Divergence:
    """Collected per step.

    Attributes:
        kl: Kullback-Leibler divergence from full attention's distribution to ours, in nats, a number per token.
        agrees: whether both would have picked the same token greedily.
        seconds, dense_seconds: time in the model's forward, ours and full attention's, interleaved.
    """

    kl: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    seconds: float = 0.0
    dense_seconds: float = 0.0

    @property
    def mean_kl(self) -> float:
        """Mean per token."""
        return sum(self.kl) / len(self.kl)

    @property
    def standard_error(self) -> float:
        """Of `mean_kl`, as if tokens were independent."""
        return float(torch.tensor(self.kl).std() / len(self.kl) ** 0.5) if len(self.kl) > 1 else 0.0

    @property
    def agreement(self) -> float:
        """Share of tokens on which the greedy choices agree."""
        return sum(self.agrees) / len(self.agrees)


class Pair:
    """One model with two caches, an `OasisCache` and a stock one, that are fed the same tokens."""

    def __init__(self, model: PreTrainedModel, config: OasisConfig, trace: Trace | None = None) -> None:
        self._model = model
        self.cache = OasisCache.for_model(model, config, trace)
        self.dense = DynamicCache(config=model.config.get_text_config(decoder=True))
        self.divergence = Divergence()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cache.close()

    def prefill(self, ids: torch.Tensor, chunk: int, advance: Callable[[int], None] = lambda _: None) -> float:
        """Read `(1, num_tokens)` into both caches; returns the seconds that ours took. `advance` gets both caches' tokens."""
        seconds = 0.0
        for piece in ids.split(self.cache.manager.prompt_piece(chunk), dim=1):
            start = time.perf_counter()
            self._model(piece, **{self.cache.keyword: self.cache}, logits_to_keep=1)
            seconds += time.perf_counter() - start
            self._model(piece, **{self.cache.keyword: self.dense}, logits_to_keep=1)
            advance(2 * piece.shape[1])
        return seconds

    def step(self, token: torch.Tensor) -> torch.Tensor:
        """Feed `(1, 1)` to both, in alternating order; returns our log-probabilities of the next token, `(vocab_size,)`."""
        order = [self.cache, self.dense]
        if len(self.divergence.kl) % 2:
            order.reverse()
        result = {}
        for held in order:
            start = time.perf_counter()
            logits = self._model(token, **{self.cache.keyword: held}).logits[0, -1]
            elapsed = time.perf_counter() - start
            result[held is self.cache] = logits.float().log_softmax(-1)
            if held is self.cache:
                self.divergence.seconds += elapsed
            else:
                self.divergence.dense_seconds += elapsed
        ours, full = result[True], result[False]
        self.divergence.kl.append(float((full.exp() * (full - ours)).sum()))
        self.divergence.agrees.append(bool(ours.argmax() == full.argmax()))
        return ours

    def dense_bytes(self) -> int:
        """Bytes of the keys and values that the stock cache holds."""
        held = [tensor for layer in self.dense.layers for tensor in (layer.keys, layer.values) if tensor is not None]
        return sum(tensor.numel() * tensor.itemsize for tensor in held)


def teacher_forced(
    model: PreTrainedModel, ids: torch.Tensor, num_prompt: int, config: OasisConfig, chunk: int = 4096
) -> tuple[Divergence, Stats]:
    """Read the first `num_prompt` of `(1, num_tokens)`, then feed the true tokens one by one and compare after each."""
    with torch.no_grad(), Pair(model, config) as pair:
        pair.prefill(ids[:, : num_prompt - 1], chunk)
        for position in range(num_prompt - 1, ids.shape[1] - 1):
            pair.step(ids[:, position : position + 1])
        return pair.divergence, pair.cache.stats()
