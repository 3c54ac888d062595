import itertools

import pytest
import torch

from oasiskv import KVManager, Phase
from oasiskv.working_set import window_start

from .driver import SHAPE, Driver, Part, close_to, tiny


def watch(driver, sequence):
    """A hook that notes the selected blocks of every layer at the moment it is called."""
    seen = []
    return seen, lambda layer: seen.append(driver.selected(sequence, layer))


def looked_at(driver, always, selected):
    return [[always | chosen for chosen in heads] for heads in selected]


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_the_oracle_attends_exactly_over_what_it_chose(tokens):
    with KVManager(SHAPE, tiny(predictor="oracle")) as manager:
        driver = Driver(manager)
        sequence = driver.create(70)
        for _ in range(9):
            part = Part(sequence, tokens, tokens - 1, tokens, driver.draw(tokens))
            always, text = driver.always(sequence), driver.texts[sequence]
            seen, hook = watch(driver, sequence)
            output = driver.run(part, after=hook)[0]
            after = driver.texts[sequence]
            driver.texts[sequence] = text
            close_to(output, driver.restricted(sequence, part.rows, looked_at(driver, always, seen)))
            driver.texts[sequence] = after
            assert all(len(chosen) == 3 for heads in seen for chosen in heads)
            driver.check()


@pytest.mark.parametrize("budget_per", ["head", "sequence"])
@pytest.mark.parametrize("predictor", ["lookahead", "previous"])
@pytest.mark.parametrize("summary", ["minmax", "transform"])
@pytest.mark.parametrize(("tokens", "drafts", "accepted"), [(1, 0, 1), (4, 3, 2), (16, 15, 16), (3, 1, 3)])
def test_a_step_attends_exactly_over_what_was_chosen_before(budget_per, predictor, summary, tokens, drafts, accepted):
    with KVManager(SHAPE, tiny(budget_per=budget_per, predictor=predictor, summary=summary)) as manager:
        driver = Driver(manager)
        sequence = driver.create(70)
        driver.decode(sequence)
        moved = False
        for _ in range(6):
            part = Part(sequence, tokens, drafts, accepted, driver.draw(tokens))
            always, text = driver.always(sequence), driver.texts[sequence]
            seen, hook = watch(driver, sequence)
            output = driver.run(part, before=hook)[0]
            driver.texts[sequence], after = text, driver.texts[sequence]
            close_to(output, driver.restricted(sequence, part.rows, looked_at(driver, always, seen)))
            driver.texts[sequence] = after
            moved |= seen != [driver.selected(sequence, layer) for layer in range(2)]
            driver.check()
        assert moved


def test_the_first_step_after_the_prompt_looks_at_the_blocks_its_last_queries_saw_most():
    with KVManager(SHAPE, tiny(summary="minmax")) as manager:
        driver = Driver(manager)
        sequence = driver.create()
        rows = driver.draw(60)
        for layer in range(2):
            wanted = 3 + layer
            target = torch.randn(8, generator=driver.generator) * 4
            rows.keys[layer, wanted * 4 : wanted * 4 + 4] = target
            rows.queries[layer, -4:] = target
        driver.run(Part(sequence, 60, rows=rows))
        assert sequence.phase is Phase.UNSETTLED
        seen, hook = watch(driver, sequence)
        driver.decode(sequence, before=hook)
        assert sequence.phase is Phase.SPARSE
        for layer in range(2):
            assert all(3 + layer in chosen for chosen in seen[layer])


def uniform_blocks(driver, tokens):
    """A prompt whose keys are all alike within each block, so that any summary ranks blocks as the keys do."""
    rows = driver.draw(tokens)
    keys = rows.keys.unflatten(1, (-1, 4))
    keys.copy_(keys[:, :, :1].clone().expand_as(keys))
    return rows


def aim(rows, prompt, layer, head, block):
    """Make the queries of one kv head look at a block. Says whether they look at nothing else."""
    key = prompt.keys[layer, 4 * block, head]
    rows.queries[layer, :, 2 * head : 2 * head + 2] = 30 * key / key.norm()
    return int((prompt.keys[layer, :, head] @ key).argmax()) // 4 == block


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_block_that_the_queries_look_at_is_loaded_for_the_next_step(drafts):
    aimed = 0
    with KVManager(SHAPE, tiny()) as manager:
        driver = Driver(manager)
        sequence, prompt = driver.create(), uniform_blocks(driver, 80)
        driver.run(Part(sequence, 80, rows=prompt))
        driver.decode(sequence)
        for block in (5, 11, 2, 15):
            looking = driver.draw(1 + drafts)
            sure = {(layer, head) for layer in range(2) for head in range(2) if aim(looking, prompt, layer, head, block)}
            driver.run(Part(sequence, 1 + drafts, drafts, 1 + drafts, looking))
            driver.check()
            for layer, head in sure:
                assert block in driver.selected(sequence, layer)[head]
            aimed += len(sure)
    assert aimed > 4


@pytest.mark.parametrize("cap", [0, 1, 2, 3])
@pytest.mark.parametrize("drafts", [0, 4])
def test_the_heads_of_a_layer_share_the_cap_on_new_blocks_and_none_takes_more_than_its_burst(cap, drafts):
    with KVManager(SHAPE, tiny(max_new_blocks=cap)) as manager:
        driver = Driver(manager)
        sequence = driver.create(100)
        driver.decode(sequence, 1 + drafts, drafts, 1)
        before, most, together = None, 0, 0
        for _ in range(15):
            now = [driver.selected(sequence, layer) for layer in range(2)]
            if before is not None:
                for heads, previous in zip(now, before, strict=True):
                    new = [len(a - b) for a, b in zip(heads, previous, strict=True)]
                    most, together = max(most, *new), max(together, sum(new))
            before = now
            driver.decode(sequence, 1 + drafts, drafts, 1)
        assert together <= 2 * cap
        assert most <= manager.config.burst_blocks == min(4 * cap, 3)
        if cap in (1, 2):  # one head took more than its even share, and the cap was used up
            assert most > cap
            assert together == 2 * cap
        assert manager.stats().most_new_blocks <= manager.config.burst_blocks


