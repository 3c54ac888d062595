"""What the tests of native code share: the library, its code paths, and outputs that hold garbage before they are written."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from oasiskv import ops
from oasiskv.ops._library import LibraryUnavailable, load

PATHS = ("portable", "avx2", "avx512", "avx512bf16", "emulated16")


def library():
    """The CPU library. The test is left out where none could be built, or the reference was asked for."""
    if ops.backends.cpu is None:
        try:
            load("cpu")
        except LibraryUnavailable as reason:
            pytest.skip(str(reason))
        pytest.skip("OASISKV_OPS=reference")
    return ops.backends.cpu


def runs_here(path):
    """Whether a code path was built and this processor runs it."""
    if ops.backends.cpu is None or not ops.backends.cpu.set_isa(path):
        return False
    return ops.backends.cpu.set_isa("auto")


@pytest.fixture(params=[path for path in PATHS if runs_here(path)] or ["none"])
def path(request):
    """Each code path that runs here; `test_native_library.py` names those that do not."""
    loaded = library()
    assert loaded.set_isa(request.param)
    yield request.param
    loaded.set_isa("auto")


@contextmanager
def poisoned():
    """Tensors made by `torch.empty` hold NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def run(function, *arguments):
    """The op with poisoned outputs."""
    with poisoned():
        return function(*arguments)
