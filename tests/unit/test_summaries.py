import dataclasses

import pytest
import torch

from oasiskv.abc import KeySample
from oasiskv.summaries.growing import grown
from oasiskv.summaries.minmax import MinMax
from oasiskv.summaries.transform import Transform
from oasiskv.types import Rotary

from .keys import CONFIG, PAGES, SHAPE, build, correlation, exact, low_rank


def scores(summary, layer, queries, pages=None):
    pages = torch.arange(PAGES)[None] if pages is None else pages
    return summary.score(layer, queries[None], pages, 0.25)[0]


def test_transform_ranks_blocks_nearly_like_the_keys_and_far_better_than_bounds():
    keys, queries = low_rank()
    transform, bounds = build(Transform, keys, queries), build(MinMax, keys, queries)
    fresh = queries[:, -8:]
    for layer in range(SHAPE.num_layers):
        truth = exact(keys[layer], fresh[layer])
        good = correlation(scores(transform, layer, fresh[layer]), truth)
        plain = correlation(scores(bounds, layer, fresh[layer]), truth)
        assert good > 0.97
        assert 1 - good < 0.5 * (1 - plain)


def test_transform_estimates_the_logits_themselves():
    keys, queries = low_rank(noise=0.05)
    summary = build(Transform, keys, queries)
    error = scores(summary, 0, queries[0]).double() - exact(keys[0], queries[0])
    assert float(error.abs().mean()) < 0.25 * float(exact(keys[0], queries[0]).std())


def test_transform_spends_its_bits_where_queries_look():
    keys, queries = low_rank(rank=16, noise=0.0)
    blind = queries.clone()
    blind[..., 8:] = 0.0
    seeing = build(Transform, keys, blind)
    everywhere = build(Transform, keys, queries)
    truth = exact(keys[0], blind[0])
    assert correlation(scores(seeing, 0, blind[0]), truth) > correlation(scores(everywhere, 0, blind[0]), truth)


def test_fast_rotary_planes_count_less():
    torch.manual_seed(2)
    rotary = Rotary(tuple([1.0] * 4 + [0.0] * 4))
    keys, queries = low_rank(rank=16, noise=0.0)
    fast = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])
    slow = torch.tensor([4, 5, 6, 7, 12, 13, 14, 15])

    def error(shape, part):
        kind = type("Rotating", (Transform,), {"__init__": lambda self, _, config: Transform.__init__(self, shape, config)})
        only = torch.zeros_like(queries[0])
        only[..., part] = queries[0][..., part]
        return 1 - correlation(scores(build(kind, keys, queries), 0, only), exact(keys[0], only))

    turning = dataclasses.replace(SHAPE, rotary=rotary)
    assert error(turning, slow) < error(SHAPE, slow)
    assert error(turning, fast) > error(SHAPE, fast)


@pytest.mark.parametrize("kind", [Transform, MinMax])
def test_bytes_per_token_are_those_of_the_allocation(kind):
    keys, queries = low_rank()
    summary = build(kind, keys, queries)
    before = summary.device_bytes()
    summary.reserve(1000)
    tokens = (1000 - PAGES) * CONFIG.block_size * SHAPE.kv_heads * SHAPE.num_layers
    measured = (summary.device_bytes() - before) / tokens
    assert measured <= summary.bytes_per_token
    assert measured >= 0.9 * summary.bytes_per_token


@pytest.mark.parametrize(("head_dim", "expected"), [(16, 4.0), (64, 4.0), (128, 8.0), (256, 16.0)])
def test_transform_takes_a_64th_of_fp16_keys_and_values(head_dim, expected):
    shape = dataclasses.replace(SHAPE, head_dim=head_dim)
    assert Transform(shape, CONFIG).bytes_per_token == expected
    if head_dim >= 64:
        assert expected == shape.slot_bytes(1) / shape.dtype.itemsize * 2 / 64


