"""How rows of a step weigh: drafts by how likely they are to stay."""

import pytest
import torch

from oasiskv import KVManager, Sequence
from oasiskv.ops.reference_step import need_over_rows
from oasiskv.predictors.lookahead import likely_rows, mean_over_rows

from .driver import SHAPE, Driver, tiny


def test_acceptance_follows_what_is_accepted():
    sequence = Sequence(0)
    assert sequence.acceptance == 0.5
    sequence.learn_acceptance(4, 4)
    assert sequence.acceptance == pytest.approx(0.6)
    sequence.learn_acceptance(0, 4)
    assert sequence.acceptance == pytest.approx(0.48)
    sequence.learn_acceptance(1, 4)  # one of the two that were decided
    assert sequence.acceptance == pytest.approx(0.48 + 0.2 * 0.02)
    for _ in range(60):
        sequence.learn_acceptance(4, 4)
    assert 0.99 < sequence.acceptance <= 1.0


def test_a_manager_learns_the_acceptance_of_each_sequence():
    with KVManager(SHAPE, tiny()) as manager:
        driver = Driver(manager)
        lucky, unlucky, plain = driver.create(60), driver.create(60), driver.create(60)
        for _ in range(10):
            driver.decode(lucky, 4, 3, 4)
            driver.decode(unlucky, 4, 3, 1)
            driver.decode(plain)
        assert lucky.acceptance > 0.9
        assert unlucky.acceptance < 0.1
        assert plain.acceptance == 0.5
        assert driver.fork(lucky).acceptance == lucky.acceptance


def test_the_expected_weights_of_a_step():
    with KVManager(SHAPE, tiny()) as manager:
        driver = Driver(manager)
        first, second = driver.create(60), driver.create(60)
        first.acceptance, second.acceptance = 0.8, 0.3
        step = manager.begin_step([first, second], [4, 2], [2, 1])
        torch.testing.assert_close(step._decode._expected, torch.tensor([[1.0, 1.0, 0.8, 0.64], [1.0, 0.3, 0.0, 0.0]]))
        step.abort()


def test_only_likely_rows_choose_the_working_set():
    weights = torch.tensor([[1.0, 0.8, 0.64, 0.49], [1.0, 0.3, 0.0, 0.0]])
    assert torch.equal(likely_rows(weights), torch.tensor([[1.0, 0.8, 0.64, 0.0], [1.0, 0.0, 0.0, 0.0]]))
    mass = torch.rand(2, 4, 2, 5)
    mean = mean_over_rows(mass, likely_rows(weights))
    torch.testing.assert_close(mean[1], mass[1, 0])
    torch.testing.assert_close(mean[0], (mass[0, 0] + 0.8 * mass[0, 1] + 0.64 * mass[0, 2]) / 2.44)


def test_the_need_of_any_row_counts_and_a_read_for_several_tokens_is_cheaper():
    mass = torch.tensor([[[[0.1, 0.4]], [[0.3, 0.0]]]])
    torch.testing.assert_close(need_over_rows(mass, torch.tensor([[1.0, 1.0]])), torch.tensor([[[0.3, 0.4]]]) * 2**0.5)
    torch.testing.assert_close(need_over_rows(mass, torch.tensor([[1.0, 0.0]])), torch.tensor([[[0.1, 0.4]]]))
    assert torch.equal(need_over_rows(mass[:, :1], torch.tensor([[1.0]])), mass[:, 0])
