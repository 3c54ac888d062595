import itertools

import pytest
import torch

from oasiskv.summaries.quantizer import MAX_BITS, distortions, lloyd_max

MAX_1960_TABLE_I = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}


@pytest.mark.parametrize(("bits", "published"), MAX_1960_TABLE_I.items())
def test_distortion_is_that_of_max_table_one(bits, published):
    assert lloyd_max(bits).distortion == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(("bits", "outermost"), [(1, 0.7980), (2, 1.510), (3, 2.152), (4, 2.733)])
def test_outermost_level_is_that_of_max_table_one(bits, outermost):
    assert float(lloyd_max(bits).levels[-1]) == pytest.approx(outermost, rel=0.01)


@pytest.mark.parametrize("bits", range(1, MAX_BITS + 1))
def test_levels_are_symmetric_and_thresholds_lie_halfway(bits):
    quantizer = lloyd_max(bits)
    assert quantizer.levels.shape == (2**bits,)
    assert (quantizer.levels.diff() > 0).all()
    torch.testing.assert_close(quantizer.levels, -quantizer.levels.flip(0), rtol=0, atol=5e-4)
    torch.testing.assert_close(quantizer.thresholds, (quantizer.levels[1:] + quantizer.levels[:-1]) / 2)


@pytest.mark.parametrize("bits", range(1, MAX_BITS + 1))
def test_distortion_is_what_gaussian_samples_suffer(bits):
    quantizer = lloyd_max(bits)
    samples = torch.randn(200_000)
    error = samples - quantizer.levels[torch.bucketize(samples, quantizer.thresholds)]
    assert float((error * error).mean()) == pytest.approx(quantizer.distortion, rel=0.05)


def test_distortions_start_at_the_variance_and_fall():
    values = distortions()
    assert len(values) == MAX_BITS + 1
    assert values[0] == 1.0
    gains = [a - b for a, b in itertools.pairwise(values)]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > 0
