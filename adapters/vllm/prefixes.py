"""Which prefixes of tokens the host has: the sequences of requests that are over, found by the hashes of their blocks."""

from __future__ import annotations

from collections.abc import Sequence

MAX_KEPT = 256
"""Sequences that are kept at most: each takes a row in the tables of every layer."""


class Prefixes:
    """An index over the sequences that the host keeps. The hash of a block stands for all tokens up to its end, so a block that
    is found means that everything before it is there too."""

    def __init__(self) -> None:
        self._hashes: dict[int, list[bytes]] = {}  # by key, the one that was not used for longest first
        self._keys: dict[bytes, list[int]] = {}
        self.blocks = 0

    def find(self, hashes: Sequence[bytes]) -> tuple[int | None, int]:
        """The sequence that has the longest prefix of a request with these block hashes, and how many blocks that is."""
        for number in range(len(hashes) - 1, -1, -1):
            keys = self._keys.get(hashes[number])
            if keys:
                return keys[-1], number + 1
        return None, 0

    def touch(self, key: int) -> None:
        """A sequence was used."""
        self._hashes[key] = self._hashes.pop(key)

    def keep(self, key: int, hashes: Sequence[bytes]) -> list[int]:
        """Index a sequence. Returns those that go for it, because it has all that they have, or because there are too many."""
        covered = [other for other in self._keys.get(hashes[0], []) if _begins(hashes, self._hashes[other])]
        for other in covered:
            self._remove(other)
        self._hashes[key] = list(hashes)
        for value in hashes:
            self._keys.setdefault(value, []).append(key)
        self.blocks += len(hashes)
        while len(self._hashes) > MAX_KEPT:
            covered.append(self.evict())
        return covered

    def evict(self) -> int:
        """Remove the sequence that was not used for longest, and return it."""
        key = next(iter(self._hashes))
        self._remove(key)
        return key

    def clear(self) -> list[int]:
        """Remove all sequences, and return them."""
        keys = list(self._hashes)
        self._hashes.clear()
        self._keys.clear()
        self.blocks = 0
        return keys

    def __len__(self) -> int:
        return len(self._hashes)

    def _remove(self, key: int) -> None:
        hashes = self._hashes.pop(key)
        self.blocks -= len(hashes)
        for value in hashes:
            self._keys[value].remove(key)
            if not self._keys[value]:
                del self._keys[value]


def _begins(hashes: Sequence[bytes], others: Sequence[bytes]) -> bool:
    """Whether `hashes` begin with all of `others`: a hash stands for everything before it."""
    return len(others) <= len(hashes) and hashes[len(others) - 1] == others[-1]
