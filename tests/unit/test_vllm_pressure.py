"""Which requests are handed over when blocks run short."""

import itertools
import random
from collections import Counter

import pytest

from oasiskv.adapters.vllm.pressure import Candidate, choose


def alone(name, count, lent=10):
    """A request that shares nothing."""
    return Candidate(name, count, dict.fromkeys(range(1000 * ord(name), 1000 * ord(name) + count), 1), lent)


def names(chosen):
    return [candidate.request_id for candidate in chosen]


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (0, []),
        (-3, []),
        (1, ["b"]),
        (90, ["b"]),
        (91, ["b", "c"]),
        (140, ["b", "c"]),
        (141, ["b", "c", "a"]),
        (160, ["b", "c", "a"]),
        (161, []),  # all of them are not enough: none goes
    ],
)
def test_those_that_free_most_go_first(missing, expected):
    assert names(choose([alone("a", 30), alone("b", 100), alone("c", 60)], missing)) == expected


def test_one_that_would_take_more_than_it_frees_stays():
    assert names(choose([alone("a", 10), alone("b", 4)], 1)) == []


def test_shared_blocks_do_not_come_free():
    shared = Candidate("s", 100, dict.fromkeys(range(100), 2), 10)
    assert names(choose([shared, alone("a", 12)], 1)) == ["a"]
    assert names(choose([shared, alone("a", 12)], 3)) == []


def test_requests_that_share_everything_go_together():
    """Neither frees a block alone."""
    twins = [Candidate(name, 100, dict.fromkeys(range(100), 2), 10) for name in "xy"]
    assert names(choose(twins, 80)) == ["x", "y"]
    assert names(choose(twins, 81)) == []


def test_nobody_to_choose_from():
    assert choose([], 1) == []


@pytest.mark.parametrize("seed", range(30))
def test_what_is_chosen_is_enough(seed):
    """Counted with sets; where nothing is chosen, no subset without shared blocks would have been enough."""
    chance = random.Random(seed)
    held = {name: set(chance.sample(range(60), chance.randrange(1, 40))) for name in "abcde"}
    holders = Counter(block for blocks in held.values() for block in blocks)
    made = [Candidate(name, 0, {block: holders[block] for block in blocks}, 5) for name, blocks in held.items()]

    def gained(some):
        given = Counter(block for name in some for block in held[name])
        return sum(count == holders[block] for block, count in given.items()) - 5 * len(some)

    for missing in range(1, 50):
        chosen = names(choose(made, missing))
        assert gained(chosen) >= missing if chosen else gained("abcde") < missing
        if not chosen:
            unshared = [sum(holders[block] == 1 for block in held[name]) - 5 for name in "abcde"]
            subsets = itertools.chain.from_iterable(itertools.combinations(unshared, size) for size in range(6))
            assert max(map(sum, subsets)) < missing
