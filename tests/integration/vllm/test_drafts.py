"""Speculative decoding, each engine in processes of its own: with drafts, too, the tokens are those of the stock engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from .inside import EVERYTHING, greedy

pytestmark = pytest.mark.timeout(600)

SETTINGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "num_gpu_blocks_override": 200,
    "max_model_len": 2048,
    "max_num_batched_tokens": 256,
    "async_scheduling": False,
    "disable_log_stats": False,
    "kv_transfer_config": {"kv_connector": "OasisKV", "kv_role": "kv_both", "kv_connector_extra_config": EVERYTHING},
}


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


def in_a_process(smollm2, prompts, multiprocessing, **settings):
    job = {"settings": {"model": str(smollm2), **SETTINGS, **settings}, "prompts": prompts, "tokens": 32}
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if multiprocessing else "0"}
    child = Path(__file__).with_name("child.py")
    done = subprocess.run(
        [sys.executable, child], input=json.dumps(job), capture_output=True, text=True, env=environment, timeout=400
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr[-4000:]
    return json.loads(results[0].removeprefix("RESULT "))


def test_n_gram_drafts_in_an_engine_of_several_processes(smollm2, prompts, expected):
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    result = in_a_process(smollm2, prompts, multiprocessing=True, speculative_config=drafts)
    assert result["tokens"] == expected
    assert result["metrics"]["vllm:oasiskv_handovers"] == 3
    assert result["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 0
    assert result["metrics"]["vllm:oasiskv_decoded_tokens"] > 60


def test_a_draft_model_sees_what_is_left_of_a_request(smollm2, prompts, expected):
    drafts = {"method": "draft_model", "model": str(smollm2), "num_speculative_tokens": 3}
    result = in_a_process(smollm2, prompts, multiprocessing=False, speculative_config=drafts)
    assert result["tokens"] == expected
    assert result["metrics"]["vllm:oasiskv_handovers"] == 3
    assert result["metrics"]["vllm:oasiskv_freed_device_blocks"] > 0
    drafted, accepted = (result["metrics"][f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
    assert accepted > 0.8 * drafted  # the draft model is the model itself, with the middle of its history left out
