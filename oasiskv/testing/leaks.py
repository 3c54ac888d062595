"""What a process holds on to: threads, file descriptors and tasks, to be compared before and after."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import anyio

_DESCRIPTORS = Path("/proc/self/fd")
_PATIENCE_S = 2.0
_POOLED = ("AnyIO worker thread", "Trio thread")


@dataclass(frozen=True)
class Holdings:
    """Counts of what is held.

    Attributes:
        threads: without the idle ones that anyio and trio keep for later.
        descriptors: open files, sockets and pipes; 0 where the system does not tell.
        tasks: of the event loop that runs.
    """

    threads: int
    descriptors: int
    tasks: int

    @classmethod
    def now(cls) -> Holdings:
        """Count, with what is garbage collected first. Called on an event loop."""
        gc.collect()
        threads = sum(not thread.name.startswith(_POOLED) for thread in threading.enumerate())
        descriptors = len(os.listdir(_DESCRIPTORS)) if _DESCRIPTORS.is_dir() else 0
        return cls(threads, descriptors, len(anyio.get_running_tasks()))

    async def gained(self) -> list[str]:
        """What there is more of by now, in words.

        What is about to end has two seconds to do so: a thread of a test server in this process, for instance, that has not
        noticed yet that its connection is closed. A leak stays.
        """
        give_up_at = anyio.current_time() + _PATIENCE_S
        while True:
            now = Holdings.now()
            fields = ("threads", "descriptors", "tasks")
            pairs = [(name, getattr(self, name), getattr(now, name)) for name in fields]
            more = [f"{new - old} more {name}" for name, old, new in pairs if new > old]
            if not more or anyio.current_time() > give_up_at:
                return more
            await anyio.sleep(0.05)
