"""A replay of known tokens gives what an `OasisCache` gives that decodes them one step after the other."""

import pytest
import torch

from oasiskv import OasisConfig
from oasiskv.adapters.hf import OasisCache
from oasiskv.adapters.hf.fidelity import teacher_forced
from oasiskv.adapters.hf.measure import Spans
from oasiskv.adapters.hf.replay import full_attention, read_prompt, replay
from oasiskv.errors import InputError

from .families import prompt, tiny

PROMPT, TOKENS = 203, 40
"""The prompt ends within a block, and five blocks seal while the tokens are decoded."""

PREDICTORS = ("layer-ahead", "lookahead", "previous", "oracle", "ema", "h2o", "snapkv", "window", "random")
MOVING = ("layer-ahead", "lookahead", "previous", "oracle", "ema", "h2o")
"""Those that change their minds."""

FAMILIES = ("llama", "gemma3")
STEPS = (5, 5, 3, 5, 1, 5, 5, 4)
"""Rows of each step when there are drafts."""

ALL = STEPS
PARTLY = (2, 5, 1, 3, 1, 4, 1, 2)
"""How many rows of each step stay."""


def narrow(**changes):
    """Without margins, since the attention of tiny random models is so even that nothing would move with them."""
    settings = {"budget_tokens": 96, "block_size": 8, "sink_tokens": 8, "window_tokens": 16, "workers": 0, "budget_per": "head"}
    margins = {"swap_margin": 0.0, "correction_margin": 0.0, "correction_blocks": 2}
    return OasisConfig(**{**settings, **margins, **changes})


def divergence(full, ours):
    """In nats, a number per token, of log-probabilities `(tokens, vocab_size)`."""
    return (full.exp() * (full - ours)).sum(-1)


def assert_same(replayed, real):
    """KL per token, to 1e-4 and to a twentieth of the largest: some tiny models hardly look at what is missing. And to a
    hundredth of its own: a replay sums scores in another order, which on some processors swaps two blocks of equal score."""
    assert replayed.shape == real.shape
    largest = float(real.max())
    assert largest > 1e-5, "the budget holds everything that matters, so the test shows nothing"
    torch.testing.assert_close(replayed, real, atol=min(1e-4, largest / 20), rtol=0.01)


@pytest.mark.parametrize("correction", [0, 2])
@pytest.mark.parametrize("summary", ["transform", "minmax"])
@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_one_by_one(family, predictor, summary, correction):
    model, ids = tiny(family), prompt(1, PROMPT + TOKENS)
    config = narrow(predictor=predictor, summary=summary, correction_blocks=correction)
    real, stats = teacher_forced(model, ids, PROMPT, config)
    assert stats.sparse_sequences == 1
    figures = Spans.read(model, ids, PROMPT, TOKENS, 1, [summary], config).measure(config)
    assert_same(figures.kl[0], torch.tensor(real.kl))
    assert figures.agrees[0].tolist() == real.agrees
    assert int(figures.corrected.sum()) == stats.corrected_blocks
    assert (stats.corrected_blocks > 0) == (correction > 0 and predictor != "oracle")
    assert predictor not in MOVING or figures.loaded.sum() > 0
    if predictor == "oracle":  # the others move blocks after the last step too
        assert int(figures.loaded.sum()) == stats.loaded_blocks


@pytest.mark.parametrize("predictor", ["layer-ahead", "previous", "oracle"])
def test_a_shared_budget_while_its_floor_stands_still(predictor, monkeypatch):
    """The floors of a replay are constant, and its slots never run out."""
    monkeypatch.setattr("oasiskv.selected._RATE", 0.0)
    monkeypatch.setattr("oasiskv.selected._SPARE", 0.8)
    monkeypatch.setattr("oasiskv.replay.Replay.floors_for_budget", lambda replay: replay._floors)
    model, ids = tiny("llama"), prompt(1, PROMPT + TOKENS)
    config = narrow(predictor=predictor, budget_per="sequence")
    real, stats = teacher_forced(model, ids, PROMPT, config)
    figures = Spans.read(model, ids, PROMPT, TOKENS, 1, ["transform"], config).measure(config)
    assert_same(figures.kl[0], torch.tensor(real.kl))
    assert int(figures.corrected.sum()) == stats.corrected_blocks
    assert figures.loaded.sum() > 0


def drafted(model, ids, length, config, rows, accepted):
    """Log-probabilities after the rows that stay, `(kept, vocab_size)`, of a cache driven as by assisted generation."""
    kept, start = [], length
    with OasisCache.for_model(model, config) as cache:
        model(ids[:, :length], **{cache.keyword: cache}, logits_to_keep=1)
        cache.activate_past_recording()
        for count, stay in zip(rows, accepted, strict=True):
            logits = model(ids[:, start : start + count], **{cache.keyword: cache}).logits[0]
            cache.crop(stay - count)
            kept.append(logits[:stay])
            start += count
        cache.manager.check_integrity()
        assert cache.get_seq_length() == length + sum(accepted)
        return torch.cat(kept).log_softmax(-1), cache.stats()


