"""Sealed blocks on their way down: runs of them become segments, which a thread of its own stores below the arena."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import torch
import xxhash

from .errors import OasisError, StateError, TierFull, WorkerError
from .host_memory import bytes_of
from .tiers.abc import TierStore
from .tiers.lane import TierLane
from .tiers.segments import SegmentKey, SegmentLayout

_BATCH_BYTES = 8 << 20
"""Bytes that are copied out of the arena at a time."""

_PATIENCE_S = 0.5
"""Between attempts, when a store refuses."""


class Segment:
    """A run of blocks of one sequence, in all layers; `pages[i]` is its `i`-th block.

    Attributes:
        checksums: xxh3 of every slot, `(num_layers, variants, kv_heads, num_blocks)`, known once it is stored: of what the
            store may give for it, which is one thing if it loses no precision.
        live: how many of its pages some sequence still holds.
        tried: whether some of its objects may be in the store.
        submitted: to the writer.
        stored: whether all of its objects are in the store.
        forgotten: whether it is being deleted, since no page of it is held.
    """

    def __init__(self, space: str, pages: list[int], layout: SegmentLayout, num_layers: int) -> None:
        self.pages = pages
        self.checksums = np.zeros((num_layers, 0, layout.kv_heads, layout.num_blocks), np.uint64)
        self.live = len(pages)
        self.tried = False
        self.submitted = False
        self.stored = False
        self.forgotten = False
        self.ready: torch.cuda.Event | None = None
        self._digest = secrets.token_bytes(16)
        self._space = space

    def key(self, layer: int) -> SegmentKey:
        """Of the object that holds a layer of it."""
        return SegmentKey(self._space, self._digest, layer)

    def keys(self) -> list[SegmentKey]:
        """Of all layers."""
        return [self.key(layer) for layer in range(len(self.checksums))]


def checksum(data: memoryview) -> int:
    """Of one slot. It finds damage; it proves no identity."""
    return xxhash.xxh3_64_intdigest(data)


class SegmentWriter:
    """Stores segments one after another, in the order they came, and tries those again that failed.

    Args:
        read: `(layer, pages, out)` copies blocks to `out`, `(kv_heads * n, 2, block_size, head_dim)` on the host, head by head.
        done: called from the thread when a segment is stored.
        store: what is stored comes back as one of its `variants`; it is given no more than its `capacity_bytes`, since it would
            make room by forgetting what is wanted.
    """

    def __init__(
        self,
        lane: TierLane,
        layout: SegmentLayout,
        num_layers: int,
        read: Callable[[int, list[int], torch.Tensor], None],
        done: Callable[[Segment], None],
        store: TierStore,
    ) -> None:
        self._lane = lane
        self._layout = layout
        self._num_layers = num_layers
        self._read, self._done, self._store = read, done, store
        together = min(num_layers, max(1, _BATCH_BYTES // layout.segment_bytes))
        self._room = [self._new_room() for _ in range(together)]  # used again and again
        self._lent: list[torch.Tensor] = []
        self._undeleted: list[Segment] = []
        self._queue: deque[Segment] = deque()
        self._change = threading.Condition()
        self._stored_bytes = 0
        self._successes = 0
        self._closed = False
        self._error: OasisError | None = None
        self._thread = threading.Thread(target=self._run, name="oasiskv-write-behind", daemon=True)
        self._thread.start()

    @property
    def segment_bytes(self) -> int:
        """Of all layers."""
        return self._num_layers * self._layout.segment_bytes

    @property
    def error(self) -> OasisError | None:
        """Why the last attempt failed; `None` if it did not."""
        return self._error

    @property
    def progress(self) -> tuple[int, OasisError | None]:
        """Attempts that have succeeded so far, and why the last one failed, at one moment."""
        with self._change:
            return self._successes, self._error

    @property
    def stored_bytes(self) -> int:
        """Of the segments that are stored and not forgotten."""
        return self._stored_bytes

    def submit(self, segment: Segment) -> None:
        """Queue a segment, once; never blocks."""
        with self._change:
            if segment.submitted:
                return
            segment.submitted = True
            self._queue.append(segment)
            self._change.notify_all()

    def forget(self, segment: Segment) -> None:
        """Nobody holds a block of it any more. It counts until it is deleted: a store that cannot delete it has it still."""

        def deleted(error: Exception | None) -> None:
            with self._change:
                if error is None:
                    self._stored_bytes -= self.segment_bytes * segment.stored
                    segment.stored = False
                elif not self._closed:
                    self._undeleted.append(segment)
                self._change.notify_all()

        self._lane.submit_delete(segment.keys(), deleted)

    def wait(self, timeout_s: float) -> bool:
        """Wait until something was stored or has failed. False if there is nothing to wait for, or the last attempt failed."""
        with self._change:
            if self._error is not None or not self._queue or not self._thread.is_alive():
                return False
            self._change.wait(timeout_s)
            return self._error is None

    def drain(self) -> None:
        """Wait until all is stored, or an attempt fails."""
        while self.wait(1.0):
            pass

    def stop(self) -> list[Segment]:
        """Forget what is queued, submit nothing more, and end when the lane has let go of what is on its way; `join` waits for
        that. Returns segments that may be in the store although nobody holds a block of them."""
        with self._change:
            self._closed = True
            left = [segment for segment in self._queue if segment.tried] + self._undeleted
            self._queue.clear()
            self._change.notify_all()
        return left

    def join(self) -> None:
        """Wait for the end of the thread. After `stop`, and after the lane was closed."""
        self._thread.join()

    def _run(self) -> None:
        while (segment := self._next()) is not None:
            try:
                if segment.live:
                    self._save(segment)
                elif segment.tried:
                    self.forget(segment)  # some of its objects may be there
            except Exception as error:  # noqa: BLE001 - it is tried again, and told to whoever waits for room
                with self._change:
                    self._error = error if isinstance(error, OasisError) else WorkerError.of("storing a segment", error)
                    self._change.notify_all()
                    self._change.wait_for(lambda: self._closed, _PATIENCE_S)
                continue
            with self._change:
                self._error = None
                self._successes += 1
                if self._queue and self._queue[0] is segment:
                    self._queue.popleft()
                self._change.notify_all()

    def _next(self) -> Segment | None:
        """The segment to store next, when there is one. Deletes again, from time to time, what could not be deleted."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or self._queue or self._undeleted)
                ready = self._change.wait_for(lambda: self._closed or self._queue, _PATIENCE_S if self._undeleted else None)
                if self._closed:
                    return None
                undeleted, self._undeleted = self._undeleted, []
                first = self._queue[0] if ready else None
            for segment in undeleted:
                self.forget(segment)
            if first is not None:
                return first

    def _save(self, segment: Segment) -> None:
        if segment.ready is not None:
            segment.ready.synchronize()
        limit = self._store.capacity_bytes
        if limit is not None and self._stored_bytes + self.segment_bytes > limit:
            raise TierFull(
                f"the sequences hold {self._stored_bytes} bytes in the tier store and need {self.segment_bytes} more, above "
                f"its limit of {limit}: it would forget blocks that are still wanted; raise the limit, or free sequences"
            )
        segment.tried = True
        self._lent = [room for room in self._lent if self._lane.unsettled(bytes_of(room))]
        sums: list[np.ndarray] = []
        for first in range(0, self._num_layers, len(self._room)):
            objects = []
            for number, layer in enumerate(range(first, min(first + len(self._room), self._num_layers))):
                if self._lane.unsettled(bytes_of(self._room[number])):  # a call that was given up may still read it
                    self._lent.append(self._room[number])
                    self._room[number] = self._new_room()
                self._read(layer, segment.pages, self._room[number])
                objects.append((segment.key(layer), bytes_of(self._room[number])))
                sums.append(self._checksums(segment, objects[-1][1]))
            self._put(objects)
        segment.checksums = np.stack(sums)
        with self._change:
            self._stored_bytes += self.segment_bytes
            segment.stored = True
        self._done(segment)

    def _new_room(self) -> torch.Tensor:
        heads, blocks, *slot = self._layout.shape
        return torch.empty((heads * blocks, *slot), dtype=getattr(torch, self._layout.dtype))

    def _put(self, objects: list[tuple[SegmentKey, memoryview]]) -> None:
        ended: SimpleQueue[Exception | None] = SimpleQueue()
        with self._change:  # what is deleted after `stop` is deleted after all that was stored
            if self._closed:
                raise StateError("the arena is being closed")
            self._lane.submit_store(objects, ended.put)
        error = ended.get()
        if error is not None:
            raise error

    def _checksums(self, segment: Segment, data: memoryview) -> np.ndarray:
        """Of the slots of one layer, `(variants, kv_heads, num_blocks)`."""
        size = self._layout.slot_bytes
        variants = self._store.variants(data)
        sums = [[checksum(one[start : start + size]) for start in range(0, len(one), size)] for one in variants]
        return np.array(sums, np.uint64).reshape(len(variants), *segment.checksums.shape[2:])
