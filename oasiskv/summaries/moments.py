"""First and second moments of keys and queries that do not depend on where a text happened to put them.

Rotary embedding turns plane i of a vector at position p by the angle p * theta_i. Moments of vectors as they come are those of
the positions at which they came, and mislead a code that is used at others. So moments are gathered with the rotation undone,
and put back for positions spread evenly over a range: the mean over all p of a rotated moment has a closed form. Seen as a
complex number z, E[z_a conj(z_b)] is multiplied by the mean of exp(i (theta_a - theta_b) p), and E[z_a z_b] by that of
exp(i (theta_a + theta_b) p): geometric series.
"""

from __future__ import annotations

import torch

from ..types import Rotary


def rotate_moment(moment: torch.Tensor, rotary: Rotary | None, start: int, end: int) -> torch.Tensor:
    """The mean of `E[R v v^T R^T]` over positions `start <= p < end`, for second moments `(..., D, D)` of unrotated `v`."""
    if rotary is None:
        return moment
    angles = torch.tensor(rotary.angles, dtype=torch.float64, device=moment.device)
    planes, size = len(angles), moment.shape[-1]
    first, second, rest = slice(0, planes), slice(planes, 2 * planes), slice(2 * planes, size)
    moment = moment.double()
    m11, m12 = moment[..., first, first], moment[..., first, second]
    m21, m22 = moment[..., second, first], moment[..., second, second]
    same = torch.complex(m11 + m22, m21 - m12) * _mean_turn(angles[:, None] - angles, start, end)
    mirrored = torch.complex(m11 - m22, m21 + m12) * _mean_turn(angles[:, None] + angles, start, end)
    turned = torch.empty_like(moment)
    turned[..., first, first] = (same.real + mirrored.real) / 2
    turned[..., second, second] = (same.real - mirrored.real) / 2
    turned[..., second, first] = (same.imag + mirrored.imag) / 2
    turned[..., first, second] = (mirrored.imag - same.imag) / 2
    still = torch.complex(moment[..., first, rest], moment[..., second, rest]) * _mean_turn(angles, start, end)[:, None]
    turned[..., first, rest], turned[..., second, rest] = still.real, still.imag
    turned[..., rest, first], turned[..., rest, second] = still.real.mT, still.imag.mT
    turned[..., rest, rest] = moment[..., rest, rest]
    scale = _scale(rotary, size, moment.device)
    return turned * scale * scale[:, None]


def rotate_mean(mean: torch.Tensor, rotary: Rotary | None, start: int, end: int) -> torch.Tensor:
    """The mean of `R E[v]` over positions `start <= p < end`, for means `(..., D)` of unrotated vectors."""
    if rotary is None:
        return mean
    angles = torch.tensor(rotary.angles, dtype=torch.float64, device=mean.device)
    planes = len(angles)
    mean = mean.double()
    turned = torch.complex(mean[..., :planes], mean[..., planes : 2 * planes]) * _mean_turn(angles, start, end)
    rotated = torch.cat([turned.real, turned.imag, mean[..., 2 * planes :]], -1)
    return rotated * _scale(rotary, mean.shape[-1], mean.device)


def unrotated(vectors: torch.Tensor, positions: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """`(tokens, heads, head_dim)` at positions `(tokens,)` as they were before rotary embedding, in float32."""
    return vectors.float() if rotary is None else rotary.rotate(vectors, positions, inverse=True)


def _mean_turn(frequency: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """The mean of `exp(i frequency p)` over `start <= p < end`."""
    count = end - start
    step = torch.polar(torch.ones_like(frequency), frequency)
    whole = torch.polar(torch.ones_like(frequency), frequency * count)
    lead = torch.polar(torch.ones_like(frequency), frequency * start)
    gap = 1 - step
    still = gap.abs() < 1e-9
    mean = lead * (1 - whole) / torch.where(still, 1.0, gap) / count
    return torch.where(still, lead, mean)


def _scale(rotary: Rotary, size: int, device: torch.device) -> torch.Tensor:
    scale = torch.ones(size, dtype=torch.float64, device=device)
    scale[: 2 * len(rotary.angles)] = rotary.scaling
    return scale
