"""Shares a budget of nibbles over the components of all heads and layers, and packs each head's components into nibbles."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch

from .quantizer import MAX_BITS, distortions

NIBBLE_BITS = 4


@dataclass(frozen=True)
class Layout:
    """Where the components of one layer lie: tensors of shape `(kv_heads, components)` but `offsets`, `(kv_heads,)`."""

    bits: torch.Tensor
    nibbles: torch.Tensor
    shifts: torch.Tensor
    offsets: torch.Tensor
    num_nibbles: int


def water_fill(variances: torch.Tensor, budget_nibbles: int) -> list[Layout]:
    """Give bits to the components `(layers, kv_heads, head_dim)` of these variances so that the summed error is least.

    Bits go greedily to the component whose error shrinks most. Components of 1 to 4 bits are packed into nibbles, none
    straddling; the bits are raised until the packed layouts of all layers fill at most `budget_nibbles`.
    """
    layers, heads, _ = variances.shape
    order = _greedy(variances, NIBBLE_BITS * budget_nibbles)
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        if _total_nibbles(variances, order[:middle]) <= budget_nibbles:
            low = middle
        else:
            high = middle - 1
    bits = _bits(variances, order[:low])
    return [_layout([_pack(bits[layer, head]) for head in range(heads)], bits[layer]) for layer in range(layers)]


def _greedy(variances: torch.Tensor, count: int) -> list[int]:
    """The flat index of the component that receives each bit, in order."""
    gains = [a - b for a, b in zip(distortions()[:-1], distortions()[1:], strict=True)]
    flat = variances.flatten().tolist()
    heap = [(-value * gains[0], index, 0) for index, value in enumerate(flat)]
    heapq.heapify(heap)
    order: list[int] = []
    while heap and len(order) < count:
        _, index, have = heapq.heappop(heap)
        order.append(index)
        if have + 1 < MAX_BITS:
            heapq.heappush(heap, (-flat[index] * gains[have + 1], index, have + 1))
    return order


def _bits(variances: torch.Tensor, order: list[int]) -> torch.Tensor:
    return torch.bincount(torch.tensor(order, dtype=torch.int64), minlength=variances.numel()).view(variances.shape)


def _total_nibbles(variances: torch.Tensor, order: list[int]) -> int:
    bits = _bits(variances, order).flatten(0, 1)
    ones, twos, threes, fours = ((bits == size).sum(1) for size in range(1, MAX_BITS + 1))
    # First fit by decreasing size: a 3 takes a 1 along, two 2s pair up, an odd 2 takes two 1s, four 1s share.
    ones = (ones - threes).clamp(min=0)
    odd = twos % 2
    ones = (ones - 2 * odd).clamp(min=0)
    return int((fours + threes + (twos + 1) // 2 + (ones + 3) // 4).sum())


def _pack(bits: torch.Tensor) -> list[list[int]]:
    """The components of one head per nibble, by first fit in order of decreasing size."""
    nibbles: list[list[int]] = []
    room: list[int] = []
    for component in sorted(range(len(bits)), key=lambda index: -int(bits[index])):
        size = int(bits[component])
        if size == 0:
            break
        place = next((number for number, left in enumerate(room) if left >= size), None)
        if place is None:
            nibbles.append([])
            room.append(NIBBLE_BITS)
            place = len(nibbles) - 1
        nibbles[place].append(component)
        room[place] -= size
    return nibbles


def _layout(packed: list[list[list[int]]], bits: torch.Tensor) -> Layout:
    used = max(1, int((bits > 0).sum(1).max()))
    kept = bits[:, :used].clone()
    if int((bits > 0).sum()) != int((kept > 0).sum()):
        raise AssertionError("components are ordered by falling variance, so those with bits come first")
    nibbles, shifts = torch.zeros_like(kept), torch.zeros_like(kept)
    offsets: list[int] = []
    number = 0
    for head, groups in enumerate(packed):
        offsets.append(number)
        for group in groups:
            shift = 0
            for component in group:
                nibbles[head, component] = number
                shifts[head, component] = shift
                shift += int(kept[head, component])
            number += 1
    return Layout(kept, nibbles, shifts, torch.tensor(offsets), number)
