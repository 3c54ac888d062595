"""The scheduler's books alone: who is handed over while a prompt is read, and who may come back from the host."""

from types import SimpleNamespace

import pytest

from oasiskv.adapters.vllm.ledger import Ledger

SIZE = 32
BOOKS = {"handover_tokens": 256, "block_size": SIZE, "lent_blocks": 20, "most_blocks": 40, "max_model_len": 4096}


def books(host_blocks, **changes):
    ledger = Ledger(**{**BOOKS, "device_blocks": 60, **changes})
    ledger.host_blocks = host_blocks
    return ledger


def request(num_tokens, name="a", computed=0, max_tokens=SIZE):
    return SimpleNamespace(
        request_id=name,
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=computed,
        max_tokens=max_tokens,
        block_hashes=[],
        is_finished=lambda: False,
    )


@pytest.mark.parametrize(
    ("num_tokens", "host_blocks", "changes", "streams"),
    [
        (30 * SIZE, None, {}, False),
        (30 * SIZE + 1, None, {}, True),
        (30 * SIZE + 1, 33, {}, True),  # 31 of the prompt, one that follows, one to spare
        (30 * SIZE + 1, 32, {}, False),
        (30 * SIZE + 1, None, {"handover_tokens": 1000}, False),
        (1000, None, {"handover_tokens": 1000}, True),
        (30 * SIZE + 1, None, {"most_blocks": 61}, False),
        (30 * SIZE + 1, None, {"most_blocks": 60}, True),
    ],
)
def test_prompts_above_half_of_the_device_are_handed_over_while_they_are_read(num_tokens, host_blocks, changes, streams):
    ledger = books(host_blocks, **changes)
    ledger.add(request(num_tokens))
    assert ledger.streams("a") is streams


def test_what_the_scheduler_does_not_know_streams_not():
    assert not books(None).streams("unknown")


def preempted(ledger, request, stored):
    """A request that was recorded, and preempted when the host had its first blocks."""
    ledger.add(request)
    ledger._record(request)
    ledger._entries[request.request_id].stored = stored
    ledger.take_back(request.request_id)


@pytest.mark.parametrize(
    ("device_blocks", "tokens"),
    [
        (60, 4 * SIZE),
        (40, 4 * SIZE),  # what it holds at once
        (39, 0),  # less: it is computed again rather than waited for in vain
    ],
)
def test_a_request_comes_back_from_the_host_if_the_device_can_ever_hold_it(device_blocks, tokens):
    ledger = books(None, device_blocks=device_blocks)
    back = request(36 * SIZE)
    preempted(ledger, back, 4)
    assert ledger.external_tokens(back, 0) == tokens


def test_a_short_rest_needs_less_than_parts_of_a_prompt():
    ledger = books(None, device_blocks=30)
    back = request(36 * SIZE)
    preempted(ledger, back, 30)
    assert ledger.external_tokens(back, 0) == 30 * SIZE  # 6 for the rest and 20 lent


@pytest.mark.parametrize(
    ("computed", "tokens", "drafts", "prompt"),
    [
        (0, 500, 0, True),
        (999, 1, 0, True),  # the last token of the prompt
        (1000, 1, 0, False),
        (1000, 5, 4, False),
        (1000, 20, 0, True),  # computed once more
        (980, 1, 0, True),  # the same, and alone
    ],
)
def test_workers_are_told_what_is_prompt(computed, tokens, drafts, prompt):
    ledger = books(None)
    running = request(1001, computed=computed)
    running.num_prompt_tokens = 970 if computed == 980 else 1000
    ledger.add(running)
    scheduled = SimpleNamespace(num_scheduled_tokens={"a": tokens}, scheduled_spec_decode_tokens={"a": [7] * drafts})
    row = ledger.message(scheduled, lambda _: list(range(1, 40))).rows["a"]
    assert (row.computed, row.tokens, row.drafts, row.prompt) == (computed, tokens, drafts, prompt)


def test_without_word_from_the_workers_nothing_is_recorded():
    ledger = Ledger(**BOOKS, device_blocks=60)
    long = request(1000)
    ledger.add(long)
    assert ledger._record(long) is None
    assert ledger.counts["refused_handovers.host_full"] == 1
