"""Known texts through a model in few forwards: a prompt once, then any number of configurations on its continuation.

    prompt = read_prompt(model, ids[:, :4096], ["transform"], config)
    replayed = replay(model, [prompt], ids[:, 4096:], config)

See `oasiskv.replay` for what a replay is and what it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from oasiskv import ModelShape, OasisConfig, registry
from oasiskv.abc import KeySample, KeySummary, Predictor
from oasiskv.errors import InputError
from oasiskv.replay import LayerReport, Replay, Rows
from oasiskv.types import MAX_STEP_ROWS

from .binding import Binding, cache_keyword
from .replay_cache import RECENT_ROWS, Prompt, ReplayCache, ReplayLayer


@torch.no_grad()
def read_prompt(
    model: PreTrainedModel,
    ids: torch.Tensor,
    summaries: Sequences[str],
    config: OasisConfig,
    chunk: int = 2048,
    advance: Callable[[int], None] = lambda _: None,
) -> Prompt:
    """Read `(1, length)` with full attention; keep what a replay needs, and fit and write the summaries of these names.

    `advance` gets the tokens read.
    """
    cache = ReplayCache(model)
    prompt = Prompt(ids)
    for name in summaries:
        prompt.summaries[name] = registry.load(registry.KEY_SUMMARIES, name, KeySummary)(cache.shape, config)
    cache.prompts, cache.reading = [prompt], True
    cache.watch()
    binding = Binding.of(model)
    binding.attach(cache, watch=cache.stream is not None)
    try:
        for piece in ids.split(chunk, dim=1):
            model(piece, **{cache_keyword(model): cache}, logits_to_keep=1)
            cache.length += piece.shape[1]
            cache.stream = None
            binding.unwatch(cache)
            advance(piece.shape[1])
    finally:
        binding.detach(cache)
    prompt.stock = {index: layer for index, layer in enumerate(cache.layers) if not isinstance(layer, ReplayLayer)}
    for summary in prompt.summaries.values():
        _digest(prompt, summary, cache.shape, config)
    return prompt


def _digest(prompt: Prompt, summary: KeySummary, shape: ModelShape, config: OasisConfig) -> None:
    """Fit a summary and write the prompt's blocks, as `settling` does."""
    size = config.block_size
    sealed = prompt.length // size
    first = config.sink_blocks * size
    if not summary.fitted:
        positions = torch.arange(first, sealed * size, device=shape.device)
        summary.fit(
            KeySample(layer, keys[:, first : sealed * size].float(), positions) for layer, keys in enumerate(prompt.keys)
        )
    summary.reserve(sealed)
    pages = torch.arange(sealed, device=shape.device)
    for layer, keys in enumerate(prompt.keys):
        summary.write(layer, pages, keys[:, : sealed * size].unflatten(1, (-1, size)).transpose(0, 1))


def _forward(model: PreTrainedModel, cache: ReplayCache, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    binding = Binding.of(model)
    binding.attach(cache, watch=cache.stream is not None)
    try:
        logits: torch.Tensor = model(ids, position_ids=positions[None], **{cache_keyword(model): cache}).logits
    finally:
        binding.detach(cache)
    return logits.float()


@torch.no_grad()
def full_attention(model: PreTrainedModel, prompts: list[Prompt], ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities after each token of the continuations `(B, T)`, by full attention: `(B, T, vocab_size)`."""
    cache = ReplayCache(model)
    cache.take_stock(prompts)
    positions = torch.arange(cache.length, cache.length + ids.shape[1], device=ids.device)
    return _forward(model, cache, ids, positions).log_softmax(-1)


@dataclass(frozen=True)
class Replayed:
    """What a replay gave.

    Attributes:
        log_probabilities: after each row that stayed, `(B, tokens, vocab_size)`.
        layers: see `LayerReport`.
        rows: the steps.
    """

    log_probabilities: torch.Tensor
    layers: list[LayerReport]
    rows: Rows


@torch.no_grad()
def replay(
    model: PreTrainedModel,
    prompts: list[Prompt],
    ids: torch.Tensor,
    config: OasisConfig,
    rows: Sequences[int] | None = None,
    accepted: Sequences[int] | None = None,
    kind: Callable[..., Replay] = Replay,
) -> Replayed:
    """Decode the continuations of some prompts, all of one length, under one configuration.

    Args:
        ids: `(B, T)`, the tokens of all rows, in the order of the steps: rejected drafts too.
        rows, accepted: rows of each step and how many of them stay; one row per step if `None`.
        kind: makes the replay; for experiments with other ways to choose.

    Raises:
        InputError: prompts that are shorter than the budget or differ in length; rows that do not add up; steps that a manager
            would not take for decoding; rejected rows in a model whose other layers would take them for text.
    """
    lengths = {prompt.length for prompt in prompts}
    if len(lengths) != 1 or ids.shape[0] != len(prompts):
        raise InputError(f"a replay needs prompts of one length and a row of ids for each; got lengths {sorted(lengths)}")
    length = lengths.pop()
    if length <= config.budget_tokens:
        raise InputError(f"the prompt has {length} tokens, which the budget of {config.budget_tokens} holds: nothing is sparse")
    counts = list(rows) if rows is not None else [1] * ids.shape[1]
    if sum(counts) != ids.shape[1]:
        raise InputError(f"the steps have {sum(counts)} rows, and ids {ids.shape[1]}")
    stay = list(accepted) if accepted is not None else counts
    _check_steps(counts, stay, hybrid=bool(prompts[0].stock))
    layout = Rows.of(length, counts, stay, prompts[0].keys[0].device)
    floors = None
    if config.budget_per == "sequence":
        floors = _run(model, prompts, ids, config, layout, kind, None)[0].floors_for_budget()
    done, logits = _run(model, prompts, ids, config, layout, kind, floors)
    return Replayed(logits[:, layout.kept].log_softmax(-1), done.reports, layout)


def _run(
    model: PreTrainedModel,
    prompts: list[Prompt],
    ids: torch.Tensor,
    config: OasisConfig,
    layout: Rows,
    kind: Callable[..., Replay],
    floors: torch.Tensor | None,
) -> tuple[Replay, torch.Tensor]:
    cache = ReplayCache(model)
    shape = cache.shape
    predictor = registry.load(registry.PREDICTORS, config.predictor, Predictor)(shape, config)
    if predictor.prompt_rows > RECENT_ROWS:
        raise InputError(
            f"predictor {config.predictor!r} wants {predictor.prompt_rows} rows of a prompt, and a replay has {RECENT_ROWS}"
        )
    cache.take_stock(prompts)
    cache.bind(predictor)
    for prompt in prompts:
        prompt.summaries[config.summary].config = config
    histories = [prompt.history(config.summary) for prompt in prompts]
    done = cache.replay = kind(shape, config, predictor, histories, layout, floors)
    return done, _forward(model, cache, ids, layout.positions)


def _check_steps(rows: list[int], accepted: list[int], hybrid: bool) -> None:
    if len(rows) != len(accepted):
        raise InputError(f"rows lists {len(rows)} steps, and accepted {len(accepted)}")
    for number, (count, stay) in enumerate(zip(rows, accepted, strict=True)):
        if not 1 <= count <= MAX_STEP_ROWS:
            raise InputError(f"step {number} has {count} rows; a step that decodes has 1 to {MAX_STEP_ROWS}")
        if not 1 <= stay <= count:
            raise InputError(f"step {number} keeps {stay} of its {count} rows; the first row always stays")
    if hybrid and rows != accepted:
        raise InputError("the sliding layers of a hybrid model would take rejected rows for text; replay it without")
