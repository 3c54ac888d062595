"""Draft tokens for texts that are known: perfect ones, and those of prompt lookup with the acceptance that it really has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NGRAM = 2
"""Tokens that prompt lookup matches at most, as in transformers."""


@dataclass(frozen=True)
class Drafted:
    """The steps that decode a continuation: `rows[i]` tokens each, of which `accepted[i]` stay; `ids` `(1, sum of rows)`."""

    ids: torch.Tensor
    rows: list[int]
    accepted: list[int]

    @property
    def acceptance(self) -> float:
        """Accepted draft tokens per step."""
        return sum(count - 1 for count in self.accepted) / len(self.accepted)


def perfect(tokens: torch.Tensor, count: int) -> Drafted:
    """`count` drafts per step that are all right; `tokens` is `(1, T)`, what is fed without drafts."""
    rows = [min(count + 1, tokens.shape[1] - start) for start in range(0, tokens.shape[1], count + 1)]
    return Drafted(tokens, rows, rows)


def prompt_lookup(prompt: torch.Tensor, tokens: torch.Tensor, count: int) -> Drafted:
    """Up to `count` tokens that followed the last n-gram where it stood before, in the prompt `(1, N)` or the text since."""
    text, known = prompt[0].tolist(), tokens[0].tolist()
    ids: list[int] = []
    rows, accepted = [], []
    done = 0
    while done < len(known):
        text.append(known[done])
        drafts = _followers(text, count)
        right = 0
        while right < len(drafts) and done + 1 + right < len(known) and drafts[right] == known[done + 1 + right]:
            right += 1
        ids.extend([known[done], *drafts])
        rows.append(1 + len(drafts))
        accepted.append(1 + right)
        text.extend(drafts[:right])
        done += 1 + right
    return Drafted(torch.tensor([ids]), rows, accepted)


def _followers(text: list[int], count: int) -> list[int]:
    """What followed the first earlier place of the longest n-gram that the text ends with."""
    for size in range(NGRAM, 0, -1):
        gram = text[-size:]
        for place in range(len(text) - size):
            if text[place : place + size] == gram:
                return text[place + size : place + size + count]
    return []