@pytest.mark.parametrize(
    ("family", "accepted"), [("llama", ALL), ("llama", PARTLY), ("gemma3", ALL)], ids=["all", "partly", "hybrid"]
)
@pytest.mark.parametrize("correction", [0, 2])
@pytest.mark.parametrize("predictor", PREDICTORS)
def test_steps_with_drafts(predictor, correction, family, accepted):
    model, ids = tiny(family), prompt(1, PROMPT + sum(STEPS))
    config = narrow(predictor=predictor, correction_blocks=correction)
    ours, stats = drafted(model, ids, PROMPT, config, STEPS, accepted)
    read = read_prompt(model, ids[:, :PROMPT], [config.summary], config)
    result = replay(model, [read], ids[:, PROMPT:], config, STEPS, accepted)
    text = torch.cat([part[:, :stay] for part, stay in zip(ids[:, PROMPT:].split(STEPS, dim=1), accepted, strict=True)], 1)
    full = full_attention(model, [read], text)[0]
    assert_same(divergence(full, result.log_probabilities[0]), divergence(full, ours))
    assert sum(int(layer.corrected.sum()) for layer in result.layers) == stats.corrected_blocks
    assert predictor not in MOVING or sum(int(layer.loaded.sum()) for layer in result.layers) > 0


def test_texts_side_by_side():
    """Spans that are replayed together give what each gives alone."""
    model, ids, config = tiny("llama"), prompt(1, 700), narrow()
    spans = Spans.read(model, ids, PROMPT, TOKENS, 3, ["transform"], config)
    together, alone = spans.measure(config), spans.measure(config, at_once=1)
    torch.testing.assert_close(together.kl, alone.kl, atol=1e-5, rtol=0)
    assert torch.equal(together.loaded, alone.loaded)
    parts = [Spans.read(model, ids[:, start:], PROMPT, TOKENS, 1, ["transform"], config) for start in (0, 100)]
    joined = Spans.join(parts).measure(config)
    torch.testing.assert_close(joined.kl[0], together.kl[0], atol=1e-5, rtol=0)
    assert joined.kl.shape == (2, TOKENS)


def test_a_model_that_makes_its_queries_in_another_way_is_replayed_without_hints(monkeypatch):
    model, ids, config = tiny("llama"), prompt(1, PROMPT + TOKENS), narrow(predictor="layer-ahead")
    projection = model.model.layers[1].self_attn.q_proj
    forward = projection.forward
    # The second call is the check's own: the model and the check see different projections.
    calls = iter(range(1000))
    monkeypatch.setattr(projection, "forward", lambda x: forward(x) * (1 if next(calls) % 2 == 0 else 2))
    spans = Spans.read(model, ids, PROMPT, TOKENS, 1, ["transform"], config)
    monkeypatch.undo()
    assert not spans.prompts[0].guessable
    without = spans.measure(narrow(predictor="lookahead"))
    assert torch.equal(spans.measure(config).kl, without.kl)
    spans.prompts[0].guessable = True
    assert not torch.equal(spans.measure(config).kl, without.kl)
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


def test_what_cannot_be_replayed():
    model, ids, config = tiny("llama"), prompt(1, PROMPT + TOKENS), narrow()
    read = read_prompt(model, ids[:, :PROMPT], ["transform"], config)
    more = ids[:, PROMPT : PROMPT + 6]
    for rows, accepted, message in (
        ([3, 2], [3, 2], "the steps have 5 rows, and ids 6"),
        ([3, 3], [3], "rows lists 2 steps, and accepted 1"),
        ([3, 3], [0, 3], "step 0 keeps 0 of its 3 rows"),
        ([3, 3], [3, 4], "step 1 keeps 4 of its 3 rows"),
        ([6, 0], [6, 0], "step 1 has 0 rows"),
    ):
        with pytest.raises(InputError, match=message):
            replay(model, [read], more, config, rows, accepted)
    with pytest.raises(InputError, match="step 0 has 20 rows"):
        replay(model, [read], ids[:, PROMPT : PROMPT + 20], config, [20])
    with pytest.raises(InputError, match="which the budget of 208 holds"):
        replay(model, [read], more, narrow(budget_tokens=208))
    hybrid = tiny("gemma3")
    read = read_prompt(hybrid, ids[:, :PROMPT], ["transform"], config)
    with pytest.raises(InputError, match="would take rejected rows for text"):
        replay(hybrid, [read], more, config, [3, 3], [3, 1])


def test_spans_that_cannot_be_read_or_measured():
    model, ids, config = tiny("llama"), prompt(1, PROMPT + TOKENS), narrow()
    for context, tokens, count, message in (
        (1, 4, 1, "context is 1"),
        (PROMPT, 0, 1, "tokens is 0"),
        (PROMPT, 4, 0, "count is 0"),
        (PROMPT, TOKENS + 1, 1, r"the text has 243 tokens; 203 of context and 41 to predict need 244"),
    ):
        with pytest.raises(InputError, match=message):
            Spans.read(model, ids, context, tokens, count, ["transform"], config)
    spans = Spans.read(model, ids, PROMPT, 4, 1, ["transform"], config)
    with pytest.raises(InputError, match="read for transform, not for the summary 'minmax'"):
        spans.measure(narrow(summary="minmax"))
    with pytest.raises(InputError, match="the same context"):
        Spans.join([spans, Spans.read(model, ids, PROMPT, 5, 1, ["transform"], config)])
