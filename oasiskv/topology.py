"""What machine this is: processor, NUMA nodes, memory, and GPUs with their links. Linux; elsewhere what can be told."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class NumaNode:
    """A node: its cores as the kernel lists them (`0-15,32-47`), its memory, and its distance to every node, in their order.
    10 is the node itself; 20 means that memory is twice as far."""

    number: int
    cores: str
    memory_bytes: int
    distances: tuple[int, ...]


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees. `link` is its PCIe link as it runs now, such as `32.0 GT/s PCIe x16`; `numa_node` where it hangs.
    Both are `None` where the system does not say. An idle GPU may have turned its link down."""

    name: str
    memory_bytes: int
    link: str | None
    numa_node: int | None


@dataclass(frozen=True)
class Machine:
    """See the module. `usable_cores` are those that this process may run on."""

    processor: str
    cores: int
    usable_cores: int
    memory_bytes: int
    nodes: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...]


def read_machine(root: Path = Path("/")) -> Machine:
    """This machine, or the one whose `/proc` and `/sys` lie below `root`."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    gpus = [_gpu(root, number) for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return Machine(
        processor=_field(root / "proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        cores=cores,
        usable_cores=usable,
        memory_bytes=_kilobytes(_field(root / "proc/meminfo", "MemTotal")),
        nodes=tuple(read_nodes(root)),
        gpus=tuple(gpus),
    )


def read_nodes(root: Path = Path("/")) -> list[NumaNode]:
    """The NUMA nodes, by number; empty where the system names none."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    return [_node(folder) for folder in sorted(folders, key=lambda folder: int(folder.name.removeprefix("node")))]


def read_link(root: Path, address: str) -> tuple[str | None, int | None]:
    """Link and NUMA node of the PCI device at `address`, `0000:3b:00.0` for example."""
    folder = root / "sys/bus/pci/devices" / address
    speed, width, node = (_text(folder / name) for name in ("current_link_speed", "current_link_width", "numa_node"))
    link = f"{speed} x{width}" if speed and width else None
    return link, int(node) if node and int(node) >= 0 else None


def _gpu(root: Path, number: int) -> Gpu:
    properties = torch.cuda.get_device_properties(number)
    try:
        domain, bus, slot = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    except AttributeError:  # an older torch
        link, node = None, None
    else:
        link, node = read_link(root, f"{domain:04x}:{bus:02x}:{slot:02x}.0")
    return Gpu(properties.name, properties.total_memory, link, node)


def _node(folder: Path) -> NumaNode:
    total = next((line for line in _text(folder / "meminfo").splitlines() if "MemTotal:" in line), "")
    return NumaNode(
        number=int(folder.name.removeprefix("node")),
        cores=_text(folder / "cpulist"),
        memory_bytes=_kilobytes(total.rpartition(":")[2]),
        distances=tuple(map(int, _text(folder / "distance").split())),
    )


def _text(path: Path) -> str:
    """What a file of the kernel says; nothing where this kernel has no such file."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _field(path: Path, name: str) -> str:
    found = (line.partition(":") for line in _text(path).splitlines())
    return next((value.strip() for key, _, value in found if key.strip() == name), "")


def _kilobytes(text: str) -> int:
    number = text.split()
    return int(number[0]) * 1024 if number else 0
