"""An arena above a tier store: it holds what was used lately, and the store holds every block that it does not."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from . import ops
from .arena import Arena
from .config import OasisConfig
from .errors import ArenaExhausted, ConfigError, SegmentLost, TierUnavailable
from .host_memory import bytes_of, physical_bytes, returned_memory
from .segment_writer import Segment, SegmentWriter, checksum
from .tiers.abc import TierStore
from .tiers.lane import TierLane
from .tiers.metered import MeteredStore
from .tiers.opening import store_at
from .tiers.segments import Outcome, Read, SegmentLayout
from .trace import Trace
from .types import EMPTY, ModelShape

_PROTECTED_STEPS = 2
"""What was used in the present step or the one before it stays: attention and background copies may still read it."""

_EVICTED_SHARE = 1 / 64
"""Slots that are freed at a time, as a share of a layer's, so that the search for the oldest is seldom."""

_READ_TIMEOUT_S = 2.0
"""After which a step goes on without the blocks that it asked for."""

_abandoned: list[object] = []
"""Memory that a transfer may still write to although its arena is closed: given back to the system it would fault."""


class SlotState(IntEnum):
    """Of a slot of the arena."""

    FREE = 0
    FILLING = 1
    """A read is under way into it."""
    READY = 2
    """Holds a block."""
    QUARANTINE = 3
    """Its read has ended, and the transport may still write."""


@dataclass
class TierCounters:
    """What became of blocks that were not in the arena."""

    fetched: int = 0
    missed: int = 0
    corrupt: int = 0
    failed: int = 0
    quarantined: int = 0


