import dataclasses

import pytest
import torch

from oasiskv import KVManager, Phase

from .driver import SHAPE, Driver, Part, draw_rows, tiny

PROMPTS = {"dense": 12, "sparse": 66, "long": 90, "late": 0}
SCRIPT = [
    {"dense": (1, 0, 1), "sparse": (5, 4, 2), "late": (50, 0, 50)},
    {"dense": (3, 2, 1), "sparse": (1, 0, 1), "long": (16, 15, 7), "late": (16, 0, 16)},
    {"long": (1, 0, 1), "dense": (1, 0, 1), "late": (1, 0, 1), "sparse": (1, 0, 1)},
    {"sparse": (24, 0, 24), "dense": (4, 3, 4), "late": (2, 1, 1)},
    {"late": (7, 6, 7), "long": (30, 9, 21), "sparse": (2, 0, 2)},
    {"dense": (16, 0, 16), "sparse": (16, 15, 1), "late": (1, 0, 1)},
    {"dense": (9, 8, 3), "long": (3, 2, 2), "sparse": (8, 7, 8), "late": (1, 0, 1)},
]


def script():
    generator = torch.Generator().manual_seed(3)
    steps = [{name: (tokens, 0, tokens)} for name, tokens in PROMPTS.items() if tokens] + SCRIPT
    return [{name: (*sizes, draw_rows(generator, sizes[0])) for name, sizes in step.items()} for step in steps]


def primed(config, scheduler=None):
    """A manager whose summary is fitted already, on one and the same sequence."""
    driver = Driver(KVManager(SHAPE, config, scheduler), seed=8)
    primer = driver.create(120)  # longer than anything to come: a much longer text would fit the summary anew
    driver.decode(primer)
    driver.free(primer)
    return driver


def play(driver, names, steps):
    """Run the named sequences' parts of a script; outputs by step and name."""
    sequences = {name: driver.create() for name in PROMPTS if name in names}
    results = []
    for step in steps:
        present = [name for name in step if name in names]
        if present:
            parts = [Part(sequences[name], *step[name]) for name in present]
            results.append(dict(zip(present, driver.run(*parts), strict=True)))
            driver.check()
    return sequences, results


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"summary": "transform"},
        {"summary": "transform", "correction_blocks": 2, "swap_margin": 0.002},
        {"predictor": "previous", "correction_blocks": 1},
        {"correction_blocks": 2, "swap_margin": 0.1},
        {"predictor": "oracle", "swap_margin": 0.02},
        {"dense_threshold": 80},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()) or "plain",
)
def test_a_mixed_batch_gives_what_each_sequence_gives_alone(changes):
    steps = script()
    together = primed(tiny(**changes))
    sequences, results = play(together, PROMPTS, steps)
    phases = {name: sequence.phase for name, sequence in sequences.items()}
    assert phases["sparse"] is Phase.SPARSE
    for name in PROMPTS:
        alone = primed(tiny(**changes))
        single, own = play(alone, [name], steps)
        assert single[name].phase is phases[name]
        expected = [step[name] for step in results if name in step]
        assert len(own) == len(expected)
        for number, (first, second) in enumerate(zip(expected, (step[name] for step in own), strict=True)):
            assert torch.allclose(first, second, rtol=1e-4, atol=1e-5), f"{name} differs in its step {number}"
        for layer in range(SHAPE.num_layers):
            assert together.selected(sequences[name], layer) == alone.selected(single[name], layer)
        alone.manager.close()
    together.manager.close()


@pytest.mark.parametrize("summary", ["minmax", "transform"])
@pytest.mark.parametrize("workers", [1, 2])
def test_background_threads_change_no_bit(summary, workers):
    steps, outputs = script(), []
    for count in (0, workers):
        driver = primed(tiny(summary=summary, workers=count, correction_blocks=1))
        outputs.append(play(driver, PROMPTS, steps)[1])
        driver.manager.close()
    for inline, threaded in zip(*outputs, strict=True):
        for name, output in inline.items():
            assert torch.equal(output, threaded[name])


def test_background_threads_change_no_bit_over_many_steps():
    outputs, stats = [], []
    for workers in (0, 2):
        driver = primed(tiny(workers=workers, correction_blocks=1))
        first, second = driver.create(70), driver.create(90)
        outputs.append([])
        for number in range(60):
            drafts = number % 4
            outputs[-1].extend(driver.run(Part(first, drafts + 1, drafts, 1), Part(second, 1)))
        driver.check()
        stats.append(driver.manager.stats())
        driver.manager.close()
    assert all(torch.equal(inline, threaded) for inline, threaded in zip(*outputs, strict=True))
    assert dataclasses.replace(stats[0], coverage=0) == dataclasses.replace(stats[1], coverage=0)
    assert stats[0].coverage == pytest.approx(stats[1].coverage, abs=1e-6)


def test_the_order_of_the_sequences_in_a_batch_does_not_matter():
    outputs = []
    for turned in (False, True):
        driver = primed(tiny())
        sequences = [driver.create(tokens) for tokens in (5, 60, 80)]
        rows = [driver.draw(count) for count in (1, 3, 2)]
        parts = [Part(sequence, r.queries.shape[1], rows=r) for sequence, r in zip(sequences, rows, strict=True)]
        outputs.append(driver.run(*reversed(parts))[::-1] if turned else driver.run(*parts))
        driver.manager.close()
    for first, second in zip(*outputs, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_a_batch_of_different_rows_reads_for_each_sequence_what_it_reads_alone():
    outputs, read = [], []
    for together in (True, False):
        driver = primed(tiny(correction_blocks=1, max_new_blocks=0))
        sequences = [driver.create(80), driver.create(100)]
        parts = [Part(sequences[0], 1), Part(sequences[1], 4, 3, 4)]
        for part in parts:
            part.rows = driver.draw(part.tokens)
        before = driver.manager.stats().corrected_blocks
        outputs.append(driver.run(*parts) if together else [driver.run(part)[0] for part in parts])
        read.append(driver.manager.stats().corrected_blocks - before)
        driver.check()
        driver.manager.close()
    for whole, alone in zip(*outputs, strict=True):
        torch.testing.assert_close(whole, alone, rtol=1e-5, atol=1e-6)
    assert read[0] == read[1] > 4
