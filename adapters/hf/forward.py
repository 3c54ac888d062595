"""The state of one forward with an `OasisCache`, and whose turn it is to use a manager."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from oasiskv import Sequence
from oasiskv.errors import StateError


@dataclass
class Forward:
    """One forward of a model with one cache, in one thread.

    Attributes:
        cache: `id` of the cache; the caches of one manager take turns.
        begun: whether its step has begun.
        served: full-attention layers that have attended.
        running: sequences with rows in this forward.
        select: which rows of `(batch, rows)` are no padding; `None` if all are.
        early_hints: layers and residual streams that were shown before the step had begun.
    """

    cache: int
    begun: bool = False
    served: int = 0
    running: list[Sequence] = field(default_factory=list)
    select: torch.Tensor | None = None
    early_hints: list[tuple[int, torch.Tensor]] = field(default_factory=list)


class Turn:
    """Lets one thread at a time use a manager, for a forward or for one other call; shared by the caches of the manager.

    A second thread is refused before it changes anything. It does not wait: an interrupted forward may never end its turn, and
    drafts keep a step open between forwards.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # held for moments; reentrant, since a finaliser may run in any of them
        self._thread: threading.Thread | None = None
        self._held = 0
        self._deferred: deque[Callable[[], None]] = deque()
        self._forward: Forward | None = None

    def begin(self, forward: Forward) -> None:
        """Take the turn for a forward; one of the same thread that was left in the middle is forgotten.

        Raises:
            StateError: another thread has the turn.
        """
        self._take("a forward")
        self._forward = forward

    def forward(self, cache: int) -> Forward | None:
        """The forward that this thread runs with the cache of this `id`, if it runs one."""
        forward = self._forward
        mine = self._thread is threading.current_thread() and forward is not None and forward.cache == cache
        return forward if mine else None

    def end(self) -> None:
        """Give this thread's turn back, and do what was deferred meanwhile. Does nothing if the turn is another thread's."""
        with self._lock:
            if self._thread is not threading.current_thread():
                return
            self._forward = None
            self._held = 0
            self._thread = None
        self._catch_up()

    @contextmanager
    def hold(self, what: str) -> Iterator[None]:
        """Have the turn for one call, which ends any forward of this thread.

        Raises:
            StateError: another thread has the turn.
        """
        self._take(what)
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if not self._held:
                self.end()

    def when_free(self, action: Callable[[], None]) -> None:
        """Do something now, or at the end of the turn that some thread has: what finalisers want of the manager."""
        self._deferred.append(action)
        self._catch_up()

    def _take(self, what: str) -> None:
        me = threading.current_thread()
        with self._lock:
            holder = self._thread
            if holder is not me and holder is not None and holder.is_alive():
                raise StateError(
                    f"thread {me.name!r} wants {what} of an OasisCache while thread {holder.name!r} uses it, or a copy of it; "
                    "use a cache and its copies in one thread at a time, or make one per thread with OasisCache.for_model"
                )
            if holder is not me:
                self._thread, self._held, self._forward = me, 0, None

    def _catch_up(self) -> None:
        while self._deferred:
            with self._lock:
                if self._thread is not None and self._thread.is_alive():
                    return
                self._thread, self._held, self._forward = threading.current_thread(), 0, None
            try:
                while self._deferred:
                    self._deferred.popleft()()
            finally:
                with self._lock:
                    self._thread = None


class TakesTurns(Protocol):
    """What has a turn."""

    _turn: Turn


Owner = TypeVar("Owner", bound=TakesTurns)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def in_turn(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Make a method hold its object's turn; see `Turn.hold`."""

    @functools.wraps(method)
    def held(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self._turn.hold(f"{method.__name__}()"):
            return method(self, *args, **kwargs)

    return held
