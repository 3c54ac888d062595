"""A trace of what ran when, as a file that ui.perfetto.dev opens (Chrome's JSON trace events)."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ConfigError

DEFAULT_EVENTS = 200_000
"""Slices that a trace keeps: about 100 MB, and about 1,000 steps of a model with 32 layers."""

_ORDER = ("foreground", "waits", "predict", "select", "mark", "transfer")
"""Of lanes in the viewer, from the top; others follow."""

now = time.perf_counter_ns
"""The clock of traces, in nanoseconds."""


class _Slice(NamedTuple):
    lane: str
    thread: int | None  # None for a slice that may overlap others of its lane
    name: str
    start: int
    end: int
    values: dict[str, Any]


class OpenSlice:
    """A slice that has begun; made by `Trace.slice`."""

    __slots__ = ("_lane", "_name", "_start", "_trace", "_values")

    def __init__(self, trace: Trace, lane: str, name: str, values: dict[str, Any]) -> None:
        self._trace, self._lane, self._name, self._values = trace, lane, name, values

    def __enter__(self) -> dict[str, Any]:
        self._start = now()
        return self._values

    def __exit__(self, *_: object) -> None:
        self._trace.add_values(self._lane, self._name, self._start, self._values)


class Trace:
    """The newest slices of a manager and of tiers, in bounded memory. Any thread may add to it.

    Each manager wants a trace of its own: steps of two in one thread may overlap, and slices of a track must nest. Slices of a
    lane that run on several threads get a track per thread.

    Args:
        max_events: slices that are kept. When there are more, the oldest are dropped and counted.

    Raises:
        ConfigError: `max_events` is below 1.
    """

    def __init__(self, max_events: int = DEFAULT_EVENTS) -> None:
        if max_events < 1:
            raise ConfigError(f"max_events is {max_events}; a trace keeps at least 1")
        self._slices: deque[_Slice] = deque(maxlen=max_events)
        self._lock = threading.Lock()
        self._added = 0
        self._threads: dict[int, str] = {}
        self._notes: list[str] = []
        self._begin = now()

    @property
    def dropped(self) -> int:
        """Slices that had to make room for newer ones."""
        with self._lock:
            return self._added - len(self._slices)

    def note(self, text: str) -> None:
        """Something that a reader of the file must know; said once."""
        with self._lock:
            if text not in self._notes:
                self._notes.append(text)

    def add(self, lane: str, name: str, start: int, /, **values: Any) -> None:  # noqa: ANN401 (whatever JSON takes)
        """A slice of this thread from `start`, by `now`, until now. Slices of a thread in a lane must nest."""
        self.add_values(lane, name, start, values)

    def add_values(self, lane: str, name: str, start: int, values: dict[str, Any]) -> None:
        """As `add`, with the values as a dict."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        self._keep(_Slice(lane, thread, name, start, now(), values))

    def add_overlapping(self, lane: str, name: str, start: int, /, **values: Any) -> None:  # noqa: ANN401 (as above)
        """A slice from `start` until now that may overlap others of its lane, as calls of coroutines do."""
        self._keep(_Slice(lane, None, name, start, now(), values))

    def slice(self, lane: str, name: str, /, **values: Any) -> OpenSlice:  # noqa: ANN401 (as above)
        """A slice for the time of a `with` block, also if it raises. Gives its values, for those that are known at the end."""
        return OpenSlice(self, lane, name, values)

    def _keep(self, entry: _Slice) -> None:
        with self._lock:
            self._slices.append(entry)
            self._added += 1

    def as_dict(self) -> dict[str, Any]:
        """The trace as Chrome's JSON object format: `ph` "X" for slices, "b" and "e" for those that may overlap, "M" for the
        names of process and tracks. Times are microseconds since the trace was made; events are in the order of time."""
        with self._lock:
            slices, dropped, notes = list(self._slices), self._added - len(self._slices), list(self._notes)
        process = os.getpid()
        tracks: dict[tuple[str, int], int] = {}
        events: list[dict[str, Any]] = []
        ids = itertools.count(1)
        # Of slices that begin together the longer one comes first: it is the outer one.
        for lane, thread, name, start, end, values in sorted(slices, key=lambda one: (one.start, -one.end)):
            begin: dict[str, Any] = {"name": name, "cat": lane, "pid": process, "ts": self._micros(start), "args": values}
            if thread is not None:
                track = tracks.setdefault((lane, thread), len(tracks) + 1)
                events.append({**begin, "ph": "X", "tid": track, "dur": (end - start) / 1000})
                continue
            begin |= {"name": f"{lane} {name}", "tid": 0, "id": next(ids)}  # such tracks are named by their slices
            events.append({**begin, "ph": "b"})
            events.append({**begin, "ph": "e", "ts": self._micros(end), "args": {}})
        events.sort(key=lambda one: one["ts"])
        return {
            "traceEvents": self._names(process, tracks) + events,
            "displayTimeUnit": "ms",
            "otherData": {"dropped_events": dropped, "notes": notes},
        }

    def _micros(self, time_ns: int) -> float:
        return (time_ns - self._begin) / 1000

    def _names(self, process: int, tracks: dict[tuple[str, int], int]) -> list[dict[str, Any]]:
        """Metadata events. A lane with one track is named by itself, else each track with its thread."""
        named: list[tuple[str, int, dict[str, Any]]] = [("process_name", 0, {"name": "oasiskv"})]
        lanes = [lane for lane, _ in tracks]
        for (lane, thread), track in tracks.items():
            own = lane if lanes.count(lane) == 1 else f"{lane} ({self._threads[thread]})"
            base = lane.partition(",")[0]
            rank = _ORDER.index(base) if base in _ORDER else len(_ORDER)
            named += [("thread_name", track, {"name": own}), ("thread_sort_index", track, {"sort_index": rank})]
        return [{"name": name, "ph": "M", "pid": process, "tid": track, "args": args} for name, track, args in named]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file. Raises `OSError`."""
        Path(path).write_text(json.dumps(self.as_dict()), encoding="utf-8")
