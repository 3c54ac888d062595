import pytest
import torch

from oasiskv import ModelShape, OasisConfig, ops
from oasiskv.errors import ConfigError
from oasiskv.summaries.bit2 import Bit2

from . import naive

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def nearest_levels(block, low, high):
    """`(B, D)` keys, each replaced by the nearest of the four levels of its channel, by trying them all."""
    levels = torch.stack([low + i * (high - low) / 3 for i in range(4)])
    distance = (block[None] - levels[:, None]).abs()
    return levels.gather(0, distance.argmin(0))


def build(keys, dtype=torch.float32, *, group=1, int4=False, pages=None):
    """A summary of keys `(n, H, B, D)` in its only layer."""
    count, heads, block_size, head_dim = keys.shape
    config = OasisConfig(budget_tokens=16 * block_size, block_size=block_size, sink_tokens=4, window_tokens=4)
    summary = Bit2(ModelShape(1, group * heads, heads, head_dim, dtype=dtype), config, int4_scales=int4)
    summary.reserve(count)
    summary.write(0, torch.arange(count) if pages is None else pages, keys)
    return summary


def expected_scores(keys, bounds, queries, pages, scale):
    """Block logits of keys `(n, H, B, D)` replaced by the nearest levels between `bounds` `(n, H, 2, D)`."""
    near = [
        torch.stack([nearest_levels(block.double(), *bound.double()) for block, bound in zip(*page, strict=True)])
        for page in zip(keys, bounds, strict=True)
    ]
    return naive.block_logits(queries, [[near[p] if p >= 0 else None for p in row] for row in pages.tolist()], scale)


PAGES = torch.tensor([[3, 0, 5, 1], [0, 3, 4, -1]])
ORDER = torch.tensor([4, 2, 0, 5, 1, 3])


