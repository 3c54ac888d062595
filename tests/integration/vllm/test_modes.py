"""Ways to run vLLM that the other tests leave out, with a small Llama of random weights: two ranks, graphs, bfloat16."""

import random

import pytest
import torch

from .child import in_a_process
from .inside import EVERYTHING, assert_all_given_back, greedy, ledger, worker

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


def test_a_compiled_model(engine, settings, prompts, expected):
    """Graphs are cut at attention, and nothing of OasisKV is traced."""
    ours = engine(EVERYTHING, **settings, enforce_eager=False)
    assert greedy(ours, prompts) == expected
    assert ledger(ours).counts["handovers"] == 3
    assert worker().manager.stats().decoded_tokens > 60
    assert_all_given_back(ours)


def test_bfloat16(engine, settings, prompts):
    """Sums are rounded in another order, so where the likeliest tokens are nearly alike another one may win."""
    half = {**settings, "dtype": "bfloat16"}
    stock = likeliest(engine(**half), prompts)
    engine_of_ours = engine(EVERYTHING, **half)
    ours = likeliest(engine_of_ours, prompts)
    assert ledger(engine_of_ours).counts["handovers"] == 3
    compared = 0
    for theirs, mine in zip(stock, ours, strict=True):
        for place, own in zip(theirs, mine, strict=True):
            best, chosen = max(place, key=place.get), max(own, key=own.get)
            assert place.get(chosen, -100) == pytest.approx(place[best], abs=0.1)
            assert own[chosen] == pytest.approx(place[chosen], abs=0.1)
            compared += 1
            if chosen != best:
                break
    assert compared > 48


def likeliest(engine, prompts):
    """Log probabilities of the likeliest tokens at each place, request by request."""
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=5, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
    return [[{token: one.logprob for token, one in place.items()} for place in o.outputs[0].logprobs] for o in outputs]
