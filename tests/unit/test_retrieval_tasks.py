import re

import pytest

from oasiskv.testing.retrieval import DEPTHS, documents

WORDS = ("the", "market", "opened", "late", "and", "nobody", "had", "brought", "any", "bread", "so", "we", "walked", "home")


def prose(sentences=3000):
    """Sentences of 6 to 18 words."""
    return " ".join(" ".join(WORDS[(3 * i + j) % 14] for j in range(6 + i % 13)).capitalize() + "." for i in range(sentences))


def count(text):
    """Words and other characters, the spaces before them included."""
    return len(re.findall(r" ?\w+|[^\w ]", text))


@pytest.fixture(scope="module", params=[1000, 3900, 7800])
def made(request):
    return documents(prose(), request.param, count, seed=5)


def test_every_kind_is_asked_at_every_depth(made):
    depths = {}
    for document in made:
        for item in document.items:
            depths.setdefault(item.kind, []).append(item.depth)
    assert set(depths) == {"passkey", "multi-key", "json", "table"}
    for kind, found in depths.items():
        assert found == pytest.approx(DEPTHS, abs=0.031), kind


def test_documents_have_the_length_that_was_asked_for(made):
    for document in made:
        assert count(document.text) == pytest.approx(document.num_tokens, rel=0.02), document.name


def test_an_answer_occurs_once_right_after_what_the_question_repeats(made):
    for document in made:
        for item in document.items:
            assert document.text.count(item.answer) == 1, item
            assert document.text.count(item.question.strip("\n") + item.answer) == 1, item


def test_facts_stand_at_their_depths(made):
    for document in made:
        for item in document.items:
            place = count(document.text[: document.text.index(item.question.strip("\n") + item.answer)])
            assert place / document.num_tokens == pytest.approx(item.depth, abs=0.04), item


def test_the_same_arguments_make_the_same_documents():
    assert documents(prose(), 1000, count, seed=1) == documents(prose(), 1000, count, seed=1)


def test_another_seed_makes_others():
    for one, other in zip(documents(prose(), 1000, count, seed=1), documents(prose(), 1000, count, seed=2), strict=True):
        assert one.text != other.text
        assert not {item.answer for item in one.items} & {item.answer for item in other.items} or one.name == "table"


def test_short_prose_is_refused():
    with pytest.raises(ValueError, match="the prose ends after"):
        documents(prose(40), 3900, count, seed=1)