def test_a_margin_keeps_blocks_from_moving_for_little_gain():
    loaded = []
    for margin in (0.0, 2.7):
        with KVManager(SHAPE, tiny(swap_margin=margin)) as manager:
            driver = Driver(manager)
            sequence = driver.create(100)
            for _ in range(10):
                driver.decode(sequence)
            loaded.append(manager.stats().loaded_blocks)
    assert loaded[1] < loaded[0] / 4


@pytest.mark.parametrize("correction", [1, 2])
@pytest.mark.parametrize(("tokens", "drafts"), [(1, 0), (3, 2)])
def test_correction_adds_at_most_its_number_of_blocks_and_never_copies_them(correction, tokens, drafts):
    with KVManager(SHAPE, tiny(correction_blocks=correction, max_new_blocks=0)) as manager:
        driver = Driver(manager)
        sequence = driver.create(64)
        driver.decode(sequence)
        sizes = set()
        for _ in range(3):
            part = Part(sequence, tokens, drafts, tokens, driver.draw(tokens))
            always, text = driver.always(sequence), driver.texts[sequence]
            high = window_start(manager.config, sequence.length)
            seen, hook = watch(driver, sequence)
            corrected = manager.stats().corrected_blocks
            output = driver.run(part, before=hook)[0].double()
            added = manager.stats().corrected_blocks - corrected
            after, driver.texts[sequence] = driver.texts[sequence], text
            found = 0
            for layer, head in itertools.product(range(2), range(2)):
                chosen = seen[layer][head]
                missing = [block for block in range(1, high) if block not in chosen]
                own = layer, slice(None), slice(2 * head, 2 * head + 2)
                for more in (m for n in range(correction * tokens + 1) for m in itertools.combinations(missing, n)):
                    blocks = [[always | chosen | set(more)] * 2] * 2
                    if torch.allclose(output[own], driver.restricted(sequence, part.rows, blocks)[own], atol=1e-5):
                        sizes.add(len(more))
                        found += len(more)
                        break
                else:
                    pytest.fail(f"layer {layer}, head {head} attends to something else")
            assert added == found
            driver.texts[sequence] = after
            driver.check()
        assert correction * tokens in sizes or correction in sizes
        assert manager.stats().loaded_blocks == 0


def test_correction_reads_the_block_that_the_query_misses_most():
    with KVManager(SHAPE, tiny(correction_blocks=1, max_new_blocks=0)) as manager:
        driver = Driver(manager)
        sequence, prompt = driver.create(), uniform_blocks(driver, 80)
        driver.run(Part(sequence, 80, rows=prompt))
        driver.decode(sequence)
        rows, always, text = driver.draw(1), driver.always(sequence), driver.texts[sequence]
        sure, blocks = [], []
        for layer in range(2):
            blocks.append([always | chosen for chosen in driver.selected(sequence, layer)])
            for head in range(2):
                missing = [block for block in range(1, 19) if block not in blocks[layer][head]]
                block = max(missing, key=lambda number: float(prompt.keys[layer, 4 * number, head].norm()))
                if aim(rows, prompt, layer, head, block):
                    sure.append((layer, slice(None), slice(2 * head, 2 * head + 2)))
                    blocks[layer][head].add(block)
        output = driver.run(Part(sequence, 1, rows=rows))[0]
        driver.texts[sequence] = text
        expected = driver.restricted(sequence, rows, blocks)
        assert len(sure) >= 3
        for own in sure:
            close_to(output[own], expected[own])


def test_a_margin_of_its_own_holds_for_correction():
    with KVManager(SHAPE, tiny(correction_blocks=2, max_new_blocks=0, correction_margin=2.7)) as manager:
        driver = Driver(manager)
        sequence = driver.create(80)
        for _ in range(6):
            driver.decode(sequence)
        assert manager.stats().corrected_blocks == 0


def test_rejected_drafts_of_the_dense_phase_have_no_say_in_the_first_working_set():
    chosen = []
    for seed in (1, 2):
        other = torch.Generator().manual_seed(seed)
        with KVManager(SHAPE, tiny()) as manager:
            driver = Driver(manager)
            sequence = driver.create(34)
            for _ in range(6):
                rows = driver.draw(3)
                rows.queries[:, 1:] = 5 * torch.randn(rows.queries[:, 1:].shape, generator=other)
                driver.run(Part(sequence, 3, 2, 1, rows))
            seen, hook = watch(driver, sequence)
            driver.decode(sequence, before=hook)
            chosen.append(seen)
            assert sequence.phase is Phase.SPARSE
    assert chosen[0] == chosen[1]


def test_the_first_working_set_is_chosen_with_the_scale_of_the_host(monkeypatch):
    with KVManager(SHAPE, tiny()) as manager:
        driver = Driver(manager)
        sequence = driver.create()
        part = Part(sequence, 60, rows=driver.draw(60))
        step = driver.begin(part)
        for layer in range(2):
            step.attend(layer, *(kind[layer] for kind in part.rows), scale=0.7 + layer)
        step.commit()
        scales, score = [], manager.rooms.summary.score
        monkeypatch.setattr(manager.rooms.summary, "score", lambda *given: scales.append(given[-1]) or score(*given))
        step = driver.begin(Part(sequence, 1))
        assert scales == [0.7, 1.7]
        step.abort()