def test_minmax_takes_two_rows_per_block():
    assert MinMax(SHAPE, CONFIG).bytes_per_token == 2 * 16 * 4 / 4


@pytest.mark.parametrize("kind", [Transform, MinMax])
def test_writing_twice_changes_nothing(kind):
    keys, queries = low_rank()
    summary = build(kind, keys, queries)
    first = scores(summary, 1, queries[1])
    summary.write(1, torch.arange(PAGES), keys[1])
    assert torch.equal(scores(summary, 1, queries[1]), first)


@pytest.mark.parametrize("kind", [Transform, MinMax])
def test_growing_keeps_the_content(kind):
    keys, queries = low_rank()
    summary = build(kind, keys, queries)
    first = scores(summary, 0, queries[0])
    for pages in (PAGES + 1, 10, 500):
        summary.reserve(pages)
        assert torch.equal(scores(summary, 0, queries[0]), first)
    summary.write(0, torch.tensor([499]), keys[0, :1])
    last = scores(summary, 0, queries[0], torch.tensor([[499]]))
    torch.testing.assert_close(last[..., 0], first[..., 0], rtol=1e-5, atol=1e-5)


def test_transform_is_fitted_by_fit_alone():
    keys, queries = low_rank()
    summary = Transform(SHAPE, CONFIG)
    summary.observe(0, queries[0], torch.arange(40))
    assert not summary.fitted
    summary.fit(
        KeySample(layer, keys[layer].transpose(0, 1).flatten(1, 2), torch.arange(keys[layer].shape[0] * keys[layer].shape[2]))
        for layer in range(SHAPE.num_layers)
    )
    assert summary.fitted
    assert MinMax(SHAPE, CONFIG).fitted


@pytest.mark.parametrize("case", ["constant keys", "few keys", "no queries seen", "one direction"])
def test_transform_fits_degenerate_samples(case):
    keys, queries = low_rank(num_pages=2 if case == "few keys" else PAGES)
    if case == "constant keys":
        keys = torch.ones_like(keys)
    if case == "no queries seen":
        queries = torch.zeros_like(queries)
    if case == "one direction":
        keys, queries = keys[..., :1].expand_as(keys).contiguous(), queries[..., :1].expand_as(queries).contiguous()
    summary = build(Transform, keys, queries)
    pages = torch.arange(keys.shape[1])[None]
    assert scores(summary, 0, torch.randn(3, 4, 16), pages).isfinite().all()


def test_later_queries_weigh_more_in_the_metric():
    keys, queries = low_rank(rank=16, noise=0.0)
    early, late = queries[0].clone(), queries[0].clone()
    early[..., 8:], late[..., :8] = 0.0, 0.0

    def error(first, second, probe):
        summary = build(Transform, keys, torch.cat([first, second]).expand(2, -1, -1, -1))
        return 1 - correlation(scores(summary, 0, probe), exact(keys[0], probe))

    assert error(early, late, late) < error(late, early, late)


def test_grown_returns_the_tensor_itself_while_it_is_long_enough():
    tensor = torch.arange(6.0).view(3, 2)
    assert grown(tensor, 3) is tensor
    assert grown(tensor, 1) is tensor


def test_grown_copies_and_fills_with_zeros():
    tensor = torch.arange(1.0, 7.0).view(3, 2)
    longer = grown(tensor, 9)
    assert longer.shape == (9, 2)
    assert torch.equal(longer[:3], tensor)
    assert (longer[3:] == 0).all()
    assert grown(tensor.new_zeros((0, 2)), 5).shape == (5, 2)


def test_grown_takes_an_eighth_more_so_that_steps_of_one_copy_rarely():
    tensor, copies = torch.zeros(64, 1), 0
    for rows in range(65, 256):
        longer = grown(tensor, rows)
        copies += longer is not tensor
        tensor = longer
    assert copies < 16
    assert tensor.shape[0] < 256 * 1.125
