"""Opening, closing and cancelling: what ends, and what is left behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from ...tiers import Lease, MetadataStore
from ..closing import attempt, require_refused
from ..interrupting import at_every_suspension, nothing
from ..leaks import Holdings
from ..tier_kit.suite import key
from .suite import LONG_S, MetadataSuite

_CYCLES = 8
_WARM_CYCLES = 2


class LifetimeTests(MetadataSuite):
    """From `open` to `aclose`, and again."""

    def calls(self, store: MetadataStore) -> dict[str, Callable[[], Awaitable[object]]]:
        """One call of each kind."""
        return {
            "publish": lambda: store.publish([key(1)], "a", LONG_S),
            "locate": lambda: store.locate([key(1)]),
            "withdraw": lambda: store.withdraw([key(1)], "a"),
            "acquire": lambda: store.acquire("n", "a", LONG_S),
            "release": lambda: store.release(Lease("n", "a", (0, 0), 1.0)),
            "put": lambda: store.put("h", b"value", LONG_S),
            "claim": lambda: store.claim("h"),
        }

    async def test_calls_after_closing_are_refused(self, tmp_path: Path) -> None:
        """With `StateError`. Closing again does nothing."""
        async with self.opened(tmp_path) as store:
            await store.aclose()
            await require_refused(self.calls(store))
            await store.aclose()

    async def test_a_store_that_was_never_used_can_be_closed(self, tmp_path: Path) -> None:
        """Before it was opened, too, as happens when something beside it fails to open."""
        with anyio.fail_after(self.closing_s):
            await self.make(tmp_path).aclose()
            async with self.opened(tmp_path):
                pass

    @pytest.mark.parametrize("turns", [0, 1, 3])
    async def test_closing_ends_what_is_under_way(self, tmp_path: Path, turns: int) -> None:
        """Soon. Calls either finish or raise `StateError`."""
        async with self.opened(tmp_path) as store, anyio.create_task_group() as tasks:
            for call in 4 * list(self.calls(store).values()):
                tasks.start_soon(attempt, call)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            with anyio.fail_after(self.closing_s):
                await store.aclose()

    async def test_calls_may_be_cancelled(self, tmp_path: Path) -> None:
        """Wherever: each has been done or not, and the store works on."""
        async with self.opened(tmp_path) as store:

            async def put() -> None:
                await store.put("h", b"new", LONG_S)

            async def acquire() -> None:
                await store.acquire("n", "a", LONG_S)

            async def publish() -> None:
                await store.publish([key(1), key(2)], "a", LONG_S)

            async def check(_: int) -> None:
                assert await store.claim("h") in (None, b"new")
                assert await store.locate([key(1), key(2)]) in ([[], []], [["a"], ["a"]])
                await self.lease(store, "n", "a")
                await store.withdraw([key(1), key(2)], "a")

            for call in (put, acquire, publish):
                await at_every_suspension(call, check)

    async def test_a_whole_life_may_be_cancelled(self, tmp_path: Path) -> None:
        """Wherever that is, while it opens, works or closes: nothing is left behind, and the next one works."""

        async def live() -> None:
            async with self.make(tmp_path) as store:
                await store.publish([key(1)], "a", LONG_S)
                await store.locate([key(1)])

        with anyio.fail_after(self.patience_s):
            for _ in range(_WARM_CYCLES):
                await live()
            before = Holdings.now()
            await at_every_suspension(live, nothing)
            for _ in range(_CYCLES):
                await live()
            gained = await before.gained()
            assert not gained, f"after {_CYCLES} lives, and some that were cancelled, there are {', '.join(gained)}"
