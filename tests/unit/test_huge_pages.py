import mmap

import pytest
import torch

from oasiskv import ModelShape, huge_pages
from oasiskv.host_memory import HostMemory
from oasiskv.pool import OwnPool

CPU = torch.device("cpu")
LARGE = (3, 1 << 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fill", [0.0, 2.5, float("nan")])
def test_large_memory_is_aligned_and_full(dtype, fill):
    made = huge_pages.full(LARGE, fill, dtype, CPU)
    assert made.data_ptr() % huge_pages.HUGE_PAGE_BYTES == 0
    assert made.is_contiguous()
    assert torch.equal(made.view(torch.uint8), torch.full(LARGE, fill, dtype=dtype).view(torch.uint8))


@pytest.mark.parametrize("size", [(0, 2, 4, 8), (7,)])
def test_small_memory_is_as_torch_makes_it(size):
    assert torch.equal(huge_pages.full(size, 1.0, torch.float32, CPU), torch.ones(size))


def test_a_tensor_keeps_its_memory():
    made = [huge_pages.full(LARGE, float(number), torch.float32, CPU) for number in range(3)]
    parts = [each[1, -5:] for each in made]
    del made
    assert [part.tolist() for part in parts] == [[number] * 5 for number in range(3)]


def test_a_region_can_be_written_to_its_end():
    region = huge_pages.reserve(5000)
    made = huge_pages.tensor_of(region, 5000, torch.uint8)
    assert made.numel() == 5000
    assert made.data_ptr() % huge_pages.HUGE_PAGE_BYTES == 0
    assert not made.any()
    made.fill_(7)
    assert (made == 7).all()


@pytest.mark.parametrize("change", ["no such advice", "refused"])
def test_systems_without_huge_pages_are_left_alone(monkeypatch, change):
    if change == "refused":
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345, raising=False)  # advice that no kernel knows
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    region = huge_pages.reserve(4096)
    assert huge_pages.advise(region) is False
    assert torch.equal(huge_pages.full(LARGE, 3.0, torch.float32, CPU), torch.full(LARGE, 3.0))


def test_a_pool_that_grows_keeps_what_it_holds():
    shape = ModelShape(num_layers=4, query_heads=4, kv_heads=4, head_dim=64)
    pool = OwnPool(shape, 16, None, False)
    (strip,) = pool.allocate(1)
    pool.slots[:16] = 5.0
    pool.allocate(40)
    assert pool.slots.data_ptr() % huge_pages.HUGE_PAGE_BYTES == 0
    assert (pool.slots[:16] == 5.0).all()
    assert not pool.slots[16:].any()
    assert strip == 0
    pool.close()


def test_layers_of_host_memory_are_aligned():
    memory = HostMemory(ModelShape(num_layers=3, query_heads=2, kv_heads=2, head_dim=8), 4, 100)
    assert [tuple(layer.shape) for layer in memory.layers] == [(100, 2, 4, 8)] * 3
    assert all(layer.data_ptr() % huge_pages.HUGE_PAGE_BYTES == 0 for layer in memory.layers)
    memory.close()
