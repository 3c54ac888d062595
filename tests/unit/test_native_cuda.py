"""Where a call on a GPU goes, with tensors that only say where they lie."""

import importlib
import inspect
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from oasiskv import ops
from oasiskv.ops import _abi, native_cuda

from .test_native_step import step_case

# The package has other things by the names of these modules.
_library, backends = (importlib.import_module(f"oasiskv.ops.{name}") for name in ("_library", "backends"))
load, LibraryUnavailable = _library.load, _library.LibraryUnavailable


class Somewhere(torch.Tensor):
    """A tensor that says that it lies elsewhere."""

    where = "cpu"

    @property
    def is_cuda(self):
        return self.where.startswith("cuda")

    @property
    def device(self):
        return torch.device("cpu" if self.where == "pinned" else self.where)

    def is_pinned(self):
        return self.where == "pinned"


def at(where):
    tensor = torch.ones(2).as_subclass(Somewhere)
    tensor.where = where
    return tensor


@pytest.mark.parametrize(
    ("places", "device"),
    [
        (["cuda:1", "cuda:1"], "cuda:1"),
        (["pinned", "cuda:0"], "cuda:0"),
        (["cuda:0", "cpu"], None),
        (["cuda:0", "cuda:1"], None),
        (["cpu"], None),
    ],
)
def test_the_device_that_can_read_all(places, device):
    assert native_cuda.device_of(map(at, places), host_memory=True) == (device and torch.device(device))


def test_host_memory_is_for_ops_on_the_arena():
    assert native_cuda.device_of([at("pinned"), at("cuda:0")], host_memory=False) is None


@pytest.fixture
def devices(monkeypatch):
    entered = []

    @contextmanager
    def device(chosen):
        entered.append(chosen.index)
        yield

    monkeypatch.setattr(
        native_cuda.torch,
        "cuda",
        SimpleNamespace(current_device=lambda: 0, device=device, synchronize=lambda: entered.append("all")),
    )
    return entered


def test_a_call_goes_to_the_device_of_its_tensors(devices):
    call = native_cuda.on_device("copy_blocks", lambda *_: "native", lambda *_: "reference")
    assert call(at("cuda:0"), 3) == "native"
    assert devices == []
    assert call(None, at("cuda:1")) == "native"
    assert devices == [1]


def test_memory_that_is_not_page_locked_is_left_to_the_reference(devices):
    call = native_cuda.on_device("copy_blocks", lambda *_: "native", lambda *_: "reference")
    assert call(at("cpu"), at("cuda:0")) == "reference"
    assert devices == ["all"]  # what kernels write is waited for


def test_other_ops_leave_host_memory_to_the_reference(devices):
    call = native_cuda.on_device("bit2_score", lambda *_: "native", lambda *_: "reference")
    assert call(at("pinned"), at("cuda:0")) == "reference"


def test_what_has_no_code_is_made_of_ops_that_have(monkeypatch):
    registered = {}
    registry = SimpleNamespace(impl=lambda name, function, key: registered.setdefault((name, key), function))
    empty = SimpleNamespace(ops=frozenset(), call=lambda name: None)
    monkeypatch.setattr(backends, "load", lambda device: empty)
    monkeypatch.setattr(torch.version, "cuda", "12.0")
    monkeypatch.delenv("OASISKV_OPS", raising=False)
    backends.Backends(registry, ops.REFERENCE)
    assert {name for name, key in registered if key == "CUDA"} == set(backends.COMPOSED)
    case = step_case(rows=2)
    expected = ops.REFERENCE["corrected_attention"](*case)
    for found, wanted in zip(registered["corrected_attention", "CUDA"](*case), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    arena, pool = torch.randn(8, 2, 4, 8), torch.zeros(4, 2, 4, 8)
    table = torch.tensor([[[1, -1], [0, 2]]])
    arguments = torch.tensor([[[4, 0, 6], [5, 1, 7]]]), table, torch.tensor([[[0, -1], [3, 1]]])
    assert registered["load_blocks", "CUDA"](arena, pool, *arguments).tolist() == [[3, 2]]
    assert torch.equal(pool[[0, 3, 1]], arena[[0, 5, 7]])


def test_the_library_loads_without_a_driver_and_says_that_a_launch_failed():
    try:
        library = load("cuda")
    except LibraryUnavailable as reason:
        pytest.skip(str(reason))
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    assert {name for name in ops.NAMES if not any(hasattr(group, name) for group in backends.CPU_ONLY)} <= library.ops
    pack = _abi.PACK["block_mass"]
    numbers = dict.fromkeys(inspect.signature(pack).parameters, 1) | {"scratch_bytes": 1 << 20, "stream": 0}
    assert library._function("block_mass")(pack(**numbers)) == _abi.FAILED
    assert "launching block_mass_parts: " in library._library.oasis_last_error().decode()
