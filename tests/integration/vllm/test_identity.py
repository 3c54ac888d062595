"""Where a handed-over request attends to everything, its tokens are those of the stock engine."""

import logging
import random

import pytest
import torch
from transformers import AutoTokenizer

from oasiskv.errors import TierUnavailable
from oasiskv.tiers.file import FileStore

from .inside import EVERYTHING, Driver, assert_all_given_back, greedy, ledger, scheduler, worker

pytestmark = pytest.mark.timeout(600)

CHUNKS = {"max_num_batched_tokens": 256, "num_gpu_blocks_override": 400, "max_model_len": 2048}


@pytest.fixture(scope="module")
def tokens(smollm2, long_text):
    return AutoTokenizer.from_pretrained(smollm2).encode(long_text[:20000])[:3000]


@pytest.fixture(scope="module")
def prompts(tokens):
    """Overlapping nowhere at a block's start, 300 to 580 tokens, so that chunks of 256 cut them."""
    return [tokens[150 * number : 190 * number + 300] for number in range(8)]


@pytest.fixture(scope="module")
def conversation(tokens, prompts):
    """What a user says after the answer to the fourth prompt."""
    return lambda answer: prompts[3] + answer + tokens[:40]


@pytest.fixture(scope="module")
def expected(engine, prompts, conversation):
    stock = engine(**CHUNKS, enable_prefix_caching=False)
    first = greedy(stock, prompts)
    return first, greedy(stock, [conversation(first[3])])[0]


@pytest.fixture(scope="module")
def ours(engine, expected):
    """An engine with prefix caching in which everything long is handed over; made after the stock engine has gone."""
    return engine({**EVERYTHING, "predictor": "layer-ahead"}, **CHUNKS, enable_prefix_caching=True)


def test_one_request(ours, prompts, expected):
    assert greedy(ours, prompts[:1]) == expected[0][:1]
    assert ledger(ours).counts["handovers"] == 1
    assert worker().manager.stats().decoded_tokens > 16


def test_the_summaries_know_how_keys_turn(ours):
    shape = worker().manager.shape
    assert shape.rotary.scaling == 1
    assert shape.rotary.angles == pytest.approx([100000 ** (-plane / 32) for plane in range(32)], rel=1e-4)


def test_hints_are_close_to_the_queries_that_come(ours, prompts, monkeypatch):
    """In the second half of the layers; the first ones are far from what enters the model."""
    greedy(ours, prompts[:1], 1)  # the first forward is the one that checks
    assert worker().stream.checked
    predictor = worker().manager.rooms.predictor
    alike, learn = [], predictor.learn

    def look(layer, queries, positions, rows):
        raw, guessed_at = predictor._guessed[layer]
        assert torch.equal(guessed_at, positions)
        guess = torch.stack([predictor.shape.rotary.rotate(*one) for one in zip(raw[:, 0], positions[:, 0], strict=True)])
        if layer >= len(worker()._caches) // 2:
            alike.append(torch.cosine_similarity(guess.flatten(1), queries[:, 0].flatten(1)).mean().item())
        learn(layer, queries, positions, rows)

    monkeypatch.setattr(predictor, "learn", look)
    greedy(ours, prompts[:1])
    assert len(alike) >= 200
    assert sum(alike) / len(alike) > 0.8


def test_eight_requests_in_chunks(ours, prompts, expected):
    before = ledger(ours).counts["handovers"]
    assert greedy(ours, prompts) == expected[0]
    assert ledger(ours).counts["handovers"] == before + 8
    worker().manager.check_integrity()


def test_shared_prefixes_from_the_device(ours, prompts, expected):
    assert greedy(ours, prompts) == expected[0]
    assert ledger(ours).counts["freed_device_blocks"] > 100


def test_a_prefix_from_the_host(ours, prompts, conversation, expected):
    scheduler(ours).kv_cache_manager.reset_prefix_cache()  # the device has forgotten it
    before = ledger(ours).counts["host_prefix_hit_tokens"]
    assert greedy(ours, [conversation(expected[0][3])]) == [expected[1]]
    assert ledger(ours).counts["host_prefix_hit_tokens"] >= before + len(prompts[3]) // 32 * 32
    worker().manager.check_integrity()


def test_the_last_token_of_a_prompt_is_read_though_it_is_alone(ours, tokens):
    """It could be taken for one that decodes, over the working set."""
    prompt = tokens[40 : 40 + 12 * 32 + 1]
    expected = greedy(ours, [prompt])
    scheduler(ours).kv_cache_manager.reset_prefix_cache()  # the device has forgotten it
    before = worker().manager.stats().prefilled_tokens
    assert greedy(ours, [prompt]) == expected
    assert worker().manager.stats().prefilled_tokens == before + 1


def test_a_preempted_request_resumes_from_the_host(ours, prompts, expected):
    scheduler(ours).kv_cache_manager.reset_prefix_cache()
    ledger(ours).forget()
    driver = Driver(ours)
    driver.add("preempted", prompts[7])
    while len(driver.tokens["preempted"]) < 12:
        driver.step()
    before = ledger(ours).counts["host_resumes"]
    driver.preempt()
    assert driver.finish()["preempted"] == expected[0][7]
    assert ledger(ours).counts["host_resumes"] == before + 1
    assert_all_given_back(ours)


