import dataclasses

import pytest
import torch

from oasiskv import KVManager, ModelShape, Phase

from .driver import SHAPE, Driver, Part, close_to, tiny


@pytest.fixture
def driver():
    with KVManager(SHAPE, tiny()) as manager:
        yield Driver(manager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(2, 2), (6, 2), (3, 1)])
def test_a_context_within_the_budget_gives_full_attention(dtype, query_heads, kv_heads):
    shape = ModelShape(num_layers=3, query_heads=query_heads, kv_heads=kv_heads, head_dim=8, dtype=dtype)
    with KVManager(shape, tiny(arena_bytes=None)) as manager:
        driver = Driver(manager)
        sequence = driver.create()
        for tokens in (9, 1, 1, 4, 1, 17, 3, 1, 1, 2):
            part = Part(sequence, tokens, rows=driver.draw(tokens))
            expected = driver.full(sequence, part.rows)
            close_to(driver.run(part)[0], expected, dtype)
        assert sequence.length == manager.config.budget_tokens
        assert sequence.phase is Phase.DENSE
        driver.check()


def test_a_dense_threshold_above_the_budget_keeps_more_dense():
    with KVManager(SHAPE, tiny(dense_threshold=60)) as manager:
        driver = Driver(manager)
        sequence = driver.create(50)
        for tokens in (1, 8, 1):
            part = Part(sequence, tokens, rows=driver.draw(tokens))
            expected = driver.full(sequence, part.rows)
            close_to(driver.run(part)[0], expected)
        assert sequence.phase is Phase.DENSE
        driver.decode(sequence)
        assert sequence.phase is Phase.SPARSE


def test_each_draft_row_sees_the_rows_before_it_and_rejected_rows_are_gone(driver):
    sequence = driver.create(6)
    for tokens, drafts, accepted in ((5, 4, 1), (5, 4, 3), (4, 3, 4), (8, 7, 1), (3, 1, 2)):
        part = Part(sequence, tokens, drafts, accepted, driver.draw(tokens))
        expected = driver.full(sequence, part.rows)
        close_to(driver.run(part)[0], expected)
        driver.check()
    assert sequence.length == 6 + 1 + 3 + 4 + 1 + 2


def test_rejecting_drafts_leaves_no_trace_in_the_outputs():
    outputs = []
    for drafted in (False, True):
        with KVManager(SHAPE, tiny()) as manager:
            driver = Driver(manager)
            sequence = driver.create(10)
            for _ in range(8):
                rows = driver.draw(6)
                part = Part(sequence, 6, 5, 1, rows) if drafted else Part(sequence, 1, rows=rows.first(1))
                outputs.append(driver.run(part)[0][:, :1])
    for plain, drafted in zip(outputs[:8], outputs[8:], strict=True):
        torch.testing.assert_close(plain, drafted, rtol=1e-5, atol=1e-6)


def test_drafts_that_would_exceed_the_budget_do_not_end_full_attention_within_it(driver):
    sequence = driver.create(37)
    driver.decode(sequence, 16, 15, 1)
    for tokens, drafts in ((1, 0), (2, 1)):
        part = Part(sequence, tokens, drafts, 1, driver.draw(tokens))
        expected = driver.full(sequence, part.rows)
        close_to(driver.run(part)[0], expected)
    assert sequence.length == driver.manager.config.budget_tokens
    driver.check()


@pytest.mark.parametrize("chunk", [2, 3, 4, 17, 23, 70])
@pytest.mark.parametrize("length", [33, 70])
def test_a_prompt_in_chunks_gets_full_attention(driver, chunk, length):
    sequence = driver.create()
    while sequence.length < length:
        tokens = max(2, min(chunk, length - sequence.length))
        part = Part(sequence, tokens, rows=driver.draw(tokens))
        expected = driver.full(sequence, part.rows)
        close_to(driver.run(part)[0], expected)
        driver.check()


@pytest.mark.parametrize(("tokens", "drafts", "prompt"), [(2, 0, False), (21, 0, False), (1, 0, True), (4, 3, True)])
def test_more_prompt_of_a_sparse_sequence_gets_full_attention(driver, tokens, drafts, prompt):
    sequence = driver.create(50)
    driver.decode(sequence)
    assert sequence.phase is Phase.SPARSE
    part = Part(sequence, tokens, drafts, tokens - drafts, driver.draw(tokens), prompt)
    expected = driver.full(sequence, part.rows)
    close_to(driver.run(part)[0], expected)
    driver.check()
    driver.decode(sequence)
    assert sequence.phase is Phase.SPARSE
    driver.check()


def test_a_scale_of_the_hosts_own_is_used():
    with KVManager(SHAPE, tiny()) as manager:
        driver = Driver(manager)
        sequence = driver.create(7)
        rows = driver.draw(1)
        scaled = rows._replace(queries=rows.queries * 3)
        expected = driver.full(sequence, scaled)
        step = driver.begin(Part(sequence, 1, rows=rows))
        for layer in range(2):
            output = step.attend(layer, *(part[layer] for part in rows), scale=3 * 8**-0.5)
            close_to(output, expected[layer])
        step.commit()


def test_two_sequences_do_not_see_each_other(driver):
    first, second = driver.create(9), driver.create(14)
    for _ in range(10):
        parts = [Part(sequence, 1, rows=driver.draw(1)) for sequence in (first, second)]
        expected = [driver.full(part.sequence, part.rows) for part in parts]
        for output, wanted in zip(driver.run(*parts), expected, strict=True):
            close_to(output, wanted)


def test_a_row_of_the_tables_can_be_used_again():
    with KVManager(SHAPE, tiny()) as manager:
        driver = Driver(manager)
        for tokens in (30, 60, 5, 45):
            sequence = driver.create(tokens)
            part = Part(sequence, 1, rows=driver.draw(1))
            expected = driver.full(sequence, part.rows)
            output = driver.run(part)[0]
            if sequence.phase is Phase.DENSE:
                close_to(output, expected)
            driver.check()
            driver.free(sequence)
        assert manager.rooms.sets.capacity == 1


def test_queries_are_answered_in_their_dtype():
    shape = dataclasses.replace(SHAPE, dtype=torch.bfloat16)
    with KVManager(shape, tiny(arena_bytes=None)) as manager:
        driver = Driver(manager)
        sequence = driver.create(50)
        assert driver.decode(sequence).dtype == torch.bfloat16
