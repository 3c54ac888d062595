"""A tier store that goes wrong by plan."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.to_thread

from ..errors import StateError, TierFull, TierUnavailable
from ..tiers import Outcome, Read, SegmentKey, TierStore
from ..tiers.checks import check_objects, check_reads
from ..tiers.wrapping import WrappedStore
from .faults import Fault, FaultKind, FaultPlan
from .late_writes import LateWrites


class FaultyStore(WrappedStore):
    """Does what `inner` does, except in the calls that `plan` names.

    Calls that break the contract, or come after closing, are refused as ever. They are counted all the same.
    """

    def __init__(self, inner: TierStore, plan: FaultPlan) -> None:
        super().__init__(inner)
        self.plan = plan
        self._late = LateWrites()
        self._closing = anyio.Event()

    async def store(self, objects: Sequence[tuple[SegmentKey, memoryview]]) -> None:
        """Store, or go wrong."""
        fault = self._strike("store")
        if fault is not None:
            check_objects(objects, self.layout, self.traits)
            if fault.kind in (FaultKind.UNAVAILABLE, FaultKind.FULL):
                await self.inner.store(objects[: fault.entry])
            await self._stop(fault)
        await self.inner.store(objects)

    async def load(self, reads: Sequence[Read]) -> list[Outcome]:
        """Load, or go wrong."""
        fault = self._strike("load")
        if fault is None:
            return await self.inner.load(reads)
        check_reads(reads, self.layout, self.traits)
        if fault.kind is FaultKind.UNAVAILABLE:
            await self.inner.load(reads[: fault.entry])
        if fault.kind is FaultKind.LATE:
            await self._load_late(reads, fault.delay_s)
        await self._stop(fault)
        if fault.kind is FaultKind.SHORT and reads:
            return await self._load_short(reads, min(fault.entry, len(reads) - 1))
        outcomes = await self.inner.load(reads)
        if fault.kind is FaultKind.FLIP and reads:
            entry = min(fault.entry, len(reads) - 1)
            if outcomes[entry] is Outcome.HIT:
                into = reads[entry].into
                into[into.nbytes // 2] ^= 1
        return outcomes

    async def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        """Ask, or go wrong."""
        fault = self._strike("contains")
        if fault is not None:
            await self._stop(fault)
        return await self.inner.contains(keys)

    async def delete(self, keys: Sequence[SegmentKey]) -> None:
        """Delete, or go wrong."""
        fault = self._strike("delete")
        if fault is not None:
            if fault.kind is FaultKind.UNAVAILABLE:
                await self.inner.delete(keys[: fault.entry])
            await self._stop(fault)
        await self.inner.delete(keys)

    async def aclose(self) -> None:
        """Wake what hangs, forget late writes, close the inner store."""
        self._closing.set()
        with anyio.CancelScope(shield=True):  # the threads end at once
            for timer in self._late.cancel():
                await anyio.to_thread.run_sync(timer.join)
        await self.inner.aclose()

    def unsettled(self, buffer: memoryview) -> bool:
        """Whether a late write is due, or as the inner store says."""
        return self._late.touches(buffer) or self.inner.unsettled(buffer)

    def _strike(self, operation: str) -> Fault | None:
        fault = self.plan.next(operation)
        return None if self._closing.is_set() else fault

    async def _stop(self, fault: Fault) -> None:
        """End or delay a call, if that is what goes wrong with it."""
        if fault.kind in (FaultKind.UNAVAILABLE, FaultKind.LATE):
            raise TierUnavailable(f"{fault.operation} fails by plan; plan no {fault.kind.name} to go without")
        if fault.kind is FaultKind.FULL:
            raise TierFull("there is no room by plan; plan no FULL to go without")
        if fault.kind is FaultKind.SLOW:
            await anyio.sleep(fault.delay_s)
        if fault.kind is FaultKind.HANG:
            await self._closing.wait()
            raise StateError(f"the store was closed while {fault.operation} hung by plan; make a new one")

    async def _load_late(self, reads: Sequence[Read], delay_s: float) -> None:
        """Bytes that will come to the buffers, when the call has given up on them."""
        scratch = [Read(read.key, read.offset, memoryview(bytearray(read.into.nbytes))) for read in reads]
        outcomes = await self.inner.load(scratch)
        found = [
            (read.into, bytes(copy.into))
            for read, copy, outcome in zip(reads, scratch, outcomes, strict=True)
            if outcome is Outcome.HIT
        ]
        self._late.plan(found, delay_s)
        await anyio.sleep(delay_s / 2)

    async def _load_short(self, reads: Sequence[Read], entry: int) -> list[Outcome]:
        read = reads[entry]
        copy = Read(read.key, read.offset, memoryview(bytearray(read.into.nbytes)))
        outcomes = await self.inner.load([*reads[:entry], copy, *reads[entry + 1 :]])
        if outcomes[entry] is Outcome.HIT:
            half = read.into.nbytes // 2
            read.into[:half] = copy.into[:half]
        return outcomes