def test_an_abort_in_the_middle_disturbs_nobody(ours, prompts, expected):
    driver = Driver(ours)
    driver.add("stays", prompts[5])
    driver.add("goes", prompts[6])
    while len(driver.tokens["goes"]) < 8:
        driver.step()
    driver.abort("goes")
    assert driver.finish()["stays"] == expected[0][5]
    assert_all_given_back(ours)


def test_many_that_come_and_go(ours, prompts, expected):
    """64 requests arrive at random; a fifth of them is cancelled at random; some are preempted."""
    chance = random.Random(7)
    driver = Driver(ours)
    waiting = list(range(64))
    chance.shuffle(waiting)
    cancelled = set()
    before = ledger(ours).counts["host_resumes"]
    busy = True
    while waiting or busy:
        while waiting and chance.random() < 0.4:
            number = waiting.pop()
            driver.add(str(number), prompts[number % 8])
        busy = driver.step()
        if chance.random() < 0.1 and driver.scheduler.running:
            victim = chance.choice(driver.scheduler.running).request_id
            cancelled.add(victim.split("-")[0])
            driver.abort(victim.split("-")[0])
        if chance.random() < 0.05 and len(driver.scheduler.running) > 1:
            driver.preempt()
    for number in range(64):
        if str(number) not in cancelled:
            assert driver.tokens[str(number)] == expected[0][number % 8], number
    assert ledger(ours).counts["host_resumes"] > before
    assert 0 < len(cancelled) < 40
    assert_all_given_back(ours)


def test_a_host_that_is_full_leaves_requests_to_vllm(engine, prompts, expected):
    small = engine({**EVERYTHING, "arena_bytes": 30 * 1024**2}, **CHUNKS)  # one and a half of these requests
    assert greedy(small, prompts[:4]) == expected[0][:4]
    assert ledger(small).counts["refused_handovers.host_full"] >= 1
    assert ledger(small).counts["handovers"] >= 1
    assert_all_given_back(small)


def test_a_tier_below_the_arena_lets_more_requests_in(engine, prompts, expected, tmp_path):
    """The arena holds three of these requests; the file has what it does not."""
    tiers = {"arena_bytes": 60 * 1024**2, "tier": f"file:{tmp_path}?limit=1GiB", "segment_blocks": 4}
    ours = engine({**EVERYTHING, **tiers}, **CHUNKS)
    assert ledger(ours).host_blocks == 2**30 // (32 * 30 * 3 * 2 * 64 * 4)
    assert greedy(ours, prompts) == expected[0]
    assert ledger(ours).counts["handovers"] == 8
    assert worker().manager.stats().tier_bytes > 60 * 1024**2
    assert_all_given_back(ours)


def test_a_tier_that_is_down_is_waited_for(engine, prompts, expected, tmp_path, monkeypatch, caplog):
    """The arena holds one of these requests and is full after seconds; an error would end the engine."""
    store = FileStore.store

    def waiting():
        return any(getattr(record, "event", None) == "tier-wait" for record in caplog.records)

    async def down_at_first(self, objects):
        if not waiting():
            raise TierUnavailable("down")
        await store(self, objects)

    monkeypatch.setattr(FileStore, "store", down_at_first)
    ours = engine({**EVERYTHING, "arena_bytes": 25 * 1024**2, "tier": f"file:{tmp_path}", "segment_blocks": 4}, **CHUNKS)
    with caplog.at_level(logging.WARNING, "oasiskv"):
        assert greedy(ours, prompts) == expected[0]
    assert waiting()
    assert ledger(ours).counts["handovers"] == 8
    assert_all_given_back(ours)


def test_long_prompts_come_and_go_in_a_tight_space(engine, tokens):
    """They take more than half of the KV space, so they are handed over while they are read, among others that are not."""
    tight = {"num_gpu_blocks_override": 72, "max_model_len": 2048, "max_num_batched_tokens": 128}
    budget = {**EVERYTHING, "budget_tokens": 1280}
    prompts = [tokens[200 * number : 200 * number + (1180 if number % 2 else 300)] for number in range(4)]
    expected = greedy(engine(**CHUNKS), prompts)
    ours = engine(budget, **tight, enable_prefix_caching=True)
    before_the_end = []
    lend = ledger(ours).lend

    def look(request_id, *rest):
        request = ledger(ours)._requests[request_id]
        before_the_end.append(request.num_computed_tokens < request.num_prompt_tokens)
        return lend(request_id, *rest)

    ledger(ours).lend = look
    driver = Driver(ours)
    for number, prompt in enumerate(prompts):
        driver.add(str(number), prompt)
    driver.add("cancelled", prompts[1][5:])
    steps = 0
    while driver.step():
        steps += 1
        if steps % 16 == 0 and driver.scheduler.running:
            driver.preempt()
        if steps == 12:
            driver.abort("cancelled")
        assert steps < 1000
    assert [driver.tokens[str(number)] for number in range(4)] == expected
    assert sum(before_the_end) >= 2
    assert_all_given_back(ours)
