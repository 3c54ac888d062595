"""A conformance kit is worth what it refuses: each plug-in here breaks one promise, and the test of it must notice."""

import pytest
import torch

from oasiskv.predictors.lookahead import Lookahead
from oasiskv.summaries.minmax import MinMax
from oasiskv.testing.kits import KeySummaryTests, PredictorTests


class Deaf(MinMax):
    def score(self, layer, queries, pages, scale):
        generator = torch.Generator().manual_seed(1)
        return torch.rand(super().score(layer, queries, pages, scale).shape, generator=generator)


class Forgetful(MinMax):
    def reserve(self, num_pages):
        super().reserve(num_pages)
        self._bounds = [torch.zeros_like(bounds) for bounds in self._bounds]


class Blurred(MinMax):
    def score(self, layer, queries, pages, scale):
        scores = super().score(layer, queries, pages, scale)
        return scores - scores.mean(-1, keepdim=True)


class Double(MinMax):
    def score(self, layer, queries, pages, scale):
        return super().score(layer, queries, pages, scale).double()


class Understated(MinMax):
    @property
    def bytes_per_token(self):
        return super().bytes_per_token / 2


class Sticky(MinMax):
    def write(self, layer, pages, keys):
        held = self._bounds[layer][pages].clone()
        super().write(layer, pages, keys)
        new = self._bounds[layer][pages]
        low, high = held[:, :, 0].minimum(new[:, :, 0]), held[:, :, 1].maximum(new[:, :, 1])
        self._bounds[layer][pages] = torch.stack([low, high], 2)


class Shared(MinMax):
    def write(self, layer, pages, keys):
        for each in range(self.shape.num_layers):
            super().write(each, pages, keys)


class Careless(MinMax):
    def score(self, layer, queries, pages, scale):
        return super().score(layer, queries.mul_(1.5), pages, scale)


class Mixed(MinMax):
    def score(self, layer, queries, pages, scale):
        return super().score(layer, queries.mean(1, keepdim=True).expand_as(queries).contiguous(), pages, scale)


class Gullible(Lookahead):
    def aggregate(self, layer, mass, weights, rows):
        return mass.mean(1)


class Boastful(Lookahead):
    def aggregate(self, layer, mass, weights, rows):
        return 2 * super().aggregate(layer, mass, weights, rows)


class Numb(Lookahead):
    def aggregate(self, layer, mass, weights, rows):
        return torch.full_like(mass[:, 0], 0.1)


class Crosstalk(Lookahead):
    def aggregate(self, layer, mass, weights, rows):
        return super().aggregate(layer, mass, weights, rows).mean(0, keepdim=True).expand(mass.shape[0], -1, -1)


class Greedy(Lookahead):
    def aggregate(self, layer, mass, weights, rows):
        return super().aggregate(layer, mass.mul_(0.5), weights, rows)


def refuse(kit, plugin, test, *arguments):
    suite = type("Suite", (kit,), {"plugin": lambda self: plugin})()
    with pytest.raises(AssertionError):
        getattr(suite, test)(*arguments)


@pytest.mark.parametrize(
    ("plugin", "test", "arguments"),
    [
        (Deaf, "test_scores_rank_blocks_better_than_chance", ()),
        (Deaf, "test_pages_are_independent", ()),
        (Forgetful, "test_reserving_keeps_what_is_written", ()),
        (Blurred, "test_padding_pages_are_ignored", ()),
        (Double, "test_scores_are_finite_float32_of_the_promised_shape", (torch.float32,)),
        (Understated, "test_device_bytes_grow_as_bytes_per_token_says", ()),
        (Sticky, "test_a_page_written_anew_forgets_what_it_held", ()),
        (Shared, "test_pages_are_independent", ()),
        (Careless, "test_scoring_changes_nothing", ()),
        (Mixed, "test_sequences_and_rows_are_scored_on_their_own", ()),
    ],
)
def test_a_summary_that_breaks_a_promise_is_refused(plugin, test, arguments):
    refuse(KeySummaryTests, plugin, test, *arguments)


@pytest.mark.parametrize(
    ("plugin", "test", "arguments"),
    [
        (Gullible, "test_rejected_rows_change_nothing", ()),
        (Boastful, "test_aggregates_have_the_promised_shape_and_are_masses", (4,)),
        (Numb, "test_accepted_rows_count", ()),
        (Crosstalk, "test_sequences_are_scored_on_their_own", ()),
        (Greedy, "test_arguments_are_not_changed", ()),
    ],
)
def test_a_predictor_that_breaks_a_promise_is_refused(plugin, test, arguments):
    refuse(PredictorTests, plugin, test, *arguments)


@pytest.mark.parametrize("kit", [KeySummaryTests, PredictorTests])
def test_a_suite_must_say_what_it_tests(kit):
    with pytest.raises(NotImplementedError, match="overrides plugin"):
        kit().plugin()
