import math

import pytest
import torch

from oasiskv import ModelShape, OasisConfig, ops
from oasiskv.errors import ConfigError
from oasiskv.summaries.minmax_int4 import MinMaxInt4

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def empty(pages, heads, head_dim):
    return torch.zeros((pages, heads, 2, head_dim // 2), dtype=torch.uint8), torch.zeros(pages, heads, 2, 2).half()


def written(keys, outward=True):
    """What is read back of keys `(n, H, B, D)` on pages `0 .. n - 1`: `(n, H, 2, D)`."""
    codes, ranges = empty(keys.shape[0], keys.shape[1], keys.shape[3])
    pages = torch.arange(keys.shape[0])
    ops.minmax4_write(codes, ranges, pages, keys, outward)
    return ops.minmax4_read(codes, ranges, pages)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize("outward", [True, False])
def test_what_is_read_lies_within_a_step_of_the_bounds(dtype, head_dim, outward):
    torch.manual_seed(head_dim)
    keys = (torch.randn(5, 2, 16, head_dim) * 3 + torch.randn(head_dim) * 5).to(dtype)
    read = written(keys, outward)
    assert read.dtype == torch.float32
    for page in range(5):
        for head in range(2):
            for side in range(2):
                values = [
                    float(f([float(k) for k in keys[page, head, :, d]]))
                    for f in (min, max)[side : side + 1]
                    for d in range(head_dim)
                ]
                step = (max(values) - min(values)) / 15
                for got, true in zip(read[page, head, side].tolist(), values, strict=True):
                    slack = 0.02 * step + 2e-3 * max(map(abs, values))
                    if outward:
                        assert -1e-5 <= (true - got) * (1, -1)[side] <= step + slack
                    else:
                        assert abs(true - got) <= step / 2 + slack


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["plain", "outlier channels", "tiny", "huge", "far from zero", "constant", "zero"])
def test_outward_bounds_hold_every_key(dtype, case):
    torch.manual_seed(1)
    keys = torch.randn(40, 2, 4, 16)
    if case == "outlier channels":
        keys[..., 3] = 300 + keys[..., 3]
        keys[..., 7] *= 50
    if case in ("tiny", "huge", "constant", "zero"):
        keys *= {"tiny": 1e-6, "huge": 1e4, "constant": 0.0, "zero": 0.0}[case]
    if case in ("far from zero", "constant"):
        keys += torch.randn(40, 2, 1, 1) * 100
    keys = keys.to(dtype)
    read, true = written(keys), keys.float()
    assert read.isfinite().all()
    rounding = 1e-6 * true.abs().max()
    assert (read[:, :, :1] <= true + rounding).all()
    assert (read[:, :, 1:] >= true - rounding).all()
    if case in ("constant", "zero"):
        torch.testing.assert_close(read[:, :, 0], true[:, :, 0], rtol=3e-3, atol=2e-6)
        torch.testing.assert_close(read[:, :, 1], true[:, :, 0], rtol=3e-3, atol=2e-6)


def test_keys_beyond_half_precision_give_finite_bounds():
    keys = torch.full((1, 1, 4, 8), 1e30)
    keys[..., 1], keys[..., 2] = -math.inf, math.inf
    assert written(keys).isfinite().all()


def test_codes_are_packed_as_the_layout_says():
    # channel d runs from -d to 2 d, so that codes can be told from each other
    channel = torch.arange(16.0)
    keys = torch.stack([-channel, 2 * channel]).view(1, 1, 2, 16)
    codes, ranges = empty(1, 1, 16)
    ops.minmax4_write(codes, ranges, torch.tensor([0]), keys, False)
    for side, true in enumerate([15 - channel, channel]):
        for byte in range(8):
            value = int(codes[0, 0, side, byte])
            assert (value & 15, value >> 4) == (int(true[byte]), int(true[byte + 8]))
    zero, step = ranges[0, 0, :, 0], ranges[0, 0, :, 1]
    torch.testing.assert_close(zero.float(), torch.tensor([-15.0, 0.0]), rtol=2e-3, atol=1e-6)
    torch.testing.assert_close(step.float(), torch.tensor([1.0, 2.0]), rtol=4e-3, atol=0)


def test_every_pair_of_codes_survives_packing():
    # page p holds, in channel d, code p; in channel d + 2, code (p + d) % 16; channels 4 to 7 set the range
    level = torch.zeros(16, 8)
    for page in range(16):
        level[page] = torch.tensor([page, page, 0, 15, page, page + 1, 15, 0]) % 16
    read = written(level.view(16, 1, 1, 8), outward=False)
    torch.testing.assert_close(read[:, 0, 0].round(), level, rtol=0, atol=0)
    assert torch.equal(read[:, 0, 0], read[:, 0, 1])


def test_rows_are_read_in_the_shape_of_their_table():
    torch.manual_seed(2)
    codes, ranges = empty(5, 2, 8)
    ops.minmax4_write(codes, ranges, torch.tensor([4, 0, 2, 3, 1]), torch.randn(5, 2, 4, 8), True)
    whole = ops.minmax4_read(codes, ranges, torch.arange(5))
    assert torch.equal(ops.minmax4_read(codes, ranges, torch.tensor([[3, 1], [-1, 4]]))[0], whole[[3, 1]])
    slots = torch.tensor([[[5, 8]], [[0, -1]]])
    read = ops.minmax4_read(codes.flatten(0, 1), ranges.flatten(0, 1), slots)
    assert read.shape == (2, 1, 2, 2, 8)
    assert torch.equal(read[0, 0], whole.flatten(0, 1)[[5, 8]])
    assert torch.equal(read[1, 0, 0], whole[0, 0])


def test_writing_leaves_other_pages_alone():
    codes, ranges = empty(4, 1, 8)
    codes.fill_(77), ranges.fill_(5.0)
    ops.minmax4_write(codes, ranges, torch.tensor([2]), torch.randn(1, 1, 4, 8), True)
    assert (codes[[0, 1, 3]] == 77).all()
    assert (ranges[[0, 1, 3]] == 5.0).all()
    assert (ranges[2] != 5.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_the_summary_are_upper_bounds_and_not_far_above_those_of_minmax(dtype):
    torch.manual_seed(3)
    shape = ModelShape(num_layers=1, query_heads=6, kv_heads=2, head_dim=16, dtype=dtype)
    config = OasisConfig(budget_tokens=64, block_size=8, sink_tokens=8, window_tokens=8)
    keys = (3 * torch.randn(6, 2, 8, 16) + 4 * torch.randn(16)).to(dtype)
    queries = torch.randn(2, 4, 6, 16).to(dtype)
    pages = torch.tensor([[5, 0, -1, 2], [1, 1, 4, 3]])
    summary = MinMaxInt4(shape, config)
    summary.reserve(6)
    summary.write(0, torch.arange(6), keys)
    scores = summary.score(0, queries, pages, 0.5).double()
    for s in range(2):
        for n, page in enumerate(pages[s].tolist()):
            if page < 0:
                continue
            for q in range(6):
                block, row = keys[page, q // 3].double(), queries[s, :, q].double()
                most = 0.5 * torch.maximum(row * block.amin(0), row * block.amax(0)).sum(1)
                assert (scores[s, :, q, n] >= (0.5 * row @ block.T).amax(1) - 1e-4).all()
                assert (scores[s, :, q, n] >= most - 1e-4).all()
                step = max(float(bound.max() - bound.min()) for bound in (block.amin(0), block.amax(0))) / 15
                assert (scores[s, :, q, n] <= most + 0.5 * row.abs().sum(1) * (1.05 * step + 0.02)).all()


def test_an_odd_head_dim_is_refused():
    with pytest.raises(ConfigError, match="head_dim is 7"):
        MinMaxInt4(ModelShape(1, 1, 1, 7), OasisConfig())


def test_bytes_per_token_are_those_of_the_allocation():
    summary = MinMaxInt4(ModelShape(num_layers=2, query_heads=4, kv_heads=2, head_dim=64), OasisConfig())
    summary.reserve(100)
    assert summary.bytes_per_token == 4.5
    assert summary.device_bytes() == 4.5 * 100 * 16 * 2 * 2
