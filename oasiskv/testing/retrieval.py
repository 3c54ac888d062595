"""Retrieval tasks: long documents that hide facts at known depths, and questions whose answers stand there word for word.

Answers are meant to be checked token for token. A question is no request: it repeats the words before the fact, for a model to
continue. One document serves several questions, so that it needs to be read once.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

DEPTHS = (0.05, 0.15, 0.25, 0.35, 0.5, 0.65, 0.75, 0.85, 0.92)
"""Where facts stand, as shares of the document."""

_PASSKEYS = (
    "The pass key of the vault is",
    "The phone extension of the night porter is",
    "The serial number of the blue bicycle is",
    "The combination of the garden gate is",
    "The account number of the bakery is",
    "The inventory number of the stolen painting is",
    "The licence plate of the delivery van ends in",
    "The ticket number of the lost umbrella is",
    "The number of seats in the old theatre is",
)
_CITIES = ("Athens", "Cairo", "Dublin", "Havana", "Lima", "Lisbon", "Manila", "Nairobi", "Oslo", "Prague", "Quito", "Seoul")


@dataclass(frozen=True)
class Item:
    """A question about a document.

    Attributes:
        kind: "passkey", "multi-key", "json" or "table".
        depth: where in the document the fact stands, from 0 to 1.
        question: what to append to the document.
        answer: what then follows.
    """

    kind: str
    depth: float
    question: str
    answer: str


@dataclass(frozen=True)
class Document:
    """A text of about `num_tokens` tokens, and questions about it."""

    name: str
    num_tokens: int
    text: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class _Fact:
    depth: float
    text: str


def documents(prose: str, num_tokens: int, count: Callable[[str], int], seed: int) -> list[Document]:
    """One document of each sort, within 2% of `num_tokens`; the same ones for the same arguments.

    - "prose": sentences of `prose`, with numbers that have names of their own ("passkey"), and, a little deeper, as many that
      differ by a city only ("multi-key").
    - "json": an object with long notes, and pairs of a random key and a number, which is asked for.
    - "table": comma-separated rows of a random id, two numbers, and a long remark. The id and the first number are given, and
      the second one is asked for: that is as much of a row as SmolLM2-135M copies from a document of this length.

    Args:
        prose: ordinary English to hide the facts in, several times longer than a document.
        num_tokens: wanted length, at least 1,000.
        count: tokens of a text.
        seed: of the random numbers.

    Raises:
        ValueError: `prose` is too short.
    """
    return [make(random.Random(f"{make.__name__} {num_tokens} {seed}"), prose, num_tokens, count) for make in _MAKERS]


def _prose(rng: random.Random, prose: str, num_tokens: int, count: Callable[[str], int]) -> Document:
    numbers = _numbers(rng, 2 * len(DEPTHS))
    facts, items = [], []
    for depth, stem in zip(DEPTHS, rng.sample(_PASSKEYS, len(DEPTHS)), strict=True):
        number = next(numbers)
        facts.append(_Fact(depth, f" {stem} {number}."))
        items.append(Item("passkey", depth, f"\n\n{stem}", f" {number}"))
    for depth, city in zip(DEPTHS, rng.sample(_CITIES, len(DEPTHS)), strict=True):
        number = next(numbers)
        shifted = round(depth + 0.03, 2)
        facts.append(_Fact(shifted, f' The magic number of "{city}" is "{number}".'))
        items.append(Item("multi-key", shifted, f'\n\nThe magic number of "{city}" is "', number))
    return Document("prose", num_tokens, _woven("", facts, "", _sentences(rng, prose), num_tokens, count), tuple(items))


def _json(rng: random.Random, prose: str, num_tokens: int, count: Callable[[str], int]) -> Document:
    facts, items = [], []
    for number, (depth, value) in enumerate(zip(DEPTHS, _numbers(rng, len(DEPTHS)), strict=True), start=2):
        key = _key(rng)
        facts.append(_Fact(depth, f'",\n  "{key}": "{value}",\n  "note-{number}": "'))
        items.append(Item("json", depth, f'\n\n  "{key}": "', value))
    text = _woven('{\n  "note-1": "', facts, '"\n}', _sentences(rng, prose), num_tokens, count)
    return Document("json", num_tokens, text, tuple(items))


def _table(rng: random.Random, prose: str, num_tokens: int, count: Callable[[str], int]) -> Document:
    numbers = _numbers(rng, 2 * len(DEPTHS))
    facts, items = [], []
    for depth in DEPTHS:
        start, amount = f'\n"{_key(rng)}", "{next(numbers)}", "', next(numbers)
        facts.append(_Fact(depth, f'"{start}{amount}", "'))
        items.append(Item("table", depth, start, amount))
    opening = f'"id", "order", "amount", "remark"\n"{_key(rng)}", "0", "0", "'
    return Document("table", num_tokens, _woven(opening, facts, '"', _sentences(rng, prose), num_tokens, count), tuple(items))


_MAKERS = (_prose, _json, _table)


def _woven(
    opening: str, facts: list[_Fact], closing: str, sentences: Iterator[str], num_tokens: int, count: Callable[[str], int]
) -> str:
    """Sentences with the facts between them, each at its depth."""
    text, length = [opening], count(opening) + count(closing)
    left = sorted(facts, key=lambda fact: fact.depth)
    for sentence in sentences:
        while left and length >= left[0].depth * num_tokens:
            fact = left.pop(0)
            text.append(fact.text)
            length += count(fact.text)
        piece = sentence if not text[-1] or text[-1].endswith('"') else f" {sentence}"
        size = count(piece)
        if length + size / 2 > num_tokens:
            return "".join(text) + closing
        text.append(piece)
        length += size
    raise ValueError(f"the prose ends after {length} of {num_tokens} tokens; pass a longer one")


def _sentences(rng: random.Random, prose: str) -> Iterator[str]:
    """The sentences from a random place in the first half on, without characters that have a meaning in the documents."""
    plain = re.sub(r"\s+", " ", prose[rng.randrange(len(prose) // 2 + 1) :]).replace('"', "'").replace("|", "/")
    return iter(re.split(r"(?<=[.?!]) ", plain)[1:])


def _numbers(rng: random.Random, how_many: int) -> Iterator[str]:
    """Different numbers of five digits."""
    return iter([str(number) for number in rng.sample(range(10_000, 100_000), how_many)])


def _key(rng: random.Random) -> str:
    """The beginning of a random UUID."""
    return f"{rng.getrandbits(32):08x}-{rng.getrandbits(16):04x}"
