"""Conformance kits: subclass one, say which class is meant, and have a test suite of the contract in `oasiskv.abc`.

class TestMine(KeySummaryTests):
    def plugin(self) -> type[KeySummary]:
        return Mine

The kits of tier stores and metadata stores, whose contract is in `oasiskv.tiers.abc`, are here by name, too.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ..abc import KeySample, KeySummary, Predictor
from ..config import OasisConfig
from ..types import ModelShape
from .metadata_kit import MetadataStoreTests
from .tier_kit import TierStoreTests

__all__ = ["FixedIndex", "KeySummaryTests", "MetadataStoreTests", "PredictorTests", "TierStoreTests"]

_SHAPE = ModelShape(num_layers=2, query_heads=6, kv_heads=2, head_dim=16)
_CONFIG = OasisConfig(budget_tokens=64, block_size=4, sink_tokens=4, window_tokens=4, workers=0)
_PAGES = 40
_ROWS = 24
_SCALE = 0.25


class KeySummaryTests:
    """What a `KeySummary` promises. Override `plugin`; `least_correlation` may be raised to what the summary can do."""

    least_correlation = 0.3
    """Mean correlation of scores with the exact block logits, on keys whose variance lies in a few directions."""

    def plugin(self) -> type[KeySummary]:
        """The class under test."""
        raise NotImplementedError("a conformance suite overrides plugin() to return the class under test")

    def make(self, shape: ModelShape = _SHAPE) -> KeySummary:
        """A summary that is fitted and holds `self.keys`, block `n` on page `n`."""
        torch.manual_seed(0)
        rank, heads, dim = 4, shape.kv_heads, shape.head_dim
        basis = torch.linalg.qr(torch.randn(shape.num_layers, heads, dim, dim)).Q[..., :rank]
        topic = torch.randn(shape.num_layers, _PAGES, heads, 1, rank) * 2
        inside = topic + torch.randn(shape.num_layers, _PAGES, heads, _CONFIG.block_size, rank)
        keys = torch.einsum("lnhbr,lhdr->lnhbd", inside, basis)
        self.keys = (keys + 0.2 * torch.randn_like(keys)).to(shape.dtype)
        seen = torch.randn(shape.num_layers, _ROWS, shape.query_heads, rank)
        spread = basis.repeat_interleave(shape.group_size, 1)
        self.queries = torch.einsum("lthr,lhdr->lthd", seen, spread).to(shape.dtype)
        summary = self.plugin()(shape, _CONFIG)
        if not summary.fitted:
            for layer in range(shape.num_layers):
                summary.observe(layer, self.queries[layer], torch.arange(_ROWS))
            flat = self.keys.transpose(1, 2).flatten(2, 3).float()
            summary.fit(KeySample(layer, flat[layer], torch.arange(flat.shape[2])) for layer in range(shape.num_layers))
        summary.reserve(_PAGES)
        for layer in range(shape.num_layers):
            summary.write(layer, torch.arange(_PAGES), self.keys[layer])
        return summary

    def batch(self, layer: int = 0) -> torch.Tensor:
        """Some of `self.queries` as two sequences of three rows."""
        return self.queries[layer, :6].view(2, 3, *self.queries.shape[2:])

    def score(self, summary: KeySummary, layer: int = 0, pages: torch.Tensor | None = None) -> torch.Tensor:
        """Scores of two sequences, `(2, 3, query_heads, num_blocks)`; by default both list all pages."""
        queries = self.batch(layer)
        pages = torch.arange(_PAGES).expand(2, -1) if pages is None else pages
        return summary.score(layer, queries, pages, _SCALE)

    def test_it_is_a_summary_that_can_be_fitted(self) -> None:
        """`fitted` turns true by `fit` at the latest."""
        assert issubclass(self.plugin(), KeySummary)
        assert self.make().fitted

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_scores_are_finite_float32_of_the_promised_shape(self, dtype: torch.dtype) -> None:
        """For keys and queries of every dtype."""
        scores = self.score(self.make(dataclasses.replace(_SHAPE, dtype=dtype)))
        assert scores.shape == (2, 3, _SHAPE.query_heads, _PAGES)
        assert scores.dtype == torch.float32
        assert scores.isfinite().all()

    @pytest.mark.parametrize(("query_heads", "kv_heads"), [(1, 1), (4, 4), (8, 1)])
    def test_every_grouping_of_heads(self, query_heads: int, kv_heads: int) -> None:
        """Multi-head, grouped and multi-query attention alike."""
        scores = self.score(self.make(dataclasses.replace(_SHAPE, query_heads=query_heads, kv_heads=kv_heads)))
        assert scores.shape == (2, 3, query_heads, _PAGES)

    def test_padding_pages_are_ignored(self) -> None:
        """Entries below 0 change no score of another block."""
        summary = self.make()
        pages = torch.tensor([[3, 7, -1, 1], [-1, 9, 2, -1]])
        scores, whole = self.score(summary, pages=pages), self.score(summary)
        for number, row in enumerate(pages.tolist()):
            for column, page in enumerate(row):
                if page >= 0:
                    torch.testing.assert_close(scores[number, ..., column], whole[number, ..., page], rtol=1e-4, atol=1e-4)

    def test_pages_are_independent(self) -> None:
        """Writing a page changes its own scores, and no other page's; each layer has its own."""
        summary = self.make()
        before, other = self.score(summary), self.score(summary, layer=1)
        summary.write(0, torch.tensor([5]), 3 * self.keys[0, 6:7])
        after = self.score(summary)
        rest = [page for page in range(_PAGES) if page != 5]
        assert torch.equal(after[..., rest], before[..., rest])
        assert not torch.allclose(after[..., 5], before[..., 5])
        assert torch.equal(self.score(summary, layer=1), other)

    def test_a_page_written_anew_forgets_what_it_held(self) -> None:
        """Freed pages are written again, in any order and number."""
        summary = self.make()
        first = self.score(summary)
        summary.write(0, torch.tensor([5, 2, 9]), 3 * self.keys[0, 20:23])
        summary.write(0, torch.tensor([9, 5, 2]), self.keys[0, [9, 5, 2]])
        torch.testing.assert_close(self.score(summary), first, rtol=1e-5, atol=1e-5)

    def test_blocks_with_the_same_keys_score_alike_on_any_page(self) -> None:
        """A page is an address and nothing else."""
        summary = self.make()
        summary.write(0, torch.tensor([11]), self.keys[0, 4:5])
        scores = self.score(summary)
        torch.testing.assert_close(scores[..., 11], scores[..., 4], rtol=1e-4, atol=1e-4)

    def test_sequences_and_rows_are_scored_on_their_own(self) -> None:
        """A batch gives what its parts give."""
        summary = self.make()
        queries = self.batch()
        pages = torch.stack([torch.arange(10), torch.arange(20, 30)])
        whole = summary.score(0, queries, pages, _SCALE)
        for number in range(2):
            for row in range(3):
                one = queries[number : number + 1, row : row + 1].contiguous()
                alone = summary.score(0, one, pages[number : number + 1], _SCALE)
                torch.testing.assert_close(alone[0, 0], whole[number, row], rtol=1e-4, atol=1e-4)

    def test_reserving_keeps_what_is_written(self) -> None:
        """More pages, and fewer than there are, which is no order to forget."""
        summary = self.make()
        before = self.score(summary)
        for pages in (_PAGES + 1, 1, 4 * _PAGES):
            summary.reserve(pages)
            assert torch.equal(self.score(summary), before)
        summary.write(0, torch.tensor([4 * _PAGES - 1]), self.keys[0, :1])
        last = self.score(summary, pages=torch.full((2, 1), 4 * _PAGES - 1))
        torch.testing.assert_close(last[..., 0], before[..., 0], rtol=1e-4, atol=1e-4)

    def test_device_bytes_grow_as_bytes_per_token_says(self) -> None:
        """Counted from the allocations, over a growth that dwarfs constant overheads and slack."""
        summary = self.make()
        before = summary.device_bytes()
        summary.reserve(100 * _PAGES)
        tokens = 99 * _PAGES * _CONFIG.block_size * _SHAPE.kv_heads * _SHAPE.num_layers
        assert before > 0
        assert 0.8 <= (summary.device_bytes() - before) / tokens / summary.bytes_per_token <= 1.2

    def test_scoring_changes_nothing(self) -> None:
        """Neither its arguments nor the summary."""
        summary = self.make()
        queries = self.batch().clone()
        first = self.score(summary)
        assert torch.equal(self.score(summary), first)
        assert torch.equal(self.batch(), queries)

    def test_scores_rank_blocks_better_than_chance(self) -> None:
        """By correlation with the exact block logits, for queries that the fit has seen and others of their kind."""
        summary = self.make()
        scores = summary.score(0, self.queries[0][None], torch.arange(_PAGES)[None], _SCALE)[0].double()
        keys = self.keys[0].double().repeat_interleave(_SHAPE.group_size, 1)
        exact = torch.einsum("rhd,nhbd->rhnb", self.queries[0].double(), keys).mul(_SCALE).logsumexp(-1)
        scores, exact = scores - scores.mean(-1, keepdim=True), exact - exact.mean(-1, keepdim=True)
        correlation = (scores * exact).sum(-1) / (scores.norm(dim=-1) * exact.norm(dim=-1)).clamp(min=1e-9)
        assert float(correlation.mean()) >= self.least_correlation


