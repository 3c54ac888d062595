"""Ways to run vLLM that the other tests leave out, with a small Llama of random weights: two ranks, graphs, bfloat16."""

import logging
import random
import statistics

import pytest
import torch

from .child import in_a_process
from .inside import EVERYTHING, assert_all_given_back, greedy, ledger, likeliest, worker

pytestmark = pytest.mark.timeout(400)

SPACE = {"num_gpu_blocks_override": 200, "max_model_len": 2048, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The directory of a model with four kv heads, so that two ranks have two each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.15,  # so that tokens depend on what is attended to
    )
    directory = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def prompts():
    chance = random.Random(3)
    return [[chance.randrange(3, 1024) for _ in range(length)] for length in (300, 420, 580)]


@pytest.fixture(scope="module")
def settings(llama):
    return {"model": str(llama), "skip_tokenizer_init": True, **SPACE}


@pytest.fixture(scope="module")
def expected(engine, settings, prompts):
    tokens = greedy(engine(**settings), prompts)
    assert len({token for one in tokens for token in one}) > 24  # not the same few again and again
    return tokens


def test_two_tensor_parallel_ranks(engine, settings, prompts, expected, tmp_path):
    """Each has its heads, and a folder of its own below its arena."""
    engine.close()
    oasis = {**EVERYTHING, "tier": f"file:{tmp_path}/{{rank}}", "arena_bytes": 2 * 1024**2, "segment_blocks": 4}
    result = in_a_process(prompts, 24, oasis=oasis, multiprocessing=True, tensor_parallel_size=2, **settings)
    assert result["tokens"] == expected
    assert result["metrics"]["vllm:oasiskv_handovers"] == 3
    layers, kv_heads, size = 4, 4, 16
    stored = sum((len(prompt) + 23) // 32 * 32 // size for prompt in prompts)
    assert result["metrics"]["vllm:oasiskv_stored_blocks"] >= stored * layers * kv_heads  # the heads of both ranks
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["0", "1"]


def test_a_compiled_model(engine, settings, prompts, expected, caplog):
    """Graphs are cut at attention, and nothing of OasisKV is traced. That there are no hints is said once."""
    with caplog.at_level(logging.WARNING, "oasiskv"):
        ours = engine({**EVERYTHING, "predictor": "layer-ahead"}, **settings, enforce_eager=False)
    assert greedy(ours, prompts) == expected
    (said,) = [record.getMessage() for record in caplog.records if record.name == "oasiskv"]
    assert said.startswith("hints-lost predictor=layer-ahead reason='the model is compiled'")
    assert "--enforce-eager" in said
    assert ledger(ours).counts["handovers"] == 3
    assert worker().manager.stats().decoded_tokens > 60
    assert_all_given_back(ours)


def test_bfloat16_is_as_far_from_float32_as_that_of_stock(engine, settings):
    """Sums are rounded in another order than stock ones, no worse."""
    chance = random.Random(4)
    prompts = [[chance.randrange(3, 1024) for _ in range(260)] for _ in range(16)]
    exact = likeliest(engine(**settings), prompts, 24)
    half = {**settings, "dtype": "bfloat16"}
    stock = likeliest(engine(**half), prompts, 24)
    rounded = engine(EVERYTHING, **half)
    ours = likeliest(rounded, prompts, 24)
    assert ledger(rounded).counts["handovers"] == 16
    assert worker().manager.shape.dtype == torch.bfloat16
    theirs, own = errors(stock, exact), errors(ours, exact)
    assert min(len(theirs), len(own)) > 48
    assert statistics.mean(own) < 1.25 * statistics.mean(theirs)


def errors(found, exact):
    """How far log probabilities are from the exact ones, at all places until other tokens win."""
    return [
        max(abs(place[token] - true[token]) for token in place if token in true)
        for request, whole in zip(found, exact, strict=True)
        for place, true in agreeing(request, whole)
    ]


def agreeing(found, exact):
    for place, true in zip(found, exact, strict=True):
        yield place, true
        if max(place, key=place.get) != max(true, key=true.get):
            return
