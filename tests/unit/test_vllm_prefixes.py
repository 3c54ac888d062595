"""Which prefixes the host has."""

from hypothesis import given
from hypothesis import strategies as st

from oasiskv.adapters.vllm.prefixes import MAX_KEPT, Prefixes


def chain(text):
    """The hashes of blocks: each stands for everything up to its end."""
    return [text[: end + 1].encode() for end in range(len(text))]


def test_the_longest_common_prefix_is_found():
    prefixes = Prefixes()
    assert prefixes.find(chain("abc")) == (None, 0)
    assert prefixes.keep(1, chain("abcd")) == []
    assert prefixes.keep(2, chain("abxyz")) == []
    assert prefixes.find(chain("abcde")) == (1, 4)
    assert prefixes.find(chain("abxq")) == (2, 3)
    assert prefixes.find(chain("ab"))[1] == 2
    assert prefixes.find(chain("b")) == (None, 0)
    assert prefixes.blocks == 9


def test_a_longer_one_takes_the_place_of_its_beginning():
    prefixes = Prefixes()
    prefixes.keep(1, chain("ab"))
    prefixes.keep(2, chain("ac"))
    assert prefixes.keep(3, chain("abcd")) == [1]
    assert prefixes.find(chain("ab")) == (3, 2)
    assert prefixes.blocks == 6


def test_what_two_share_outlives_one_of_them():
    prefixes = Prefixes()
    prefixes.keep(1, chain("abc"))
    prefixes.keep(2, chain("abx"))
    assert prefixes.evict() == 1
    assert prefixes.find(chain("abc")) == (2, 2)
    prefixes.keep(3, chain("q"))
    prefixes.touch(2)
    assert prefixes.evict() == 3
    assert prefixes.clear() == [2]
    assert (prefixes.blocks, len(prefixes), prefixes.find(chain("ab"))) == (0, 0, (None, 0))


def test_there_are_not_too_many():
    prefixes = Prefixes()
    for key in range(MAX_KEPT):
        assert prefixes.keep(key, [bytes([1, key])]) == []
    assert prefixes.keep(MAX_KEPT, [b"new"]) == [0]
    assert len(prefixes) == MAX_KEPT


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=20), st.text("ab", min_size=1, max_size=6))
def test_it_finds_what_a_search_finds(texts, wanted):
    prefixes, held = Prefixes(), {}
    for key, text in enumerate(texts):
        held[key] = text
        for gone in prefixes.keep(key, chain(text)):
            del held[gone]
    common = [sum(1 for _ in iter_common(text, wanted)) for text in held.values()]
    key, blocks = prefixes.find(chain(wanted))
    assert blocks == max(common, default=0)
    assert blocks == 0 or held[key][:blocks] == wanted[:blocks]
    assert prefixes.blocks == sum(map(len, held.values()))


def iter_common(one, other):
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            return
        yield mine
