import pytest
import torch

from oasiskv import ModelShape, OasisConfig
from oasiskv.predictors.lookahead import Lookahead
from oasiskv.predictors.oracle import Oracle
from oasiskv.predictors.previous import Previous

SHAPE = ModelShape(num_layers=1, query_heads=4, kv_heads=2, head_dim=8)
ACCEPTED = torch.tensor([1, 3, 4])


class Index:
    """Answers with fixed masses and remembers what was asked."""

    def __init__(self):
        self.asked = []
        self.summary = torch.rand(3, 4, 2, 6)
        self.exact = torch.rand(3, 4, 2, 6)

    def summary_mass(self, queries):
        self.asked.append(("summary", queries))
        return self.summary

    def exact_mass(self, queries):
        self.asked.append(("exact", queries))
        return self.exact


def make(kind):
    return kind(SHAPE, OasisConfig())


def aggregate(kind, mass, accepted=ACCEPTED):
    weights = (torch.arange(mass.shape[1]) < accepted[:, None]).float()
    return make(kind).aggregate(0, mass, weights, torch.arange(mass.shape[0]))


@pytest.mark.parametrize(("kind", "source"), [(Lookahead, "summary"), (Previous, "summary"), (Oracle, "exact")])
def test_where_the_masses_come_from(kind, source):
    index, queries = Index(), torch.randn(3, 4, 4, 8)
    mass = make(kind).score(0, queries, index)
    assert mass is (index.exact if source == "exact" else index.summary)
    assert [(asked, given is queries) for asked, given in index.asked] == [(source, True)]


def test_only_the_oracle_runs_in_the_foreground():
    assert Oracle.foreground
    assert not Lookahead.foreground
    assert not Previous.foreground


def test_lookahead_is_the_mean_over_the_accepted_rows():
    mass = torch.rand(3, 4, 2, 6)
    expected = torch.stack([mass[s, :count].mean(0) for s, count in enumerate(ACCEPTED.tolist())])
    torch.testing.assert_close(aggregate(Lookahead, mass), expected)


def test_previous_is_the_last_accepted_row():
    mass = torch.rand(3, 4, 2, 6)
    expected = torch.stack([mass[s, count - 1] for s, count in enumerate(ACCEPTED.tolist())])
    assert torch.equal(aggregate(Previous, mass), expected)


@pytest.mark.parametrize("kind", [Lookahead, Previous, Oracle])
def test_rejected_rows_change_nothing(kind):
    mass = torch.rand(3, 4, 2, 6)
    before = aggregate(kind, mass)
    for s, count in enumerate(ACCEPTED.tolist()):
        mass[s, count:] = 1000.0
    assert torch.equal(aggregate(kind, mass), before)


@pytest.mark.parametrize("kind", [Lookahead, Previous])
def test_accepted_rows_matter(kind):
    mass = torch.rand(3, 4, 2, 6)
    before = aggregate(kind, mass)
    for s, count in enumerate(ACCEPTED.tolist()):
        mass[s, count - 1] += 1.0
    assert (aggregate(kind, mass) > before).all()


@pytest.mark.parametrize("kind", [Lookahead, Previous, Oracle])
def test_a_single_row_is_its_own_aggregate(kind):
    mass = torch.rand(2, 1, 2, 6)
    assert torch.equal(aggregate(kind, mass, torch.tensor([1, 1])), mass[:, 0])


@pytest.mark.parametrize("kind", [Lookahead, Previous, Oracle])
def test_the_masses_of_the_step_are_not_changed(kind):
    mass = torch.rand(3, 4, 2, 6)
    before = mass.clone()
    aggregate(kind, mass)
    assert torch.equal(mass, before)
