"""Host memory on huge pages where the system has them: blocks all over a large pool miss the address cache less often."""

from __future__ import annotations

import mmap

import torch

HUGE_PAGE_BYTES = 2 << 20
"""What x86 and 64-bit ARM have, and what regions are aligned to."""


def reserve(num_bytes: int, flags: int = 0) -> mmap.mmap:
    """A private region of zeros that is taken from the system as it is written, with room for `num_bytes` behind an aligned
    start; see `tensor_of`. Raises as `mmap`.

    Args:
        flags: of `mmap`, more than those of private anonymous memory.
    """
    region = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    advise(region)
    return region


def advise(region: mmap.mmap) -> bool:
    """Ask for huge pages. False where the system has none; the memory works all the same."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or not hasattr(region, "madvise"):
        return False
    try:
        region.madvise(advice)
    except OSError:
        return False
    return True


def tensor_of(region: mmap.mmap, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """The first aligned `num_bytes` of a region, flat. The tensor keeps the region."""
    whole = torch.frombuffer(region, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes].view(dtype)


def full(size: tuple[int, ...], fill: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As `torch.full`, on huge pages if it lies on the host and is large enough for one."""
    num_bytes = dtype.itemsize * torch.Size(size).numel()
    if device.type != "cpu" or num_bytes < HUGE_PAGE_BYTES:
        return torch.full(size, fill, dtype=dtype, device=device)
    return tensor_of(reserve(num_bytes), num_bytes, dtype).view(size).fill_(fill)
