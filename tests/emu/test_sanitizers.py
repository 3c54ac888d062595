"""Some of these tests once more under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import building

CASES = (
    "test_attention.py::test_every_block_size",
    "test_attention.py::test_splits_are_merged",
    "test_attention.py::test_entries_that_point_nowhere_are_empty",
    "test_moves.py",
    "test_selection.py::test_select_in_any_order_of_threads",
    "test_selection.py::test_exchange_slots",
    "test_summaries.py",
)
SANITIZED = "two_pairs_with_one_target"  # only the shadow of the checked build finds it


def runtime(name):
    found = subprocess.run([str(building.COMPILER), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def run(library, *selection):
    options = "detect_leaks=0:allocator_may_return_null=1"
    environment = os.environ | {
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
        "ASAN_OPTIONS": options,
        "OASISKV_EMULATED": str(library),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", *selection]
    return subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.fixture(scope="module")
def sanitized_build(tmp_path_factory):
    if building.COMPILER is None:
        pytest.skip("no g++: the CUDA kernels cannot be emulated")
    if not Path(runtime("libasan.so")).is_absolute() or not Path(runtime("libubsan.so")).is_absolute():
        pytest.skip("g++ has no sanitizers")
    return building.Build("sanitized", tmp_path_factory.mktemp("sanitized"))


def test_nothing_is_found(sanitized_build):
    library = sanitized_build.link("unchanged")
    result = run(library, *(f"tests/emu/{case}" for case in CASES), "-k", f"not {SANITIZED}")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_a_read_beyond_a_tensor_is_found(sanitized_build):
    before, after = "a.source) + from * a.slot_bytes", "a.source) + (a.num_source_slots - 1) * a.slot_bytes + 16"
    library = sanitized_build.with_change("beyond", "moves.cu", before, after)
    result = run(library, "tests/emu/test_moves.py::test_blocks_are_copied")
    assert result.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in result.stdout + result.stderr
