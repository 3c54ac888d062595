"""Where host memory should lie: the NUMA node of a GPU. Linux only; elsewhere, and on one node, nothing happens."""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path

import torch

_MPOL_PREFERRED = 1
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}


def nodes() -> int:
    """NUMA nodes of this machine, 1 when unknown."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def node_of(device: torch.device) -> int | None:
    """The NUMA node that a CUDA device hangs on; `None` when there is one node only, or no telling."""
    if nodes() < 2:
        return None
    properties = torch.cuda.get_device_properties(device)
    try:
        domain, bus, slot = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    except AttributeError:
        return None
    address = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def bind(region: mmap.mmap, node: int) -> bool:
    """Prefer `node` for the untouched pages of a region. False where the system cannot; the memory works all the same."""
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        return False
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    mask = ctypes.c_ulong(1 << node)
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(len(region)),
        ctypes.c_int(_MPOL_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(8 * ctypes.sizeof(mask)),
        ctypes.c_uint(0),
    )
    return int(result) == 0