class FixedIndex:
    """A `BlockIndex` over random keys, `(num_sequences, num_blocks, block_size, kv_heads, head_dim)`; both masses are exact."""

    def __init__(self, keys: torch.Tensor) -> None:
        self._keys = keys

    def summary_mass(self, queries: torch.Tensor) -> torch.Tensor:
        """Softmax over blocks, summed over each group."""
        grouped = queries.view(*queries.shape[:2], self._keys.shape[3], -1, queries.shape[3])
        logits = torch.einsum("srhgd,snbhd->srhgnb", grouped, self._keys).logsumexp(-1)
        return logits.softmax(-1).sum(3)

    def exact_mass(self, queries: torch.Tensor) -> torch.Tensor:
        """The same."""
        return self.summary_mass(queries)


class PredictorTests:
    """What a `Predictor` promises. Override `plugin`."""

    accepted = torch.tensor([1, 2, 4])

    follows_queries = True
    """Whether what was accepted last changes the scores; a static choice overrides it with False."""

    def plugin(self) -> type[Predictor]:
        """The class under test."""
        raise NotImplementedError("a conformance suite overrides plugin() to return the class under test")

    def make(self) -> Predictor:
        """A predictor with three rows of its own tables, and queries and keys for it."""
        torch.manual_seed(0)
        self.queries = torch.randn(3, 4, _SHAPE.query_heads, _SHAPE.head_dim)
        self.keys = torch.randn(3, 9, _CONFIG.block_size, _SHAPE.kv_heads, _SHAPE.head_dim)
        return self.make_again()

    def make_again(self) -> Predictor:
        """A new predictor for the same queries and keys: it has learnt nothing."""
        predictor = self.plugin()(_SHAPE, _CONFIG)
        predictor.reserve_rows(3)
        for row in range(3):
            predictor.clear_row(row)
        return predictor

    def aggregate(self, predictor: Predictor, mass: torch.Tensor, only: slice = slice(None)) -> torch.Tensor:
        """The scores when the first `accepted` rows of each sequence stay."""
        kept = self.accepted[only].clamp(max=mass.shape[1])
        weights = (torch.arange(mass.shape[1]) < kept[:, None]).float()
        return predictor.aggregate(0, mass, weights, torch.arange(3)[only])

    def score(self, predictor: Predictor, only: slice = slice(None), rows: int = 4) -> torch.Tensor:
        """Row masses of some of the three sequences."""
        return predictor.score(0, self.queries[only, :rows].contiguous(), FixedIndex(self.keys[only]))

    def test_row_masses_have_the_promised_shape_and_are_finite(self) -> None:
        """`(num_sequences, num_rows, kv_heads, num_blocks)`."""
        mass = self.score(self.make())
        assert mass.shape == (3, 4, _SHAPE.kv_heads, 9)
        assert mass.isfinite().all()

    @pytest.mark.parametrize("rows", [1, 4])
    def test_aggregates_have_the_promised_shape_and_are_masses(self, rows: int) -> None:
        """`(num_sequences, kv_heads, num_blocks)`, at least 0, and at most the group size over all blocks."""
        predictor = self.make()
        result = self.aggregate(predictor, self.score(predictor, rows=rows))
        assert result.shape == (3, _SHAPE.kv_heads, 9)
        assert result.is_floating_point()
        assert result.isfinite().all()
        assert (result >= 0).all()
        assert (result.sum(2) <= _SHAPE.group_size + 1e-4).all()

    def test_rejected_rows_change_nothing(self) -> None:
        """Their queries belong to a text that was not written."""
        predictor = self.make()
        before = self.aggregate(predictor, self.score(predictor))
        for number, kept in enumerate(self.accepted.tolist()):
            self.queries[number, kept:] = 5 * torch.randn_like(self.queries[number, kept:])
        predictor = self.make_again()
        after = self.aggregate(predictor, self.score(predictor))
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)

    def test_accepted_rows_count(self) -> None:
        """What was accepted last says something about what comes next."""
        predictor = self.make()
        before = self.aggregate(predictor, self.score(predictor))
        for number, kept in enumerate(self.accepted.tolist()):
            self.queries[number, kept - 1] *= -3
        predictor = self.make_again()
        after = self.aggregate(predictor, self.score(predictor))
        assert torch.allclose(after, before, rtol=1e-3) != self.follows_queries

    def test_sequences_are_scored_on_their_own(self) -> None:
        """A batch gives what its parts give."""
        predictor = self.make()
        whole = self.aggregate(predictor, self.score(predictor))
        for number in range(3):
            only = slice(number, number + 1)
            predictor = self.make_again()
            alone = self.aggregate(predictor, self.score(predictor, only), only)
            torch.testing.assert_close(alone[0], whole[number], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("rows", [1, 3])
    def test_it_chooses_a_first_working_set(self, rows: int) -> None:
        """`begin` gives scores of the promised shape for each sequence, by the last rows of its prompt."""
        predictor = self.make()
        mass = self.score(predictor, rows=rows)
        for number in range(3):
            first = predictor.begin(0, mass[number : number + 1], torch.tensor([number]))
            assert first.shape == (1, _SHAPE.kv_heads, 9)
            assert first.isfinite().all()
            assert (first >= 0).all()
            assert (first.sum(2) <= _SHAPE.group_size + 1e-4).all()
        assert predictor.prompt_rows >= 1

    def test_sequences_may_grow(self) -> None:
        """More blocks from step to step."""
        predictor = self.make()
        for blocks in (4, 5, 9):
            index = FixedIndex(self.keys[:, :blocks])
            result = self.aggregate(predictor, predictor.score(0, self.queries, index))
            assert result.shape == (3, _SHAPE.kv_heads, blocks)

    def test_arguments_are_not_changed(self) -> None:
        """Queries and masses belong to the step."""
        predictor = self.make()
        queries, mass = self.queries.clone(), self.score(predictor)
        before = mass.clone()
        self.aggregate(predictor, mass)
        assert torch.equal(mass, before)
        assert torch.equal(self.queries, queries)

    def test_tables_per_sequence_follow_the_manager(self) -> None:
        """Rows are reserved, cleared and copied by number, and their bytes counted."""
        predictor = self.make()
        predictor.reserve_rows(5)
        predictor.clear_row(4)
        predictor.copy_row(1, 4)
        assert predictor.device_bytes() >= 0
