"""What Python calls on a GPU, down to the emulated library: the classes of `backends.py`, with the scratch that they bring."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from oasiskv import ops

from ..gpu.cases import cases, check

# The package has other things by the names of these modules.
_library, backends = (importlib.import_module(f"oasiskv.ops.{name}") for name in ("_library", "backends"))


WITH_CODE = {name for name in ops.NAMES if not any(hasattr(group, name) for group in backends.CPU_ONLY)}


class Bound:
    """The ops of all groups, as they would be registered for CUDA."""

    def __init__(self, library):
        self.library = library
        for group in backends._GROUPS:
            for name in library.ops.intersection(vars(group)):
                setattr(self, name, getattr(group(library), name))


@pytest.fixture
def bound(emulator, library_path, monkeypatch):
    # Torch here has no CUDA: a stream that is nobody's, and scratch on the host.
    fake = SimpleNamespace(
        cuda=SimpleNamespace(current_stream=lambda: SimpleNamespace(cuda_stream=0)),
        empty=lambda size, dtype, device: torch.full((size,), 0xFF, dtype=dtype),
        uint8=torch.uint8,
    )
    monkeypatch.setattr(_library, "torch", fake)
    emulator.library.emu_clear()
    return Bound(_library.Library("cuda", library_path))


def test_the_library_offers_every_op_that_is_not_made_of_others(bound):
    assert bound.library.ops >= WITH_CODE


def test_bound_ops_are_as_the_reference(bound, emulator):
    served = set()
    for case in cases(large=False):
        if hasattr(bound, case.op):
            check(case, bound, "cpu")
            served.add(case.op)
    assert not emulator.library.emu_findings()
    assert served == WITH_CODE
