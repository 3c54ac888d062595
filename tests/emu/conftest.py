"""One build of each variant per session."""

import os
from pathlib import Path

import pytest

from . import building
from .emulator import Emulator

pytestmark = pytest.mark.skipif(building.COMPILER is None, reason="no g++")


@pytest.fixture(scope="session")
def checked_build(tmp_path_factory):
    if building.COMPILER is None:
        pytest.skip("no g++: the CUDA kernels cannot be emulated")
    return building.Build("checked", tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="session")
def library_path(request):
    # The tests under sanitizers run these tests again, with the library that they name.
    if path := os.environ.get("OASISKV_EMULATED"):
        return Path(path)
    return request.getfixturevalue("checked_build").link("unchanged")


@pytest.fixture(scope="session")
def checked(library_path):
    return Emulator(library_path)


@pytest.fixture(params=[0, 1, 2], ids=["forwards", "backwards", "mixed"])
def order(request):
    return request.param


@pytest.fixture
def emulator(checked):
    """The kernels as they are, every access checked; threads run in order."""
    checked.order = 0
    return checked
