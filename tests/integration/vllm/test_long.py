"""Prompts that are much longer than the budget: how many run at once, and what the answers are worth."""

import math

import pytest
from transformers import AutoTokenizer
from vllm.distributed.kv_transfer import has_kv_transfer_group

from oasiskv.errors import ConfigError
from oasiskv.testing import retrieval

from .inside import Driver, assert_all_given_back, greedy, ledger, likeliest, scheduler, worker

pytestmark = pytest.mark.timeout(600)

LENGTH = 3000
SPACE = {"num_gpu_blocks_override": 165, "max_model_len": 3600, "max_num_batched_tokens": 1024, "max_num_seqs": 8}
"""A KV space of 5,248 tokens: room for one such prompt."""


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def prompts(tokenizer, long_text):
    ids = tokenizer.encode(long_text[:60000])
    return [ids[1500 * number : 1500 * number + LENGTH] for number in range(4)]


@pytest.fixture(scope="module")
def needles(tokenizer, long_text):
    """A document of 2,500 tokens with nine facts in it, and a question for each."""
    document = retrieval.documents(long_text, 2500, lambda text: len(tokenizer.encode(text)), seed=1)[0]
    return [(tokenizer.encode(document.text + item.question), item.answer) for item in document.items]


def answers(engine, tokenizer, needles):
    found = [greedy(engine, [prompt], 10)[0] for prompt, _ in needles]  # one by one, so that there are blocks to lend
    texts = [tokenizer.decode(tokens) for tokens in found]
    return {
        n for n, (text, (_, answer)) in enumerate(zip(texts, needles, strict=True)) if text.strip().startswith(answer.strip())
    }


@pytest.fixture(scope="module")
def stock(engine, tokenizer, prompts, needles):
    """What the stock engine does: how many run at once, and which facts it finds."""
    plain = engine(**SPACE)
    driver = Driver(plain)
    driver.add("0", prompts[0], 4)
    driver.add("1", prompts[1], 4)
    while len(driver.tokens["0"]) < 4:
        driver.step()
    driver.abort("1")
    driver.finish()
    return driver.most_running, answers(plain, tokenizer, needles)


@pytest.fixture(scope="module")
def frugal(engine, stock):
    """Made after the stock engine has done its part."""
    return engine({"budget_tokens": 512}, **SPACE)


@pytest.fixture(scope="module")
def ours(engine, stock):
    """Made after the frugal one, which it ends."""
    return engine({"budget_tokens": 1024, "handover": "always"}, num_gpu_blocks_override=150, max_model_len=4000)


def test_four_times_the_requests_run_at_once(frugal, stock, prompts):
    driver = Driver(frugal)
    for number, prompt in enumerate(prompts):
        driver.add(str(number), prompt, 48)
    driver.finish()
    assert stock[0] == 1
    assert driver.most_running == 4
    assert all(len(tokens) == 48 for tokens in driver.tokens.values())
    assert ledger(frugal).counts["handovers"] >= 3  # the last one may stay with vLLM
    assert worker().manager.stats().hit_rate > 0.5
    assert_all_given_back(frugal)


def test_facts_that_stock_finds_are_found(ours, tokenizer, stock, needles):
    assert len(stock[1]) >= 4
    assert answers(ours, tokenizer, needles) >= stock[1]
    assert ledger(ours).counts["handovers"] >= len(needles)


def test_what_follows_is_as_likely_as_to_the_stock_engine(engine, ours, prompts):
    """Ours writes, stock scores: the mean over the tokens of what each gave to what was written."""
    from vllm import SamplingParams

    before = ledger(ours).counts["handovers"]
    wanted = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True, logprobs=1)
    written = ours.generate([{"prompt_token_ids": prompts[0]}], wanted, use_tqdm=False)[0].outputs[0]
    own = [place[token].logprob for place, token in zip(written.logprobs, written.token_ids, strict=True)]
    assert ledger(ours).counts["handovers"] == before + 1
    reader = engine(num_gpu_blocks_override=150, max_model_len=4000)
    whole = prompts[0] + list(written.token_ids)
    scored = reader.generate(
        [{"prompt_token_ids": whole}], SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0), use_tqdm=False
    )[0].prompt_logprobs
    stock = [scored[LENGTH + n][token].logprob for n, token in enumerate(written.token_ids)]
    assert math.fsum(own) / len(own) - math.fsum(stock) / len(stock) == pytest.approx(0, abs=0.05)
    agree = sum(
        max(scored[LENGTH + n].items(), key=lambda entry: entry[1].logprob)[0] == token
        for n, token in enumerate(written.token_ids)
    )
    assert agree >= 44


TIGHT = {"num_gpu_blocks_override": 64, "max_model_len": 3600, "max_num_batched_tokens": 256}
"""A KV space of 2,016 tokens, less than a prompt."""


def test_prompts_that_exceed_the_kv_space_are_read_exactly(engine, prompts):
    expected = likeliest(engine(), prompts[:1])
    tight = engine({"budget_tokens": 512}, **TIGHT)
    assert scheduler(tight).kv_cache_manager.block_pool.num_gpu_blocks * 32 < LENGTH
    for (ours,), (stock,) in zip(likeliest(tight, prompts[:1]), expected, strict=True):
        assert ours == pytest.approx(stock, abs=1e-3)
    assert ledger(tight).counts["handovers"] == 1
    driver = Driver(tight)
    for number, prompt in enumerate(prompts[:2]):
        driver.add(str(number), prompt, 24)
    driver.finish()
    assert all(len(tokens) == 24 for tokens in driver.tokens.values())
    assert_all_given_back(tight)


def test_a_length_that_neither_the_device_nor_the_host_holds_is_refused(engine):
    with pytest.raises(ConfigError, match=r"max_model_len is 3600, but the KV space holds 2016 tokens and the host 1408"):
        engine({"budget_tokens": 512, "arena_bytes": 64 * 1024**2}, **TIGHT)
    assert not has_kv_transfer_group()  # the next engine in this process finds nothing of it
    assert greedy(engine(), [[1, 2, 3]], 1)
