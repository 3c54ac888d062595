"""Speculative decoding, each engine in processes of its own: with drafts, too, the tokens are those of the stock engine."""

import pytest
from transformers import AutoTokenizer

from .child import in_a_process
from .inside import EVERYTHING, greedy

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def prompts(smollm2, long_text):
    """Text that repeats itself, so that n-gram drafts are sometimes right, and once plain."""
    ids = AutoTokenizer.from_pretrained(smollm2).encode(long_text[:8000])
    return [ids[:120] * 3, ids[200:640], ids[700:1200]]


@pytest.fixture(scope="module")
def expected(engine, prompts):
    tokens = greedy(engine(max_model_len=2048), prompts, 32)
    engine.close()
    return tokens


def drafting(smollm2, prompts, multiprocessing, drafts):
    settings = {"model": str(smollm2), "async_scheduling": False, "speculative_config": drafts}
    return in_a_process(prompts, 32, oasis=EVERYTHING, multiprocessing=multiprocessing, **settings)


def test_n_gram_drafts_in_an_engine_of_several_processes(smollm2, prompts, expected):
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    result = drafting(smollm2, prompts, True, drafts)
    assert result["tokens"] == expected
    assert result["metrics"]["vllm:oasiskv_handovers"] == 3
    assert result["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 0
    assert result["metrics"]["vllm:oasiskv_decoded_tokens"] > 60


def test_a_draft_model_sees_what_is_left_of_a_request(smollm2, prompts, expected):
    drafts = {"method": "draft_model", "model": str(smollm2), "num_speculative_tokens": 3}
    result = drafting(smollm2, prompts, False, drafts)
    assert result["tokens"] == expected
    assert result["metrics"]["vllm:oasiskv_handovers"] == 3
    assert result["metrics"]["vllm:oasiskv_freed_device_blocks"] > 0
    drafted, accepted = (result["metrics"][f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
    assert accepted > 0.8 * drafted  # the draft model is the model itself, with the middle of its history left out
