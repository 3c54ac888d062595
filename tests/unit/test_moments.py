import pytest
import torch

from oasiskv import Rotary
from oasiskv.summaries.moments import rotate_mean, rotate_moment, unrotated


@pytest.mark.parametrize("rotary", [Rotary((1.0, 0.3, 0.01)), Rotary((2.0, 0.5), scaling=1.2), Rotary((0.7,))])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (7, 40), (0, 500)])
def test_moments_are_the_mean_over_all_positions(rotary, start, end):
    torch.manual_seed(0)
    vectors = torch.randn(5, 2, 7)
    turned = torch.stack([rotary.rotate(vectors, torch.full((5,), p)) for p in range(start, end)]).double()
    plain = vectors.double()
    second = torch.einsum("tha,thb->hab", plain, plain) / 5
    expected = torch.einsum("ptha,pthb->hab", turned, turned) / turned[..., 0, 0].numel()
    torch.testing.assert_close(rotate_moment(second, rotary, start, end), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rotate_mean(plain.mean(0), rotary, start, end), turned.mean((0, 1)), rtol=1e-4, atol=1e-5)


def test_without_a_rotation_nothing_turns():
    second, mean = torch.randn(2, 4, 4), torch.randn(2, 4)
    assert rotate_moment(second, None, 0, 9) is second
    assert rotate_mean(mean, None, 0, 9) is mean
    vectors = torch.randn(3, 2, 4).half()
    assert torch.equal(unrotated(vectors, torch.arange(3), None), vectors.float())


def test_a_rotation_is_undone():
    rotary, raw, positions = Rotary((1.0, 0.1), scaling=1.3), torch.randn(6, 2, 5), torch.arange(100, 106)
    torch.testing.assert_close(unrotated(rotary.rotate(raw, positions), positions, rotary), raw)
