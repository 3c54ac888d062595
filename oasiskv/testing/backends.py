"""The event loops that asynchronous suites run on: asyncio and trio, by anyio's own pytest plugin."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

_NO_TRIO = "trio is not installed, so nothing is known of this plug-in on trio; pip install trio"

BACKENDS = [
    pytest.param("asyncio", id="asyncio"),
    pytest.param("trio", id="trio", marks=pytest.mark.skipif(find_spec("trio") is None, reason=_NO_TRIO)),
]
"""Parameters of a fixture `anyio_backend`. Trio's is skipped where trio is not installed."""


class OnEachBackend:
    """A base of test classes: each coroutine test runs on asyncio and on trio. Other tests of the class run once."""

    pytestmark = pytest.mark.anyio

    @pytest.fixture(params=BACKENDS)
    def anyio_backend(self, request: pytest.FixtureRequest) -> str:
        """The name of the event loop that anyio's plugin runs a test on."""
        name: str = request.param
        return name
