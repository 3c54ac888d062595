"""An arena above a tier store: it holds what was used lately, and the store holds every block that it does not."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from . import ops
from .arena import Arena, SlotLease
from .config import OasisConfig
from .errors import ArenaExhausted, ConfigError, SegmentLost, StateError, TierUnavailable
from .fetching import Fetcher
from .host_memory import bytes_of, physical_bytes, returned_memory
from .patience import Patience
from .segment_writer import Segment, SegmentWriter
from .slot_table import SlotTable
from .tiers.abc import TierStore
from .tiers.lane import TierLane
from .tiers.metered import MeteredStore
from .tiers.opening import store_at
from .tiers.segments import SegmentLayout
from .trace import Trace
from .types import EMPTY, ModelShape

_READ_TIMEOUT_S = 2.0
"""After which a step goes on without the blocks that it asked for."""

_BULK_TIMEOUT_S = 30.0
"""The same for each part of what cannot be done without."""

_abandoned: list[object] = []
"""Memory that a transfer may still write to although its arena is closed: given back to the system it would fault."""


class TieredArena(Arena):
    """Pages are numbers of blocks, as in `Arena`; each slot of a page is in memory, or in the store, or in both.

    Every run of `layout.num_blocks` blocks of a sequence is stored as a segment as soon as it is sealed. From then on its slots
    may be evicted, each for itself, the least recently used first. `locate` brings them back.

    One lock guards the tables. Reads from the store happen outside of it, into slots that nobody else knows of.
    """

    tiered = True

    def __init__(
        self,
        shape: ModelShape,
        layout: SegmentLayout,
        limit_bytes: int,
        store: TierStore,
        meters: Sequence[MeteredStore] = (),
        patience_s: float = 0.0,
    ) -> None:
        super().__init__(shape, layout.block_size, limit_bytes)
        self.exact = not store.traits.lossy
        self.meters = meters
        self.layout = layout
        self._store = store
        self._patience = Patience(patience_s)
        self._lane = lane = TierLane(store)
        self._space = f"run-{secrets.token_hex(8)}"
        self._views = [bytes_of(layer) for layer in self.layers]
        for view in self._views:
            lane.register_buffer(view)
        self._table = SlotTable(
            shape.num_layers,
            self.num_pages * shape.kv_heads,
            shape.kv_heads,
            lambda layer, slot: lane.unsettled(self._view(layer, slot)),
        )
        self._segments: dict[int, tuple[Segment, int]] = {}
        self._lock = threading.RLock()
        self._fetcher = Fetcher(lane, layout, self._stored_in, self._lock)
        self._writer = SegmentWriter(lane, layout, shape.num_layers, self._sealed_blocks, self._stored, store)

    # Pages

    @property
    def capacity_pages(self) -> int | None:
        """As `Arena.capacity_pages`: whole segments that the store can hold."""
        limit = self._store.capacity_bytes
        return None if limit is None else limit // self._writer.segment_bytes * self.layout.num_blocks

    @property
    def used_bytes(self) -> int:
        """As `Arena.used_bytes`: blocks that are in memory."""
        return int(np.count_nonzero(self._table.state)) * self.layout.slot_bytes

    @property
    def peak_bytes(self) -> int:
        """As `Arena.peak_bytes`."""
        return self._table.touched * self.shape.num_layers * self.layout.slot_bytes

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages and memory for them, all or none. Waits for blocks on their way to the store if that gives room,
        and for a store that is down as long as patience lasts. Raises `ArenaExhausted`."""
        self._check_process()
        needed = count * self.shape.kv_heads
        with self._lock:
            pages = [self._take() for _ in range(count)]
            self._table.grow(self._high_water)
        try:
            while True:
                before, _ = self._writer.progress
                if self._assign(pages, needed):
                    break
                if needed > self._table.num_slots:
                    raise ArenaExhausted(self._why_exhausted(needed))
                going_on = self._writer.wait(1.0)
                after, error = self._writer.progress
                if going_on or after > before or (isinstance(error, TierUnavailable) and self._patience.wait(error)):
                    continue
                raise ArenaExhausted(self._why_exhausted(needed))
        except BaseException:
            self.release(pages)
            raise
        return pages

    def _assign(self, pages: list[int], count: int) -> bool:
        layers = range(self.shape.num_layers)
        with self._lock:
            if not all(self._table.make_free(layer, count) for layer in layers):
                return False
            self._memory.pin(self._table.touched)
            for layer in layers:
                self._table.place(layer, pages)
        return True

    def _why_exhausted(self, needed: int) -> str:
        count, have = needed // self.shape.kv_heads, self.num_pages * self.page_bytes
        if needed > self._table.num_slots:
            return (
                f"{count} new blocks take {count * self.page_bytes} bytes, and arena_bytes is {have}: a prompt is read in "
                f"pieces of at most {self.num_pages} blocks; read shorter ones (KVManager.prompt_piece), or raise arena_bytes"
            )
        held = [page for page in self._references if self._table.slots[0, page, 0] >= 0]
        waiting = int((~self._table.durable[held]).sum()) * self.page_bytes
        reason = f"; the tier store fails: {self._writer.error}" if self._writer.error is not None else ""
        return (
            f"the arena has no room for {count} blocks in all layers: of arena_bytes ({have}), {waiting} hold blocks that are "
            "not in the tier store yet, and the last two steps use others; raise arena_bytes, read prompts in shorter pieces, "
            f"or lower segment_blocks{reason}"
        )

    def release(self, pages: list[int]) -> list[int]:
        """As `Arena.release`."""
        with self._lock:
            freed = super().release(pages)
            self._table.forget(freed)
            self._leave_segments(freed)
        return freed

    def _leave_segments(self, pages: list[int]) -> None:
        """Pages hold no block of their segments any more; one that has lost all of its pages is deleted. The lock is held."""
        for page in pages:
            segment, _ = self._segments.get(page, (None, 0))
            if segment is not None:
                segment.live -= 1
                if not segment.live and not segment.forgotten:
                    segment.forgotten = True
                    self._writer.forget(segment)
                del self._segments[page]

    def recover(self, holders: Mapping[int, int]) -> None:
        """As `Arena.recover`. The writer goes on meanwhile."""
        with self._lock:
            super().recover(holders)
            self._table.recover(holders)
            for segment, count in Counter(segment for segment, _ in self._segments.values()).items():
                segment.live = count
            self._leave_segments([page for page in self._segments if page not in holders])
            for segment in {segment for segment, _ in self._segments.values()}:
                self._writer.submit(segment)  # unless it was

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
            self._copy_out(layer, self._table.slots[layer, pages].T.ravel(), out)

    def _stored(self, segment: Segment) -> None:
        with self._lock:
            own = [page for page in segment.pages if self._segments.get(page, (None, 0))[0] is segment]
            self._table.durable[own] = True
            if not own:
                self._writer.forget(segment)

    # Coming back

    def new_slots(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """As `Arena.new_slots`."""
        return torch.from_numpy(self._table.slots[layer, pages.cpu().numpy()]).to(pages.device)

    def begin_step(self) -> None:
        """As `Arena.begin_step`: what was used two steps ago may be evicted now."""
        with self._lock:
            self._table.begin_step()

    def rest(self) -> None:
        """As `Arena.rest`: what the last steps have used may be evicted, too."""
        with self._lock:
            self._table.rest()

    def locate(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """As `Arena.locate`. Reads what is not in memory, and waits for it."""
        return self.lease(layer, pages).slots

    def lease(self, layer: int, pages: torch.Tensor) -> SlotLease:
        """As `Arena.lease`. Reads what is not in memory, and waits for it."""
        wanted = pages.cpu().numpy()
        held: list[np.ndarray] = []
        epoch = self._table.lease_epoch
        lease = SlotLease(pages, lambda: self._unlease(layer, held, epoch))
        with self._lock:
            slots = self._table.find(layer, wanted)
            self._hold(layer, slots, held)
        absent = (wanted >= 0) & (slots < 0)
        if absent.any():
            try:
                slots[absent] = self._bring(layer, self._owners(wanted)[absent], held)
            except BaseException:
                lease.end()  # now, and not when the exception is forgotten, whose traceback has it
                raise
        lease.slots = torch.from_numpy(slots).to(pages.device)
        return lease

    def _owners(self, pages: np.ndarray) -> np.ndarray:
        """Of blocks, `(S, kv_heads, K)` pages, as in `SlotTable`."""
        return pages * self.shape.kv_heads + np.arange(self.shape.kv_heads)[:, None]

    def _hold(self, layer: int, slots: np.ndarray, held: list[np.ndarray]) -> None:
        """Lease slots, and note them. The lock is held, so that nobody evicts what was just found."""
        found = slots[slots >= 0]
        self._table.lease(layer, found)
        held.append(found)

    def _unlease(self, layer: int, held: list[np.ndarray], epoch: int) -> None:
        with self._lock:
            for slots in held:
                self._table.unlease(layer, slots, epoch)

    def _bring(self, layer: int, owners: np.ndarray, held: list[np.ndarray]) -> np.ndarray:
        """Read blocks into slots of the arena, as many as there is room for; where each is then, or `EMPTY`."""
        with self._lock:
            places = self._table.take(layer, len(owners))
            self._fetcher.counters.failed += len(owners) - len(places)
        found = np.full(len(owners), EMPTY, np.int64)
        self._fill(layer, owners[: len(places)], places, found, held)
        return found

    def _fill(self, layer: int, owners: np.ndarray, places: list[int], found: np.ndarray, held: list[np.ndarray]) -> None:
        views = [self._view(layer, place) for place in places]
        good = [False] * len(places)
        try:
            self._memory.pin(self._table.touched)
            self._fetcher.fetch(layer, owners, views, _READ_TIMEOUT_S, good)
            self._patience.worked()
        except TierUnavailable:
            # Attention goes on without these blocks; the lane tells of the outage.
            with self._lock:
                self._fetcher.counters.failed += good.count(False)
        finally:
            with self._lock:
                for number, (owner, place) in enumerate(zip(owners.tolist(), places, strict=True)):
                    found[number] = self._filled(layer, owner, place, good[number])
                self._hold(layer, found, held)

    def _filled(self, layer: int, owner: int, place: int, good: bool) -> int:
        """Settle what becomes of a slot that was to be filled; where the block is. The lock is held."""
        table, (page, head) = self._table, divmod(owner, self.shape.kv_heads)
        if good and table.slots[layer, page, head] < 0:
            table.own(layer, np.array([place]), np.array([owner]))
        elif not good and self._lane.unsettled(self._view(layer, place)):
            table.put_aside(layer, place)
            self._fetcher.counters.quarantined += 1
        else:
            table.let_go(layer, np.array([place]))  # somebody else has read the same block meanwhile, or it cannot be had
        return int(table.slots[layer, page, head]) if good else EMPTY

    def _stored_in(self, page: int) -> tuple[Segment, int] | None:
        return self._segments.get(page) if self._table.durable[page] else None

    def _copy_out(self, layer: int, slots: np.ndarray, out: torch.Tensor) -> None:
        """Copy slots `(n,)` to `out`, but for those that are `EMPTY`. The lock is held."""
        ops.copy_blocks(self.layers[layer], out, torch.from_numpy(slots), torch.arange(len(slots)))

    def _gather(self, layer: int, owners: np.ndarray) -> torch.Tensor:
        """Blocks wherever they are, `(n, 2, block_size, head_dim)` on the host, without keeping them. Waits for a store that is
        down as long as patience lasts. Raises `SegmentLost`, `TierUnavailable`."""
        while True:
            try:
                return self._gather_once(layer, owners)
            except TierUnavailable as error:
                if not self._patience.wait(error):
                    raise

    def _gather_once(self, layer: int, owners: np.ndarray) -> torch.Tensor:
        pages, heads = np.divmod(owners, self.shape.kv_heads)
        blocks = returned_memory((len(owners), *self.layers[layer].shape[1:]), self.shape.dtype)
        with self._lock:
            slots = self._table.slots[layer, pages, heads]
            self._copy_out(layer, slots, blocks)
            absent = np.flatnonzero(slots < 0)
            order = [(id(self._segments.get(int(pages[n]), (None, 0))[0]), heads[n], pages[n], n) for n in absent]
        absent = np.array([number for *_, number in sorted(order)], np.int64)  # neighbours in the store are read together
        if len(absent):
            size = self.layout.slot_bytes
            data = bytes_of(blocks)
            views = [data[number * size : (number + 1) * size] for number in absent.tolist()]
            good = [False] * len(views)
            try:
                self._fetcher.fetch(layer, owners[absent], views, _BULK_TIMEOUT_S, good)
                self._patience.worked()
            finally:
                if not all(good) and any(self._lane.unsettled(view) for view in views):
                    _abandoned.append(blocks)
            if not all(good):
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
            slots = self._table.slots[layer, np.maximum(wanted, 0)].transpose(0, 2, 1)
        return torch.from_numpy(np.where(wanted[:, None] >= 0, slots, EMPTY)).to(pages.device)

    def copy_to(self, layer: int, pages: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
        """As `Arena.copy_to`: past the arena, which does not fill up with what goes to the pool."""
        both = ((pages >= 0) & (slots >= 0)).cpu()
        owners = self._owners(pages.cpu().numpy())[both.numpy()]
        blocks = self._gather(layer, owners).to(pool.device)
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
        counters, lane = self._fetcher.counters, self._lane.counters()
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
            table = self._table
            lost = [page for page in self._references if not table.durable[page] and (table.slots[:, page] < 0).any()]
            return [*table.faults(), *([f"pages {lost} are neither in memory nor in the store"] if lost else [])]

    # The end

    def impatient(self) -> AbstractContextManager[None]:
        """As `Arena.impatient`."""
        return self._patience.suspended()

    def give_up(self) -> None:
        """As `Arena.give_up`."""
        self._patience.give_up()

    def drain(self) -> None:
        """As `Arena.drain`. Raises `StateError` in a forked child."""
        self._check_process()
        self._writer.drain()
        self._lane.drain()

    def _check_process(self) -> None:
        if self._lane.forked:
            raise StateError("the tier store was opened by the parent of this forked process; make a manager here")

    def close(self) -> None:
        """As `Arena.close`. What this arena has stored is deleted, as far as the store answers. In a forked child the store is
        left to the parent."""
        try:
            if not self._lane.forked:
                self._close_store()
        finally:
            self._segments.clear()
            self._views.clear()
            super().close()

    def _close_store(self) -> None:
        try:
            segments = [*self._writer.stop(), *(segment for segment, _ in self._segments.values())]
            for segment in {id(segment): segment for segment in segments}.values():
                self._lane.submit_delete(segment.keys())
            self._lane.close()
        finally:
            with self._lock:
                self._table.leave_quarantine()
                if self._table.quarantine:
                    _abandoned.extend(self.layers)
            self._writer.join()


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
    return TieredArena(shape, layout, limit, store, meters, config.tier_patience_s)