def assert_agrees(logits, expected):
    assert logits.dtype == torch.float32
    real = (PAGES >= 0)[:, None, None].expand(expected.shape)
    torch.testing.assert_close(logits[real].double(), expected[real], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize(("block_size", "group", "rows"), [(4, 1, 1), (4, 3, 4), (16, 8, 2)])
def test_blocks_score_as_the_nearest_levels_of_their_keys(dtype, head_dim, block_size, group, rows):
    torch.manual_seed(head_dim + rows)
    low = 3 * torch.randn(6, 2, 1, head_dim)
    bounds = torch.cat([low, low + 4 * torch.rand(6, 2, 1, head_dim) + 0.5], dim=2)
    # inside the bounds and a little outside, and never halfway between two levels, where either may be taken
    place = torch.randint(0, 4, (6, 2, block_size, head_dim)) + 0.8 * (torch.rand(6, 2, block_size, head_dim) - 0.5)
    keys = (low + place * (bounds[:, :, 1:] - low) / 3).to(dtype)
    queries = torch.randn(2, rows, 2 * group, head_dim).to(dtype)
    codes = torch.zeros(6, 2, block_size, head_dim // 4, dtype=torch.uint8)
    ops.bit2_write(codes, ORDER, keys, bounds)
    slots = ORDER[PAGES.clamp(min=0)][:, None] * 2 + torch.arange(2)[:, None]
    slots = torch.where(PAGES[:, None] < 0, -1, slots)
    taken = bounds[PAGES.clamp(min=0)].transpose(1, 2)
    logits = ops.bit2_score(codes.flatten(0, 1), slots, taken, queries, head_dim**-0.5)
    assert_agrees(logits, expected_scores(keys, bounds, queries, PAGES, head_dim**-0.5))


@pytest.mark.parametrize(("group", "rows"), [(1, 1), (3, 4)])
@pytest.mark.parametrize("int4", [False, True])
def test_the_levels_of_the_summary_span_the_bounds_of_a_block(group, rows, int4):
    torch.manual_seed(rows)
    keys, queries = 2 * torch.randn(6, 2, 8, 16) + 3 * torch.randn(16), torch.randn(2, rows, 2 * group, 16)
    bounds = torch.stack([keys.amin(2), keys.amax(2)], 2).half()
    if int4:
        codes, ranges = torch.zeros(6, 2, 2, 8, dtype=torch.uint8), torch.zeros(6, 2, 2, 2).half()
        ops.minmax4_write(codes, ranges, torch.arange(6), keys, False)
        bounds = ops.minmax4_read(codes, ranges, torch.arange(6))
        bounds[:, :, 1] = torch.maximum(bounds[:, :, 0], bounds[:, :, 1])
    summary = build(keys, group=group, int4=int4, pages=ORDER)
    logits = summary.score(0, queries, torch.where(PAGES >= 0, ORDER[PAGES.clamp(min=0)], -1), 0.25)
    assert_agrees(logits, expected_scores(keys, bounds, queries, PAGES, 0.25))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("case", ["one token per block alike", "all alike", "zero", "tiny", "huge"])
def test_degenerate_blocks_score_finitely_and_right(dtype, int4, case):
    torch.manual_seed(0)
    keys = torch.randn(3, 2, 4, 8)
    if case == "one token per block alike":
        keys[..., :3] = keys[:, :, :1, :3]
    if case == "all alike":
        keys = keys[:, :1, :1, :1].expand(3, 2, 4, 8)
    keys = (keys * {"zero": 0.0, "tiny": 1e-6, "huge": 1e4}.get(case, 1.0)).to(dtype)
    queries = torch.randn(1, 2, 2, 8).to(dtype)
    scores = build(keys, dtype, int4=int4).score(0, queries, torch.arange(3)[None], 0.5)
    assert scores.isfinite().all()
    if case in ("all alike", "zero", "tiny"):
        exact = naive.block_logits(queries, [list(keys)], 0.5)
        torch.testing.assert_close(scores.double(), exact, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("int4", [False, True])
def test_keys_beyond_half_precision_score_finitely(int4):
    keys = torch.randn(1, 1, 4, 8) * 1e30
    scores = build(keys, int4=int4).score(0, torch.randn(1, 1, 1, 8), torch.tensor([[0]]), 0.5)
    assert scores.isfinite().all()


def test_codes_are_packed_as_the_layout_says():
    # in channel d, token t lies on level (t + d) % 4 between d and d + 3
    token, channel = torch.arange(4)[:, None], torch.arange(8)
    level = (token + channel) % 4
    codes = torch.zeros(1, 1, 4, 2, dtype=torch.uint8)
    bounds = torch.stack([channel, channel + 3]).float().view(1, 1, 2, 8)
    ops.bit2_write(codes, torch.tensor([0]), (level + channel).float().view(1, 1, 4, 8), bounds)
    for t in range(4):
        for byte in range(2):
            value = int(codes[0, 0, t, byte])
            assert [(value >> 2 * i) & 3 for i in range(4)] == [int(level[t, byte + 2 * i]) for i in range(4)]


def test_every_byte_survives_packing():
    value = torch.arange(256)
    level = torch.stack([(value >> 2 * i) & 3 for i in range(4)], 1)
    bounds = torch.tensor([[0.0], [3.0]]).expand(64, 1, 2, 4)
    codes = torch.zeros(64, 1, 4, 1, dtype=torch.uint8)
    ops.bit2_write(codes, torch.arange(64), level.view(64, 1, 4, 4).float(), bounds)
    assert torch.equal(codes.flatten(), value.to(torch.uint8))
    slots = torch.arange(64)[None, None]
    scores = torch.stack(
        [
            ops.bit2_score(codes.view(64, 4, 1), slots, bounds.view(1, 1, 64, 2, 4), q.view(1, 1, 1, 4), 1.0)
            for q in torch.eye(4)
        ]
    )
    torch.testing.assert_close(scores.view(4, 64), level.view(64, 4, 4).float().logsumexp(1).T)


def test_bounds_that_were_rounded_past_each_other_mean_the_lower_one():
    codes = torch.zeros(1, 1, 2, 1, dtype=torch.uint8)
    bounds = torch.tensor([[1.0] * 4, [0.5] * 4]).view(1, 1, 2, 4)
    ops.bit2_write(codes, torch.tensor([0]), torch.full((1, 1, 2, 4), 0.75), bounds)
    score = ops.bit2_score(
        codes.view(1, 2, 1), torch.zeros(1, 1, 1, dtype=torch.int64), bounds[:, :, None], torch.ones(1, 1, 1, 4), 1.0
    )
    torch.testing.assert_close(score.flatten(), torch.tensor([4.0, 4.0]).logsumexp(0)[None])


def test_writing_leaves_other_pages_alone():
    codes = torch.full((4, 1, 4, 2), 77, dtype=torch.uint8)
    keys = torch.randn(1, 1, 4, 8)
    ops.bit2_write(codes, torch.tensor([2]), keys, torch.stack([keys.amin(2), keys.amax(2)], 2))
    assert (codes[[0, 1, 3]] == 77).all()
    assert (codes[2] != 77).any()


@pytest.mark.parametrize("int4", [False, True])
def test_heads_may_list_pages_of_their_own(int4):
    torch.manual_seed(4)
    summary = build(torch.randn(6, 2, 4, 8), group=2, int4=int4)
    queries = torch.randn(2, 3, 4, 8)
    pages = torch.tensor([[[5, 0, 2], [1, 1, -1]], [[3, 4, 0], [2, 5, 3]]])
    whole = summary.score(0, queries, torch.arange(6).expand(2, -1), 0.5)
    scores = summary.score_per_head(0, queries, pages, 0.5)
    for s in range(2):
        for q in range(4):
            for n, page in enumerate(pages[s, q // 2].tolist()):
                if page >= 0:
                    torch.testing.assert_close(scores[s, :, q, n], whole[s, :, q, page], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("int4", "expected"), [(False, 32.0), (True, 20.5)])
def test_bytes_per_token_are_those_of_the_allocation(int4, expected):
    shape = ModelShape(num_layers=2, query_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    summary = Bit2(shape, OasisConfig(), int4_scales=int4)
    summary.reserve(100)
    assert summary.bytes_per_token == expected
    assert summary.device_bytes() == expected * 100 * 16 * 2 * 2


def test_a_head_dim_that_does_not_fill_bytes_is_refused():
    with pytest.raises(ConfigError, match="head_dim is 6"):
        Bit2(ModelShape(1, 1, 1, 6), OasisConfig())
