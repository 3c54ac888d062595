"""Whoever writes a plug-in needs pytest and what the library needs; trio and hypothesis are asked for by name."""

import os
import subprocess
import sys

import pytest

SUITE = """
from oasiskv.testing.kits import MetadataStoreTests, TierStoreTests
from oasiskv.tiers.memory import MemoryStore
from oasiskv.tiers.memory_metadata import MemoryMetadata


class TestTier(TierStoreTests):
    def make(self, folder, layout, limit_bytes):
        return MemoryStore(layout, limit_bytes)


class TestMetadata(MetadataStoreTests):
    def make(self, folder):
        return MemoryMetadata()


def test_the_state_machine_says_what_it_needs():
    try:
        import oasiskv.testing.tier_machine
    except ImportError as error:
        assert "pip install hypothesis" in str(error)
    else:
        raise AssertionError("hypothesis is there")
"""

WITHOUT = """
import sys
sys.modules["trio"] = sys.modules["hypothesis"] = None  # neither can be imported, nor found
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""

BROKEN = SUITE.replace("return MemoryStore(layout, limit_bytes)", "return Undying(layout)").replace(
    "class TestTier", "class Undying(MemoryStore):\n    async def delete(self, keys):\n        return\n\n\nclass TestTier", 1
)

ALONE = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "test_mine.py"
    path.write_text(SUITE)
    return path


def run(program, suite, *arguments):
    plugins = ["-p", "anyio.pytest_plugin", "-p", "no:cacheprovider", "-W", "error", "-q", "-rs"]
    command = [sys.executable, "-c", program, *plugins, f"--rootdir={suite.parent}", str(suite), *arguments]
    return subprocess.run(command, cwd=suite.parent, env=ALONE, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.timeout(150)
def test_the_kits_need_neither_trio_nor_hypothesis(suite):
    result = run(WITHOUT, suite)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "trio is not installed" in result.stdout
    assert "pip install trio" in result.stdout


@pytest.mark.timeout(150)
def test_a_suite_that_fails_says_what_it_compared(suite):
    suite.write_text(BROKEN)
    result = run("import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))", suite, "-k", "what_is_deleted_is_gone")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "assert [True, True] == [False, True]" in result.stdout
