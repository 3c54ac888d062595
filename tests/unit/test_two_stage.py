import dataclasses

import pytest
import torch

from oasiskv import KVManager
from oasiskv.summaries.bit2 import Bit2
from oasiskv.summaries.transform import Transform
from oasiskv.summaries.two_stage import TwoStage

from . import driver
from .keys import CONFIG, PAGES, SHAPE, build, exact, low_rank

CANDIDATES = 2 * CONFIG.selected_blocks + CONFIG.sink_blocks + CONFIG.ring_blocks


class Fine(Bit2):
    def __init__(self, shape, config):
        super().__init__(shape, config, int4_scales=True)


def three(**kind):
    """The two stages on their own and both together, holding the same keys; and queries `(1, R, Hq, D)` of layer 0."""
    keys, queries = low_rank(**kind)
    return *(build(part, keys, queries) for part in (Transform, Fine, TwoStage)), keys, queries[0][None]


def naive_candidates(logits, listed, heads):
    """Blocks of the most mass over all rows `(R, Hq, N)`, per kv head, in plain sums."""
    group = logits.shape[1] // heads
    result = []
    for head in range(heads):
        mass = dict.fromkeys(listed, 0.0)
        for row in logits[:, head * group : (head + 1) * group].flatten(0, 1).double():
            total = sum(float(row[n].exp()) for n in listed)
            for n in listed:
                mass[n] += float(row[n].exp()) / total
        result.append(set(sorted(listed, key=lambda n: -mass[n])[:CANDIDATES]))
    return result


@pytest.mark.parametrize("rows", [1, 4])
def test_candidates_score_as_the_second_stage_and_others_as_the_first(rows):
    coarse, fine, both, _, queries = three(noise=1.0)
    queries, pages = queries[:, :rows].contiguous(), torch.arange(PAGES)[None]
    first, second = coarse.score(0, queries, pages, 0.25)[0], fine.score(0, queries, pages, 0.25)[0]
    scores = both.score(0, queries, pages, 0.25)[0]
    for row in range(rows):
        chosen = naive_candidates(first[row : row + 1], range(PAGES), SHAPE.kv_heads)
        assert chosen[0] != chosen[1]
        for q in range(SHAPE.query_heads):
            for n in range(PAGES):
                source = second if n in chosen[q // SHAPE.group_size] else first
                torch.testing.assert_close(scores[row, q, n], source[row, q, n], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_the_best_blocks_are_found_at_least_as_well_as_by_the_first_stage(noise):
    coarse, _, both, keys, queries = three(noise=noise)
    pages, group = torch.arange(PAGES)[None], SHAPE.group_size
    found = []
    for summary in (coarse, both):
        count = 0
        for row in range(queries.shape[1]):
            query = queries[:, row : row + 1].contiguous()
            true = exact(keys[0], query[0])[0].softmax(-1).unflatten(0, (-1, group)).sum(1)
            mass = summary.score(0, query, pages, 0.25)[0, 0].softmax(-1).unflatten(0, (-1, group)).sum(1)
            best = [x.topk(CONFIG.selected_blocks, dim=1).indices for x in (true, mass)]
            count += sum(len(set(a) & set(b)) for a, b in zip(*(x.tolist() for x in best), strict=True))
        found.append(count)
    most = queries.shape[1] * SHAPE.kv_heads * CONFIG.selected_blocks
    assert found[0] < found[1] <= most
    assert most - found[1] <= 0.6 * (most - found[0])


def test_padding_takes_no_candidate_from_a_block():
    _, fine, both, _, queries = three(noise=1.0)
    queries = queries[:, :2].contiguous()
    listed = [9, 4, 30, 17, 2, 40, 1, 11, 21, 31, 41, 7, 27][:CANDIDATES]
    assert len(listed) == CANDIDATES
    pages = torch.full((1, 30), -1)
    places = [0, 2, 3, 7, 12, 13, 17, 18, 19, 23, 25, 28, 29]
    pages[0, places] = torch.tensor(listed)
    scores = both.score(0, queries, pages, 0.25)
    torch.testing.assert_close(scores[..., places], fine.score(0, queries, torch.tensor([listed]), 0.25), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_blocks", [1, 3, CANDIDATES])
def test_with_few_blocks_all_are_scored_again(num_blocks):
    _, fine, both, _, queries = three()
    pages = torch.arange(num_blocks)[None]
    torch.testing.assert_close(both.score(0, queries, pages, 0.25), fine.score(0, queries, pages, 0.25), rtol=1e-4, atol=1e-4)


def test_a_sequence_without_blocks_disturbs_no_other():
    _, _, both, _, queries = three()
    pages = torch.stack([torch.full((PAGES,), -1), torch.arange(PAGES)])
    together = both.score(0, queries[:, :4].expand(2, -1, -1, -1).contiguous(), pages, 0.25)
    alone = both.score(0, queries[:, :4].contiguous(), pages[1:], 0.25)
    torch.testing.assert_close(together[1:], alone, rtol=1e-5, atol=1e-5)
    assert together.isfinite().all()


def test_host_memory_is_counted_apart():
    coarse, fine, both, _, _ = three()
    assert both.bytes_per_token == coarse.bytes_per_token == 4.0
    assert both.host_bytes_per_token == fine.bytes_per_token
    assert both.device_bytes() == coarse.device_bytes()
    assert both.host_bytes() == fine.device_bytes()
    device, host = both.device_bytes(), both.host_bytes()
    both.reserve(1000)
    tokens = (1000 - PAGES) * CONFIG.block_size * SHAPE.kv_heads * SHAPE.num_layers
    assert both.host_bytes() - host == both.host_bytes_per_token * tokens
    assert both.device_bytes() - device <= both.bytes_per_token * tokens


def test_at_head_dim_64_the_host_takes_twenty_and_a_half_bytes():
    shape = dataclasses.replace(SHAPE, head_dim=64)
    assert TwoStage(shape, dataclasses.replace(CONFIG, block_size=16, budget_tokens=256)).host_bytes_per_token == 20.5


def test_it_is_fitted_by_the_first_stage():
    keys, queries = low_rank()
    assert not TwoStage(SHAPE, CONFIG).fitted
    assert build(TwoStage, keys, queries).fitted


def test_a_manager_reports_the_device_part_only():
    with KVManager(driver.SHAPE, driver.tiny(summary="transform-bit2")) as manager:
        model = driver.Driver(manager)
        model.decode(model.create(70))
        summary = manager.rooms.summary
        assert summary.host_bytes() > 0
        assert manager.stats().summary_bytes == summary.device_bytes()
