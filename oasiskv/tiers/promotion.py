"""Copies segments up in the background: to where they are read faster, or were found damaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import anyio

from ..errors import TierError
from .abc import TierStore
from .quarantine import Quarantine
from .segments import Outcome, Read, SegmentKey

_MOST = 64
"""Segments that may wait. Beyond, nothing is copied: a burst of reads has better uses for the tiers."""

_REST = 3.0
"""How many times as long as a copy took the next one waits: reads come first, and a working set that does not fit above would
have copies chase each other."""


class _Lift:
    def __init__(self, source: TierStore, targets: Sequence[TierStore]) -> None:
        self.source = source
        self.targets = targets
        self.scope: anyio.CancelScope | None = None


class Promotion:
    """One copy at a time, in a quarter of the time, of whole segments only; a key is never copied twice at once."""

    def __init__(self, segment_bytes: int) -> None:
        self._size = segment_bytes
        self._lifts: dict[SegmentKey, _Lift] = {}
        self._barred: Counter[SegmentKey] = Counter()
        self._quarantine = Quarantine()
        self._changed = anyio.Event()
        self.copies = 0

    def ask(self, key: SegmentKey, source: TierStore, targets: Sequence[TierStore]) -> None:
        """Copy a segment soon, unless there is too much to do."""
        targets = [tier for tier in targets if tier.limit_bytes is None or tier.limit_bytes >= self._size]
        if targets and key not in self._lifts and not self._barred[key] and len(self._lifts) < _MOST:
            self._lifts[key] = _Lift(source, targets)
            self._notify()

    async def bar(self, keys: Sequence[SegmentKey]) -> None:
        """Copy none of these until `unbar`, and wait until no copy is under way."""
        self._barred.update(keys)
        for key in keys:
            lift = self._lifts.get(key)
            if lift is not None and lift.scope is not None:
                lift.scope.cancel()
            else:
                self._lifts.pop(key, None)
        while any(key in self._lifts for key in keys):
            await self._changed.wait()

    def unbar(self, keys: Sequence[SegmentKey]) -> None:
        """Undo one `bar`."""
        self._barred.subtract(keys)
        self._barred = +self._barred

    async def run(self) -> None:
        """Copy, for ever."""
        while True:
            if not self._lifts:
                await self._changed.wait()
                continue
            key, lift = next(iter(self._lifts.items()))
            begin = anyio.current_time()
            try:
                with anyio.CancelScope() as lift.scope:
                    await self._copy(key, lift)
            except Exception:  # noqa: BLE001 - a copy that fails is no loss: the segment stays where it was read
                pass
            finally:
                del self._lifts[key]
                self._notify()
            await anyio.sleep(_REST * (anyio.current_time() - begin))

    async def _copy(self, key: SegmentKey, lift: _Lift) -> None:
        # A shorter object misses here and stays where it is; a longer one is copied in part, and read below beyond it.
        buffer = memoryview(bytearray(self._size))
        try:
            if await lift.source.load([Read(key, 0, buffer)]) != [Outcome.HIT]:
                return
            for tier in lift.targets:
                try:
                    await tier.store([(key, buffer.toreadonly())])
                    self.copies += 1
                except TierError:
                    continue  # the next one may take it
        finally:
            for tier in (lift.source, *lift.targets):
                self._quarantine.hold(tier.unsettled, buffer)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
