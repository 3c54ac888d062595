"""Below the context the working set is bounded, the full KV stays, and every way of generating works."""

import pytest
import torch
from transformers import DynamicCache

from oasiskv import OasisConfig, Phase
from oasiskv.adapters.hf import OasisCache

from .families import CONFIGS, prompt, tiny

NARROW = OasisConfig(
    budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16, max_new_blocks=3, correction_blocks=1, poison_freed=True
)
GREEDY = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}

WAYS = {
    "greedy": (1, {}),
    "batch": (3, {}),
    "beam search": (1, {"num_beams": 3}),
    "sampling": (2, {"do_sample": True, "top_k": 20}),
    "prompt lookup": (1, {"prompt_lookup_num_tokens": 4}),
    "chunked prefill": (1, {"prefill_chunk_size": 64}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_way_of_generating(family, way):
    model = tiny(family)
    batch, options = WAYS[way]
    ids = prompt(batch, 250)
    with OasisCache.for_model(model, NARROW) as cache:
        text = model.generate(ids, **{cache.keyword: cache}, **{**GREEDY, **options})
        cache.manager.check_integrity()
        stats = cache.stats()
        assert text.shape[1] > ids.shape[1]
        assert stats.sparse_sequences == stats.sequences > 0
        assert stats.most_new_blocks <= NARROW.burst_blocks
        assert 0 < stats.hit_rate <= 1
        assert 0 < stats.coverage <= 1
        assert stats.pool_bytes < stats.full_kv_bytes


def test_assistant_model():
    model, assistant = tiny("llama"), tiny("llama-mqa")
    ids = prompt(1, 250)
    with OasisCache.for_model(model, NARROW) as cache:
        model.generate(ids, **{cache.keyword: cache}, **GREEDY, assistant_model=assistant)
        cache.manager.check_integrity()


@pytest.mark.parametrize("summary", ["minmax", "transform"])
@pytest.mark.parametrize("predictor", ["lookahead", "previous", "oracle"])
def test_every_summary_and_predictor(summary, predictor):
    model, ids = tiny("llama"), prompt(2, 250)
    config = OasisConfig(
        budget_tokens=96, block_size=8, sink_tokens=8, window_tokens=16, summary=summary, predictor=predictor, poison_freed=True
    )
    with OasisCache.for_model(model, config) as cache:
        logits = model.generate(
            ids, **{cache.keyword: cache}, **GREEDY, return_dict_in_generate=True, output_logits=True
        ).logits
        cache.manager.check_integrity()
    assert all(bool(step.isfinite().all()) for step in logits)


def test_the_full_kv_is_kept_bit_for_bit():
    model, ids = tiny("llama"), prompt(1, 250)
    dense = DynamicCache(config=model.config)
    with OasisCache.for_model(model, NARROW) as cache:
        model(ids[:, :240], **{cache.keyword: cache})
        model(ids[:, :240], **{cache.keyword: dense})
        for position in range(240, 250):
            model(ids[:, position : position + 1], **{cache.keyword: cache})
        (sequence,) = cache.manager.sequences
        assert sequence.phase is Phase.SPARSE
        for layer in range(cache.shape.num_layers):
            keys, values = cache.manager.full_kv(sequence, layer)
            assert keys.shape[1] == 250
            assert torch.equal(keys[:, :240], dense.layers[layer].keys[0])
            assert torch.equal(values[:, :240], dense.layers[layer].values[0])


def test_a_second_turn_reads_the_whole_history():
    """A prompt that asks about a needle outside every working set is read with exact attention."""
    model = tiny("llama")
    first, second = prompt(1, 250), prompt(1, 40, seed=5)
    dense = DynamicCache(config=model.config)
    with OasisCache.for_model(model, NARROW) as cache:
        for held in (cache, dense):
            model(first, **{cache.keyword: held})
        ours = model(second, **{cache.keyword: cache}).logits
        theirs = model(second, **{cache.keyword: dense}).logits
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
        cache.manager.check_integrity()


def test_sparse_then_cropped_below_the_budget_is_dense_again():
    model, ids = tiny("llama"), prompt(1, 250)
    with OasisCache.for_model(model, NARROW) as cache:
        model.generate(ids, **{cache.keyword: cache}, **GREEDY)
        cache.crop(60 - cache.get_seq_length())
        cache.manager.check_integrity()
        (sequence,) = cache.manager.sequences
        assert sequence.phase is Phase.DENSE
        assert cache.get_seq_length() == 60
        ours = model(ids[:, 60:61], **{cache.keyword: cache}).logits[0, -1]
    torch.testing.assert_close(ours, model(ids[:, :61]).logits[0, -1], atol=1e-3, rtol=0)


def test_the_report_reads_well():
    model = tiny("llama")
    with OasisCache.for_model(model, NARROW) as cache:
        model.generate(prompt(1, 250), **{cache.keyword: cache}, **GREEDY)
        report = str(cache.stats())
    for word in ("sequences", "device", "full KV", "arena", "hit rate", "coverage", "moved", "late"):
        assert word in report


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_the_residual_stream_is_shown_and_the_hooks_go(family):
    model = tiny(family)
    hinted = []
    with OasisCache.for_model(model, NARROW) as cache:
        assert cache.manager.rooms.predictor.uses_hints
        predictor = cache.manager.rooms.predictor
        guess = predictor.guess
        predictor.guess = lambda layer, *rest: hinted.append(layer) or guess(layer, *rest)
        model.generate(prompt(2, 250), **{cache.keyword: cache}, **GREEDY)
        ahead = [number for number, index in enumerate(cache._shared.stream._full) if index >= 2]
    assert set(hinted) == set(ahead)
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


def test_a_guess_without_distance_is_the_query_itself(monkeypatch):
    """What the first forward checks, checked for every layer and row."""
    from oasiskv.adapters.hf.projection import HFProjection

    model = tiny("qwen3")
    ids = prompt(1, 40)
    with OasisCache.for_model(model, NARROW) as cache:
        rotary, seen, real = cache.shape.rotary, {}, {}
        projection = HFProjection.of(model, [0, 1], cache.shape)
        for index, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(lambda _, args, index=index: seen.__setitem__(index, args[0]))
        attend = cache.attend

        def watched(layer, query, *rest):
            real[layer] = query
            return attend(layer, query, *rest)

        monkeypatch.setattr(cache, "attend", watched)
        model(ids, **{cache.keyword: cache})
        for layer in range(2):
            guessed = rotary.rotate(projection.project(layer, seen[layer])[0], torch.arange(40))
            torch.testing.assert_close(guessed.transpose(0, 1), real[layer][0], atol=1e-4, rtol=1e-4)


def test_a_model_that_makes_its_queries_in_another_way_goes_without_hints(monkeypatch):
    model, ids = tiny("llama"), prompt(1, 250)
    projection = model.model.layers[1].self_attn.q_proj
    forward = projection.forward
    # The third call in the first forward is the check's own: the model and the check see different projections.
    calls = iter(range(1000))
    monkeypatch.setattr(projection, "forward", lambda x: forward(x) * (1 if next(calls) % 2 == 0 else 2))
    with OasisCache.for_model(model, NARROW) as cache:
        model(ids[:, :200], **{cache.keyword: cache})
        assert not cache.manager.rooms.predictor.uses_hints
        monkeypatch.undo()
        model.generate(ids, **{cache.keyword: cache}, **GREEDY)
        cache.manager.check_integrity()


def test_caches_of_one_model_take_turns():
    model, ids = tiny("llama"), prompt(1, 250)
    alone = []
    with OasisCache.for_model(model, NARROW) as cache:
        alone = [model(part, **{cache.keyword: cache}).logits for part in ids.split([240, *[1] * 10], dim=1)]
    dense = DynamicCache(config=model.config)
    with OasisCache.for_model(model, NARROW) as first, OasisCache.for_model(model, NARROW) as second:
        for part, expected in zip(ids.split([240, *[1] * 10], dim=1), alone, strict=True):
            for held in (first, dense, second):
                logits = model(part, **{first.keyword: held}).logits
                assert held is dense or torch.equal(logits, expected)
