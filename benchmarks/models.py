"""Does the comparison of key summaries hold for other shapes? On Gemma 3 270M, and on SmolLM2-135M rewritten to head_dim 128.

Gemma is a hybrid: 3 of its 18 layers have full attention, with one kv head of head_dim 256.

The second model, `wide`, is the same function as SmolLM2, so that its attention is that of a trained model, and it is judged by
KL like the others. Each of its kv heads holds the keys of two neighbours side by side. What a model that was trained with
head_dim 128 does not do: a query looks at half of a key only. That is hard on `transform`, which takes 4 bytes per token and
head on average for every shape, here for both halves together. Bounds lose nothing by it: `minmax-int4` and `bit2` grow with
head_dim, to 8.5 and 64 bytes here, and 16.5 and 128 for Gemma.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from oasiskv import OasisConfig
from oasiskv.adapters.hf.measure import Spans
from oasiskv.testing import texts
from oasiskv.testing.models import load_gemma3, load_smollm2

from .quality import ORACLE, QUICK_TEXTS, Cell, Table, _tokens, settings
from .report import Row, at_least, at_most, run

PARTS = ("gemma3", "wide")
TEXTS = ("essays", "stdlib", "licences")
SUMMARIES = ("minmax-int4", "transform", "transform-bit2", "bit2")
BUDGET = 512
SPANS = 2
TOKENS = 48


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All rows."""
    parts = options.only or PARTS
    if "gemma3" in parts:
        yield from _compare("gemma3", *load_gemma3(), options)
    if "wide" in parts:
        model, tokenizer = load_smollm2()
        wide = widened(model)
        yield _same_function(model, wide, _tokens(tokenizer, "manual")[:, :256])
        yield from _compare("wide", wide, tokenizer, options)


def _configs() -> list[tuple[str, OasisConfig]]:
    exact = [(summary, settings(BUDGET, summary=summary, predictor="quest")) for summary in SUMMARIES]
    return [*exact, ("oracle", settings(BUDGET, **ORACLE)), ("defaults", settings(BUDGET))]


def _compare(
    part: str,
    model: PreTrainedModel,
    tokenizer: Any,  # noqa: ANN401 - tokenizers share no typed base
    options: argparse.Namespace,
) -> Iterator[Row]:
    """KL of each summary with the exact query, of the oracle and of the defaults, over spans of each text."""
    table = Table(echo=not options.json)
    names = QUICK_TEXTS if options.quick or not set(TEXTS) <= set(texts.names()) else TEXTS
    context, count, tokens = (2048, 1, 16) if options.quick else (4096, SPANS, TOKENS)
    guessable, size = True, {}
    for name in names:
        if options.json:
            print(f"{part}: {name}, {context} tokens of context", file=sys.stderr, flush=True)
        spans = Spans.read(model, _tokens(tokenizer, name), context, tokens, count, SUMMARIES, settings(BUDGET))
        guessable &= all(prompt.guessable for prompt in spans.prompts)
        size = {summary: spans.prompts[0].summaries[summary].bytes_per_token for summary in SUMMARIES}
        for label, config in _configs():
            table.add(Cell.of(name, context, label, BUDGET, spans.measure(config)))
    yield at_least(f"{part}-hints", f"{part}: the queries are guessed as the model makes them", guessable, "", 1)
    for label, config in _configs():
        kl, error = table.mean(context, label, BUDGET), table.error(context, label, BUDGET)
        what = f"{label}, exact query" if label in SUMMARIES else label
        if config.predictor != "oracle":
            what += f", {size[config.summary]:g} B per token and head"
        yield Row(f"{part}-{label}", f"{part}, {what}: KL (s.e. {error:.4f})", kl, "nats", "", True)
    code, bounds = (table.mean(context, summary, BUDGET) for summary in ("transform", "minmax-int4"))
    yield at_most(f"{part}-ratio", f"{part}: transform over minmax-int4, exact query", code / bounds, "", 1.0)


@torch.no_grad()
def widened(model: PreTrainedModel) -> PreTrainedModel:
    """The same Llama model with twice the head_dim.

    The keys and values of kv head `h` are those of the heads `h` and `h + 1` side by side, and its query heads those of both,
    with zeros where the other's keys are. So both compete for the blocks of one working set. The output of a query head is
    taken where its own kv head comes first; the other time it only competes.
    """
    config = copy.deepcopy(model.config)
    heads, dim = config.num_key_value_heads, config.head_dim
    group = config.num_attention_heads // heads
    config.head_dim, config.num_attention_heads = 2 * dim, 2 * heads * group
    wide = type(model)(config).to(model.dtype).eval()
    # Rotary planes span the dimensions i and i + head_dim / 2: the first head gets the lower planes, the second the upper ones.
    half = torch.arange(dim // 2)
    first, second = torch.cat([half, half + dim]), torch.cat([half, half + dim]) + dim // 2
    weights = dict(model.state_dict())
    for name, old in list(weights.items()):
        kind = name.split(".")[-2]
        if kind in ("k_proj", "v_proj"):
            own = old.view(heads, dim, -1)
            new = own.new_zeros(heads, 2 * dim, own.shape[2])
            new[:, first], new[:, second] = own, own.roll(-1, 0)
            weights[name] = new.flatten(0, 1)
        elif kind == "q_proj":
            own = old.view(heads, group, dim, -1) * 2**0.5  # the wider head's logits are scaled down by as much
            new = own.new_zeros(heads, 2 * group, 2 * dim, own.shape[3])
            new[:, :group, first], new[:, group:, second] = own, own.roll(-1, 0)
            weights[name] = new.flatten(0, 2)
        elif kind == "o_proj":
            own = old.view(-1, heads, group, dim)
            new = own.new_zeros(own.shape[0], heads, 2 * group, 2 * dim)
            new[:, :, :group, first] = own
            weights[name] = new.flatten(1, 3)
    wide.load_state_dict(weights)
    rotary, narrow = wide.model.rotary_emb, model.model.rotary_emb
    rotary.inv_freq = torch.cat([narrow.inv_freq, narrow.inv_freq])
    return wide


@torch.no_grad()
def _same_function(model: PreTrainedModel, wide: PreTrainedModel, ids: torch.Tensor) -> Row:
    difference = (model(ids).logits - wide(ids).logits).abs().max().item()
    return at_most("wide-function", "wide: largest difference of a logit from SmolLM2's", difference, "", 1e-3)


def options(parser: argparse.ArgumentParser) -> None:
    """More options than every benchmark has."""
    parser.add_argument("--only", nargs="+", choices=PARTS, help="measure these parts")


if __name__ == "__main__":
    raise SystemExit(run("models", __doc__ or "", measure, options))
