"""A Hypothesis state machine that compares any tier store with `MemoryStore`. It needs hypothesis.

class Machine(TierStoreMachine):
    def make(self, folder: Path, layout: SegmentLayout, limit_bytes: int | None) -> TierStore:
        return MyStore(folder, layout)

TestMine = Machine.TestCase
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.from_thread

from ..tiers import Outcome, Read, SegmentKey, SegmentLayout, TierStore
from ..tiers.memory import MemoryStore
from .tier_kit.suite import LAYOUT, blank, content, key

try:
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
except ImportError as error:
    raise ImportError("TierStoreMachine needs hypothesis, which is not installed; pip install hypothesis") from error

T = TypeVar("T")

_NAMES = st.integers(0, 5).map(key)
_OBJECTS = st.lists(st.tuples(_NAMES, st.integers(1, 7), st.integers(0, 2)), max_size=4)
_READS = st.lists(st.tuples(_NAMES, st.integers(0, 7), st.integers(1, 7)), max_size=4)


class TierStoreMachine(RuleBasedStateMachine):
    """Any calls in any order give what they give on `MemoryStore`. A subclass overrides `make`, which is that of the kit.

    A store without a limit must agree exactly. One with a limit may have forgotten what the model has; what it gives must be
    right.
    """

    backend = "asyncio"
    """The event loop that the calls run on: `asyncio` or `trio`."""

    limit_bytes: int | None = None
    """The size limit that `make` is called with."""

    def make(self, folder: Path, layout: SegmentLayout, limit_bytes: int | None) -> TierStore:
        """A store that is not open yet: as in `TierStoreTests`."""
        raise NotImplementedError("a state machine overrides make() to return a store that is not open")

    @initialize()
    def begin(self) -> None:
        """Start an event loop, and open the store and its model."""
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._portal = self._stack.enter_context(anyio.from_thread.start_blocking_portal(self.backend))
        self._model = MemoryStore(LAYOUT)
        self._store = self.make(self._folder, LAYOUT, self.limit_bytes)
        self._await(self._store.open)

    def teardown(self) -> None:
        """Close the store, and end the event loop."""
        if hasattr(self, "_stack"):
            with self._stack:
                self._await(self._store.aclose)

    @rule(objects=_OBJECTS)
    def store(self, objects: list[tuple[SegmentKey, int, int]]) -> None:
        """New segments and such as are there already, with the same bytes and lengths and with others."""
        batch = [(name, memoryview(self._bytes(name, slots, version))) for name, slots, version in objects]
        self._await(lambda: self._store_in_parts(batch))
        self._await(lambda: self._model.store(batch))

    @rule(ranges=_READS, overlapping=st.booleans())
    def load(self, ranges: list[tuple[SegmentKey, int, int]], overlapping: bool) -> None:
        """Ranges inside segments and beyond them, in one call or in calls that overlap."""
        reads = [Read(name, first * LAYOUT.slot_bytes, blank(count * LAYOUT.slot_bytes)) for name, first, count in ranges]
        expected = [Read(read.key, read.offset, blank(read.into.nbytes)) for read in reads]
        size = 1 if overlapping else self._store.traits.max_batch or max(1, len(reads))
        calls = [reads[start : start + size] for start in range(0, len(reads), size)]
        found = self._await(lambda: self._load(calls))
        right = self._await(lambda: self._model.load(expected))
        for read, outcome, model, other in zip(reads, found, right, expected, strict=True):
            if not (self._forgets and outcome is Outcome.MISS):
                assert outcome is model, f"{read.key} from {read.offset}: {outcome}, and {model} of the model"
            if outcome is Outcome.HIT:
                assert bytes(read.into) == bytes(other.into), f"{read.key} from {read.offset} has other bytes"

    @rule(names=st.lists(_NAMES, max_size=3))
    def delete(self, names: list[SegmentKey]) -> None:
        """Segments that are there, and others."""
        self._await(lambda: self._store.delete(names))
        self._await(lambda: self._model.delete(names))

    @rule()
    def open_again(self) -> None:
        """Close the store and make it again, if it is persistent."""
        if self._store.traits.persistent:
            self._await(self._store.aclose)
            self._store = self.make(self._folder, LAYOUT, self.limit_bytes)
            self._await(self._store.open)

    @invariant()
    def it_contains_what_the_model_contains(self) -> None:
        """Or less, if it may forget."""
        names = [key(number) for number in range(6)]
        found = self._await(lambda: self._store.contains(names))
        right = self._await(lambda: self._model.contains(names))
        for name, there, model in zip(names, found, right, strict=True):
            assert there == model or (self._forgets and model), f"contains({name}) is {there}, and {model} of the model"

    @invariant()
    def the_limit_is_held(self) -> None:
        """`used_bytes` is a size, and no larger than the limit."""
        limit = self._store.limit_bytes
        assert 0 <= self._store.used_bytes <= (limit if limit is not None else self._store.used_bytes)

    @property
    def _forgets(self) -> bool:
        return self._store.limit_bytes is not None

    def _bytes(self, name: SegmentKey, slots: int, version: int) -> bytes:
        """What to store for a key. Where it may have been forgotten it must be the same each time, as the contract says."""
        if self._forgets:
            slots, version = 6, 0
        begin = version * LAYOUT.slot_bytes
        return content(name, slots=10)[begin : begin + slots * LAYOUT.slot_bytes]

    async def _store_in_parts(self, batch: Sequence[tuple[SegmentKey, memoryview]]) -> None:
        size = self._store.traits.max_batch or max(1, len(batch))
        for start in range(0, len(batch), size):
            await self._store.store(batch[start : start + size])

    async def _load(self, calls: Sequence[Sequence[Read]]) -> list[Outcome]:
        outcomes: dict[int, list[Outcome]] = {}

        async def one(number: int) -> None:
            outcomes[number] = await self._store.load(calls[number])

        async with anyio.create_task_group() as tasks:
            for number in range(len(calls)):
                tasks.start_soon(one, number)
        return [outcome for number in range(len(calls)) for outcome in outcomes[number]]

    def _await(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        result: T = self._portal.call(call)
        return result