class TieredArena(Arena):
    """Pages are numbers of blocks, as in `Arena`; each slot of a page is in memory, or in the store, or in both.

    Every run of `layout.num_blocks` blocks of a sequence is stored as a segment as soon as it is sealed. From then on its slots
    may be evicted, each for itself, the least recently used first. `locate` brings them back.

    One lock guards the tables. Reads from the store happen outside of it, into slots that nobody else knows of.
    """

    tiered = True

    def __init__(
        self, shape: ModelShape, layout: SegmentLayout, limit_bytes: int, store: TierStore, meters: Sequence[MeteredStore] = ()
    ) -> None:
        super().__init__(shape, layout.block_size, limit_bytes)
        self.exact = not store.traits.lossy
        self.meters = meters
        self.layout = layout
        self.counters = TierCounters()
        self._store = store
        self._lane = lane = TierLane(store)
        self._space = f"run-{secrets.token_hex(8)}"
        self._num_slots = self.num_pages * shape.kv_heads
        layers = range(shape.num_layers)
        self._views = [bytes_of(layer) for layer in self.layers]
        for view in self._views:
            lane.register_buffer(view)
        self._slots = np.full((shape.num_layers, 0, shape.kv_heads), EMPTY, np.int64)  # by layer, page, head
        self._owner = np.full((shape.num_layers, self._num_slots), EMPTY, np.int64)  # page * kv_heads + head
        self._state = np.full((shape.num_layers, self._num_slots), SlotState.FREE, np.uint8)
        self._used_at = np.zeros((shape.num_layers, self._num_slots), np.int64)
        self._free_slots = [list(range(self._num_slots - 1, -1, -1)) for _ in layers]
        self._quarantine: list[tuple[int, int]] = []
        self._durable = np.zeros(0, bool)
        self._segments: dict[int, tuple[Segment, int]] = {}
        self._clock = _PROTECTED_STEPS
        self._touched = 0
        self._lock = threading.RLock()
        self._writer = SegmentWriter(lane, layout, shape.num_layers, self._sealed_blocks, self._stored, store)

    # Pages

    @property
    def used_bytes(self) -> int:
        """As `Arena.used_bytes`: blocks that are in memory."""
        return int(np.count_nonzero(self._state)) * self.layout.slot_bytes

    @property
    def peak_bytes(self) -> int:
        """As `Arena.peak_bytes`."""
        return self._touched * self.shape.num_layers * self.layout.slot_bytes

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages and memory for them, all or none. Waits for blocks on their way to the store if that gives room.
        Raises `ArenaExhausted`."""
        needed = count * self.shape.kv_heads
        with self._lock:
            pages = [self._take() for _ in range(count)]
            self._grow(self._high_water)
        try:
            while not self._assign(pages, needed):
                if needed > self._num_slots or not self._writer.wait(1.0):
                    raise ArenaExhausted(self._why_exhausted(needed))
        except BaseException:
            with self._lock:
                super().release(pages)
            raise
        return pages

    def _assign(self, pages: list[int], count: int) -> bool:
        heads = self.shape.kv_heads
        with self._lock:
            for layer in range(self.shape.num_layers):
                if not self._make_free(layer, count):
                    return False
            for layer, free in enumerate(self._free_slots):
                slots = np.array([free.pop() for _ in range(count)], np.int64)
                self._slots[layer, pages] = slots.reshape(-1, heads)
                self._own(layer, slots, (np.array(pages, np.int64)[:, None] * heads + np.arange(heads)).ravel())
            self._durable[pages] = False
        self._memory.pin(self._touched)
        return True

    def _why_exhausted(self, needed: int) -> str:
        held = [page for page in self._references if self._slots[0, page, 0] >= 0]
        waiting = int((~self._durable[held]).sum()) * self.page_bytes
        reason = f"; the tier store fails: {self._writer.error}" if self._writer.error is not None else ""
        return (
            f"the arena has no room for {needed // self.shape.kv_heads} blocks in all layers: of arena_bytes "
            f"({self.num_pages * self.page_bytes}), {waiting} hold blocks that are not in the tier store yet, and the last two "
            f"steps use others; raise arena_bytes, read prompts in shorter pieces, or lower segment_blocks{reason}"
        )

    def release(self, pages: list[int]) -> list[int]:
        """As `Arena.release`."""
        with self._lock:
            freed = super().release(pages)
            if not freed:
                return freed
            for layer in range(self.shape.num_layers):
                slots = self._slots[layer, freed].ravel()
                self._let_go(layer, slots[slots >= 0])
            self._slots[:, freed] = EMPTY
            for page in freed:
                stored = bool(self._durable[page])
                self._durable[page] = False
                segment, _ = self._segments.pop(page, (None, 0))
                if segment is not None:
                    segment.live -= 1
                    if not segment.live:
                        self._writer.forget(segment, stored)
        return freed

    def _grow(self, pages: int) -> None:
        have = self._slots.shape[1]
        if pages > have:
            more = max(pages, 2 * have) - have
            self._slots = np.pad(self._slots, ((0, 0), (0, more), (0, 0)), constant_values=EMPTY)
            self._durable = np.pad(self._durable, (0, more))

    # Slots; the lock is held

    def _own(self, layer: int, slots: np.ndarray, owners: np.ndarray) -> None:
        self._state[layer, slots] = SlotState.READY
        self._owner[layer, slots] = owners
        self._used_at[layer, slots] = self._clock

    def _let_go(self, layer: int, slots: np.ndarray) -> None:
        self._state[layer, slots] = SlotState.FREE
        self._owner[layer, slots] = EMPTY
        self._free_slots[layer].extend(slots.tolist())

    def _make_free(self, layer: int, count: int) -> bool:
        """Evict until `count` slots of a layer are free."""
        free = self._free_slots[layer]
        if len(free) < count:
            self._leave_quarantine()
        if len(free) < count:
            owners = self._owner[layer]
            old = (self._state[layer] == SlotState.READY) & (self._used_at[layer] <= self._clock - _PROTECTED_STEPS)
            candidates = np.flatnonzero(old & self._durable[owners // self.shape.kv_heads])
            wanted = max(count - len(free), int(self._num_slots * _EVICTED_SHARE))
            if wanted < len(candidates):
                oldest = np.argpartition(self._used_at[layer, candidates], wanted)[:wanted]
                candidates = candidates[oldest]
            pages, heads = np.divmod(owners[candidates], self.shape.kv_heads)
            self._slots[layer, pages, heads] = EMPTY
            self._let_go(layer, candidates)
        self._touched = max(self._touched, min(self._num_slots, self._num_slots - len(free) + count))
        return len(free) >= count

    def _leave_quarantine(self) -> None:
        waiting = []
        for layer, slot in self._quarantine:
            if self._lane.unsettled(self._view(layer, slot)):
                waiting.append((layer, slot))
            else:
                self._let_go(layer, np.array([slot]))
        self._quarantine = waiting

    def _view(self, layer: int, slot: int) -> memoryview:
        size = self.layout.slot_bytes
        return self._views[layer][slot * size : (slot + 1) * size]

    # Going down

    def sealed(self, pages: list[int], first: int) -> None:
        """As `Arena.sealed`: store every whole run of blocks that has ended."""
        size = self.layout.num_blocks
        for start in range(first // size * size, len(pages) - size + 1, size):
            run = pages[start : start + size]
            segment = Segment(self._space, run, self.layout, self.shape.num_layers)
            with self._lock:
                own = [page for page in run if page not in self._segments]
                if not own:
                    continue
                segment.live = len(own)
                for number, page in enumerate(run):
                    self._segments.setdefault(page, (segment, number))
            if self.shape.device.type == "cuda":
                segment.ready = torch.cuda.Event()
                segment.ready.record()
            self._writer.submit(segment)

    def _sealed_blocks(self, layer: int, pages: list[int], out: torch.Tensor) -> None:
        """For the writer. What is not in memory is not asked of this segment: the page was freed meanwhile, or another segment
        has stored it before."""
        with self._lock:
            self._copy_out(layer, self._slots[layer, pages].T.ravel(), out)

    def _stored(self, segment: Segment) -> None:
        with self._lock:
            own = [page for page in segment.pages if self._segments.get(page, (None, 0))[0] is segment]
            self._durable[own] = True
            if not own:
                self._writer.forget(segment, True)

    # Coming back

    def new_slots(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """As `Arena.new_slots`."""
        return torch.from_numpy(self._slots[layer, pages.cpu().numpy()]).to(pages.device)

    def begin_step(self) -> None:
        """As `Arena.begin_step`: what was used two steps ago may be evicted now."""
        with self._lock:
            self._clock += 1

    def locate(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """As `Arena.locate`. Reads what is not in memory, and waits for it."""
        wanted = pages.cpu().numpy()
        heads = np.arange(self.shape.kv_heads)[:, None]
        with self._lock:
            slots = np.where(wanted >= 0, self._slots[layer, np.maximum(wanted, 0), heads], EMPTY)
            there = slots[slots >= 0]
            self._used_at[layer, there] = self._clock
            absent = (wanted >= 0) & (slots < 0)
            if absent.any():
                owners = (wanted * self.shape.kv_heads + heads)[absent]
                self._make_free(layer, len(owners))
                places = [self._free_slots[layer].pop() for _ in range(min(len(owners), len(self._free_slots[layer])))]
                self._state[layer, places] = SlotState.FILLING
                self.counters.failed += len(owners) - len(places)
        if absent.any():
            found = np.full(len(owners), EMPTY, np.int64)
            found[: len(places)] = self._fill(layer, owners[: len(places)], places)
            slots[absent] = found
        return torch.from_numpy(slots).to(pages.device)

    def _fill(self, layer: int, owners: np.ndarray, places: list[int]) -> list[int]:
        """Read blocks into slots; gives for each the slot where it is now, or `EMPTY`."""
        views = [self._view(layer, place) for place in places]
        good = [False] * len(places)
        try:
            self._memory.pin(self._touched)
            good = self._fetch(layer, owners, views)
        except TierUnavailable:
            self.counters.failed += len(places)  # attention goes on without these blocks; the lane tells of the outage
        finally:
            with self._lock:
                for number, (owner, place) in enumerate(zip(owners.tolist(), places, strict=True)):
                    page, head = divmod(owner, self.shape.kv_heads)
                    if not good[number] and self._lane.unsettled(views[number]):
                        self._state[layer, place] = SlotState.QUARANTINE
                        self._quarantine.append((layer, place))
                        self.counters.quarantined += 1
                    elif good[number] and self._slots[layer, page, head] < 0:
                        self._slots[layer, page, head] = place
                        self._own(layer, np.array([place]), np.array([owner]))
                    else:
                        self._let_go(layer, np.array([place]))
                pages, heads = np.divmod(owners, self.shape.kv_heads)
                found = np.where(good, self._slots[layer, pages, heads], EMPTY)
        return list(found.tolist())

    def _fetch(self, layer: int, owners: np.ndarray, views: list[memoryview]) -> list[bool]:
        """Read slots from the store. Only what its checksum confirms is good; damage is read once more. Raises
        `TierUnavailable`."""
        reads: list[Read] = []
        sums: list[list[int]] = []
        good = [False] * len(views)
        known: list[int] = []
        with self._lock:
            for number, (owner, view) in enumerate(zip(owners.tolist(), views, strict=True)):
                page, head = divmod(owner, self.shape.kv_heads)
                segment, block = self._segments.get(page, (None, 0))
                if segment is None or not self._durable[page]:
                    continue
                known.append(number)
                reads.append(Read(segment.key(layer), self.layout.offset(head, block), view))
                sums.append(segment.checksums[layer, :, head, block].tolist())
        for _ in range(2):
            again = []
            for place, outcome in enumerate(self._lane.load(reads, _READ_TIMEOUT_S)):
                good[known[place]] = outcome is Outcome.HIT and checksum(reads[place].into) in sums[place]
                if outcome is Outcome.MISS:
                    self.counters.missed += 1
                elif not good[known[place]]:
                    self.counters.corrupt += 1
                    if not self._lane.unsettled(reads[place].into):
                        again.append(place)
            known, sums = [known[place] for place in again], [sums[place] for place in again]
            reads = [reads[place] for place in again]
            if not reads:
                break
        self.counters.fetched += sum(good)
        return good

    def _copy_out(self, layer: int, slots: np.ndarray, out: torch.Tensor) -> None:
        """Copy slots `(n,)` to `out`, but for those that are `EMPTY`. The lock is held."""
        ops.copy_blocks(self.layers[layer], out, torch.from_numpy(slots.copy()), torch.arange(len(slots)))

    def _gather(self, layer: int, owners: np.ndarray) -> torch.Tensor:
        """Blocks wherever they are, `(n, 2, block_size, head_dim)` on the host, without keeping them. Raises `SegmentLost`,
        `TierUnavailable`."""
        pages, heads = np.divmod(owners, self.shape.kv_heads)
        blocks = returned_memory((len(owners), *self.layers[layer].shape[1:]), self.shape.dtype)
        with self._lock:
            slots = self._slots[layer, pages, heads]
            self._copy_out(layer, slots, blocks)
            absent = np.flatnonzero(slots < 0)
            order = [(id(self._segments.get(int(pages[n]), (None, 0))[0]), heads[n], pages[n], n) for n in absent]
        absent = np.array([number for *_, number in sorted(order)], np.int64)  # neighbours in the store are read together
        if len(absent):
            size = self.layout.slot_bytes
            data = bytes_of(blocks)
            views = [data[number * size : (number + 1) * size] for number in absent.tolist()]
            good = self._fetch(layer, owners[absent], views)
            if not all(good):
                if any(self._lane.unsettled(view) for view in views):
                    _abandoned.append(blocks)
                raise SegmentLost(
                    f"{good.count(False)} of {len(owners)} blocks of layer {layer} are in no tier any more; free the sequence "
                    "and read its prompt again"
                )
        return blocks

    def read(self, layer: int, pages: list[int]) -> torch.Tensor:
        """As `Arena.read`."""
        heads = self.shape.kv_heads
        owners = (np.array(pages, np.int64)[:, None] * heads + np.arange(heads)).ravel()
        return self._gather(layer, owners).view(len(pages), heads, *self.layers[layer].shape[1:])

    def table(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """As `Arena.table`. Brings nothing in."""
        wanted = pages.cpu().numpy()
        with self._lock:
            slots = self._slots[layer, np.maximum(wanted, 0)].transpose(0, 2, 1)
        return torch.from_numpy(np.where(wanted[:, None] >= 0, slots, EMPTY)).to(pages.device)

    def copy_to(self, layer: int, pages: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
        """As `Arena.copy_to`: past the arena, which does not fill up with what goes to the pool."""
        both = ((pages >= 0) & (slots >= 0)).cpu()
        heads = torch.arange(self.shape.kv_heads)[:, None]
        owners = (pages.cpu() * self.shape.kv_heads + heads)[both]
        blocks = self._gather(layer, owners.numpy()).to(pool.device)
        target = slots[both.to(slots.device)]
        ops.copy_blocks(blocks, pool, torch.arange(len(blocks), device=pool.device), target)

    def whole(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Arena.whole`: a copy."""
        own, numbers = torch.unique(pages.clamp(min=0).cpu(), return_inverse=True)
        blocks = self.read(layer, own.tolist()).flatten(0, 1)
        numbers = torch.where(pages >= 0, numbers.to(pages.device), EMPTY)
        return blocks.to(self.shape.device), numbers

    # Reports

    def tier_stats(self) -> dict[str, int]:
        """As `Arena.tier_stats`."""
        counters, lane = self.counters, self._lane.counters()
        return {
            "tier_bytes": self._writer.stored_bytes,
            "fetched_blocks": counters.fetched,
            "lost_blocks": counters.missed + counters.failed,
            "corrupt_blocks": counters.corrupt,
            "quarantined_blocks": counters.quarantined,
            "tier_retries": lane.retries,
            "tier_timeouts": lane.timeouts,
        }

    def faults(self) -> list[str]:
        """As `Arena.faults`."""
        with self._lock:
            found = []
            for layer, free in enumerate(self._free_slots):
                state, owner = self._state[layer], self._owner[layer]
                waiting = [slot for number, slot in self._quarantine if number == layer]
                if sorted(free) != np.flatnonzero(state == SlotState.FREE).tolist():
                    found.append(f"layer {layer}: the free list and the states of slots differ")
                if sorted(waiting) != np.flatnonzero(state == SlotState.QUARANTINE).tolist():
                    found.append(f"layer {layer}: the quarantine and the states of slots differ")
                ready = np.flatnonzero(state == SlotState.READY)
                pages, heads = np.divmod(owner[ready], self.shape.kv_heads)
                if not (self._slots[layer, pages, heads] == ready).all() or (self._slots[layer] >= 0).sum() != len(ready):
                    found.append(f"layer {layer}: the slots and their owners differ")
            lost = [p for p in self._references if not self._durable[p] and (self._slots[:, p] < 0).any()]
            if lost:
                found.append(f"pages {lost} are neither in memory nor in the store")
            return found

    # The end

    def drain(self) -> None:
        """As `Arena.drain`."""
        self._writer.drain()
        self._lane.drain()

    def close(self) -> None:
        """As `Arena.close`. What this arena has stored is deleted, as far as the store answers."""
        self._writer.stop()
        for segment in {id(segment): segment for segment, _ in self._segments.values()}.values():
            self._lane.submit_delete(segment.keys())
        with self._lock:
            self._leave_quarantine()
            if self._quarantine:
                _abandoned.extend(self.layers)
            self._segments.clear()
            self._views.clear()
        self._lane.close()
        self._writer.join()
        super().close()


def tiered_arena(shape: ModelShape, config: OasisConfig, tier: TierStore | None, trace: Trace | None = None) -> TieredArena:
    """The arena above `tier`, or above the stores that `config.tier` names. Raises `ConfigError`, `PluginError`,
    `LayoutMismatch`, `TierUnavailable`."""
    layout = SegmentLayout.of(shape, config)
    meters: list[MeteredStore] = []

    def metered(store: TierStore, name: str) -> TierStore:
        taken = sum(meter.name.split("-")[0] == name for meter in meters)
        meters.append(MeteredStore(store, f"{name}-{taken + 1}" if taken else name, trace))
        return meters[-1]

    store = tier if tier is not None else store_at(config.tiers, layout, wrap=metered)
    if store.layout != layout:
        raise ConfigError(f"tier was made for {store.layout}, but this model and configuration need {layout}")
    limit = config.arena_bytes if config.arena_bytes is not None else physical_bytes() // 2
    return TieredArena(shape, layout, limit, store, meters)
