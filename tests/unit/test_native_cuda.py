"""Where a call on a GPU goes, with tensors that only say where they lie."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from oasiskv.ops import native_cuda


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
    assert native_cuda.device_of(map(at, places)) == (device and torch.device(device))


@pytest.fixture
def devices(monkeypatch):
    entered = []

    @contextmanager
    def device(chosen):
        entered.append(chosen.index)
        yield

    monkeypatch.setattr(native_cuda.torch, "cuda", SimpleNamespace(current_device=lambda: 0, device=device))
    return entered


def test_a_call_goes_to_the_device_of_its_tensors(devices):
    call = native_cuda.on_device(lambda *_: "native", lambda *_: "reference")
    assert call(at("cuda:0"), 3) == "native"
    assert devices == []
    assert call(None, at("cuda:1")) == "native"
    assert devices == [1]


def test_memory_that_is_not_page_locked_is_left_to_the_reference(devices):
    call = native_cuda.on_device(lambda *_: "native", lambda *_: "reference")
    assert call(at("cpu"), at("cuda:0")) == "reference"
