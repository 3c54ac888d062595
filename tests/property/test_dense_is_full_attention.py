import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oasiskv import KVManager, ModelShape, Phase

from ..unit.driver import Driver, Part, close_to, tiny

heads = st.tuples(st.integers(1, 3), st.integers(1, 3))
step_sizes = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 15), st.integers(1, 16)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    layers=st.integers(1, 2),
    heads=heads,
    head_dim=st.sampled_from([8, 10, 16]),
    block_size=st.sampled_from([4, 6, 8]),
    more=st.integers(0, 6),
    steps=step_sizes,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_budget_that_holds_the_context_gives_full_attention(seed, layers, heads, head_dim, block_size, more, steps, dtype):
    kv_heads, group = heads
    shape = ModelShape(layers, kv_heads * group, kv_heads, head_dim, dtype)
    budget = (14 + more) * block_size
    config = tiny(budget_tokens=budget, block_size=block_size, arena_bytes=1 << 20, max_new_blocks=1)
    with KVManager(shape, config) as manager:
        driver = Driver(manager, seed)
        sequence = driver.create()
        for tokens, drafts, accepted in steps:
            tokens = min(tokens, budget - sequence.length)
            if tokens < 1:
                break
            drafts = min(drafts, tokens - 1)
            part = Part(sequence, tokens, drafts, min(tokens, max(accepted, tokens - drafts)), driver.draw(tokens))
            expected = driver.full(sequence, part.rows)
            close_to(driver.run(part)[0], expected, dtype)
        assert sequence.phase is Phase.DENSE
        driver.check()


@settings(deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    prompt=st.integers(41, 90),
    steps=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 16)), min_size=1, max_size=8),
    crop=st.floats(0, 1),
)
def test_a_sparse_sequence_looks_at_no_more_than_its_budget_and_at_nothing_twice(seed, prompt, steps, crop):
    shape = ModelShape(1, 4, 2, 8)
    with KVManager(shape, tiny(arena_bytes=1 << 20)) as manager:
        driver = Driver(manager, seed)
        sequence = driver.create(prompt)
        for number, (tokens, accepted) in enumerate(steps):
            part = Part(sequence, tokens, tokens - 1, min(tokens, accepted), driver.draw(tokens))
            always, text, seen = driver.always(sequence), driver.texts[sequence], []
            output = driver.run(part, before=lambda layer, seen=seen: seen.append(driver.selected(sequence, layer)))[0]
            after, driver.texts[sequence] = driver.texts[sequence], text
            if sequence.phase is Phase.SPARSE:
                blocks = [[always | chosen for chosen in layer] for layer in seen]
                assert all(len(own) <= manager.config.budget_blocks for layer in blocks for own in layer)
                assert not any(always & chosen for layer in seen for chosen in layer)
                close_to(output, driver.restricted(sequence, part.rows, blocks))
            else:
                close_to(output, driver.full(sequence, part.rows))
            driver.texts[sequence] = after
            if number == 2:
                driver.crop(sequence, int(crop * sequence.length))
            driver.check()
