"""Which block each slot of an arena above a tier store holds, and which of them may be evicted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import IntEnum

import numpy as np

from .types import EMPTY

PROTECTED_STEPS = 2
"""What was read in the present step or the one before it stays, besides what is leased: a device may still be reading it."""

_EVICTED_SHARE = 1 / 64
"""Slots that are freed at a time, as a share of a layer's, so that the search for the oldest is seldom."""


class SlotState(IntEnum):
    """Of a slot of the arena."""

    FREE = 0
    FILLING = 1
    """A read is under way into it."""
    READY = 2
    """Holds a block."""
    QUARANTINE = 3
    """Its read has ended, and the transport may still write."""


class SlotTable:
    """For one arena, which keeps a lock around every call.

    An *owner* is the block of a kv head: `page * kv_heads + head`.

    Args:
        unsettled: whether a read that has ended may still write to a slot of a layer.

    Attributes:
        slots: `(num_layers, pages, kv_heads)`, where blocks are, `EMPTY` for those that are in no slot.
        durable: `(pages,)`, whose blocks are in the store, and may be evicted.
        state: `(num_layers, num_slots)`, a `SlotState` for each.
        touched: the most slots of a layer that were ever in use.
        lease_epoch: counts how often all leases were dropped.
    """

    def __init__(self, num_layers: int, num_slots: int, kv_heads: int, unsettled: Callable[[int, int], bool]) -> None:
        self.num_slots = num_slots
        self.slots = np.full((num_layers, 0, kv_heads), EMPTY, np.int64)
        self.durable = np.zeros(0, bool)
        self.state = np.full((num_layers, num_slots), SlotState.FREE, np.uint8)
        self.touched = 0
        self.free = [list(range(num_slots - 1, -1, -1)) for _ in range(num_layers)]
        self.quarantine: list[tuple[int, int]] = []
        self._owner = np.full((num_layers, num_slots), EMPTY, np.int64)
        self._used_at = np.zeros((num_layers, num_slots), np.int64)
        self._leases = np.zeros((num_layers, num_slots), np.int32)
        self.lease_epoch = 0
        self._clock = PROTECTED_STEPS
        self._heads = kv_heads
        self._unsettled = unsettled

    def grow(self, pages: int) -> None:
        """Make room for page numbers below `pages`."""
        have = self.slots.shape[1]
        if pages > have:
            more = max(pages, 2 * have) - have
            # The one that is asked for its size comes last: an interrupt in between is made good by the next call.
            self.durable = np.pad(self.durable[:have], (0, more))
            self.slots = np.pad(self.slots, ((0, 0), (0, more), (0, 0)), constant_values=EMPTY)

    def begin_step(self) -> None:
        """What was used two steps ago may be evicted now."""
        self._clock += 1

    def rest(self) -> None:
        """All that was used may be evicted now."""
        self._clock += PROTECTED_STEPS

    def find(self, layer: int, pages: np.ndarray) -> np.ndarray:
        """Where blocks are now: `(S, kv_heads, K)` pages to slots; `EMPTY` stays `EMPTY`."""
        heads = np.arange(self._heads)[:, None]
        return np.where(pages >= 0, self.slots[layer, np.maximum(pages, 0), heads], EMPTY)

    def place(self, layer: int, pages: list[int]) -> None:
        """Give every head of new pages a slot of those that `make_free` has made. No step reads them yet: they stay until they
        are durable."""
        free = self.free[layer]
        owners = (np.array(pages, np.int64)[:, None] * self._heads + np.arange(self._heads)).ravel()
        slots = np.array([free.pop() for _ in owners], np.int64)
        self.own(layer, slots, owners)
        self._used_at[layer, slots] = self._clock - PROTECTED_STEPS

    def take(self, layer: int, count: int) -> list[int]:
        """At most `count` slots that will be filled; as many as can be freed."""
        self.make_free(layer, count)
        free = self.free[layer]
        taken = [free.pop() for _ in range(min(count, len(free)))]
        self.state[layer, taken] = SlotState.FILLING
        return taken

    def own(self, layer: int, slots: np.ndarray, owners: np.ndarray) -> None:
        """Slots hold blocks now."""
        self.slots[layer, owners // self._heads, owners % self._heads] = slots
        self.state[layer, slots] = SlotState.READY
        self._owner[layer, slots] = owners
        self._used_at[layer, slots] = self._clock

    def let_go(self, layer: int, slots: np.ndarray) -> None:
        """Slots hold nothing any more."""
        self.state[layer, slots] = SlotState.FREE
        self._owner[layer, slots] = EMPTY
        self.free[layer].extend(slots.tolist())

    def forget(self, pages: list[int]) -> None:
        """Nobody holds these pages: their slots are free."""
        for layer in range(len(self.slots)):
            slots = self.slots[layer, pages].ravel()
            self.let_go(layer, slots[slots >= 0])
        self.slots[:, pages] = EMPTY
        self.durable[pages] = False

    def put_aside(self, layer: int, slot: int) -> None:
        """A slot is in quarantine until nothing can write to it."""
        self.state[layer, slot] = SlotState.QUARANTINE
        self.quarantine.append((layer, slot))

    def leave_quarantine(self) -> None:
        """Free the slots that nothing can write to any more."""
        waiting = []
        for layer, slot in self.quarantine:
            if self._unsettled(layer, slot):
                waiting.append((layer, slot))
            else:
                self.let_go(layer, np.array([slot]))
        self.quarantine = waiting

    def lease(self, layer: int, slots: np.ndarray) -> None:
        """Slots, some of them several times, keep what they hold until `unlease`, and are used in this step."""
        np.add.at(self._leases[layer], slots, 1)
        self._used_at[layer, slots] = self._clock

    def unlease(self, layer: int, slots: np.ndarray, epoch: int) -> None:
        """Take back what was leased in an epoch; nothing is left of that after `recover`."""
        if epoch == self.lease_epoch:
            np.subtract.at(self._leases[layer], slots, 1)

    def make_free(self, layer: int, count: int) -> bool:
        """Evict until `count` slots of a layer are free, the least recently used first; false if there are not so many."""
        free = self.free[layer]
        if len(free) < count:
            self.leave_quarantine()
        if len(free) < count:
            owners = self._owner[layer]
            old = (self.state[layer] == SlotState.READY) & (self._used_at[layer] <= self._clock - PROTECTED_STEPS)
            old &= self._leases[layer] == 0
            candidates = np.flatnonzero(old & self.durable[owners // self._heads])
            wanted = max(count - len(free), int(self.num_slots * _EVICTED_SHARE))
            if wanted < len(candidates):
                candidates = candidates[np.argpartition(self._used_at[layer, candidates], wanted)[:wanted]]
            self.slots[layer, owners[candidates] // self._heads, owners[candidates] % self._heads] = EMPTY
            self.let_go(layer, candidates)
        self.touched = max(self.touched, min(self.num_slots, self.num_slots - len(free) + count))
        return len(free) >= count

    def recover(self, pages: Collection[int]) -> None:
        """Make the tables agree again, after a call that ended in the middle: where blocks are (`slots`) and what waits in
        quarantine decides, and only these pages have blocks. Nothing is being read into a slot."""
        self.lease_epoch += 1
        self._leases[:] = 0
        self.durable = self.durable[: self.slots.shape[1]]  # it grows first
        live = np.zeros(len(self.durable), bool)
        live[list(pages)] = True
        self.slots[:, ~live] = EMPTY
        self.durable[~live] = False
        for layer, free in enumerate(self.free):
            pages, heads = np.nonzero(self.slots[layer] >= 0)
            held = self.slots[layer, pages, heads]
            waiting = {slot for number, slot in self.quarantine if number == layer}
            for slot in np.flatnonzero(self.state[layer] == SlotState.FILLING).tolist():
                if slot not in waiting and self._unsettled(layer, slot):
                    self.quarantine.append((layer, slot))
                    waiting.add(slot)
            self.state[layer] = SlotState.FREE
            self.state[layer, sorted(waiting)] = SlotState.QUARANTINE
            self.state[layer, held] = SlotState.READY
            self._owner[layer] = EMPTY
            self._owner[layer, held] = pages * self._heads + heads
            free[:] = np.flatnonzero(self.state[layer] == SlotState.FREE)[::-1].tolist()

    def faults(self) -> list[str]:
        """What does not agree."""
        found = []
        for layer, free in enumerate(self.free):
            state = self.state[layer]
            waiting = [slot for number, slot in self.quarantine if number == layer]
            if sorted(free) != np.flatnonzero(state == SlotState.FREE).tolist():
                found.append(f"layer {layer}: the free list and the states of slots differ")
            if sorted(waiting) != np.flatnonzero(state == SlotState.QUARANTINE).tolist():
                found.append(f"layer {layer}: the quarantine and the states of slots differ")
            ready = np.flatnonzero(state == SlotState.READY)
            owners = self._owner[layer, ready]
            held = self.slots[layer, owners // self._heads, owners % self._heads]
            if not (held == ready).all() or (self.slots[layer] >= 0).sum() != len(ready):
                found.append(f"layer {layer}: the slots and their owners differ")
            if self._leases[layer].any():
                found.append(f"layer {layer}: slots are leased, and nothing is under way")
        return found
