"""Calls the emulated library: tells the emulator which memory the arguments name, and fails on whatever it has found."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

from oasiskv.ops import _abi

from .building import KERNELS

_DTYPES = {torch.float32: _abi.FLOAT32, torch.bfloat16: _abi.BFLOAT16, torch.float16: _abi.FLOAT16}
_STRUCT = re.compile(r"typedef struct \{\n(.*?)\n\} oasis_(\w+)_args;", re.DOTALL)
_POINTER = re.compile(r"\s*(const )?\w+ \*(\w+);")


def _pointers() -> dict[str, dict[str, bool]]:
    """Of each op, its pointers and whether it writes to them, as the header says."""
    header = (KERNELS / "include" / "oasiskv.h").read_text()
    return {
        name: {found[2]: found[1] is None for line in body.splitlines() if (found := _POINTER.match(line))}
        for body, name in _STRUCT.findall(header)
    }


POINTERS = _pointers()


class Finding(AssertionError):
    """What the emulator has found."""


def dtype_of(tensor: torch.Tensor) -> int:
    return _DTYPES[tensor.dtype]


class Emulator:
    """A library that was compiled against the emulator."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.emu_findings.restype = ctypes.c_char_p
        self.library.emu_tensor.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.library.oasis_last_error.restype = ctypes.c_char_p
        self.library.oasis_struct_size.restype = ctypes.c_size_t
        self.library.oasis_scratch_bytes.restype = ctypes.c_int64
        self.library.oasis_scratch_bytes.argtypes = [ctypes.c_int32, ctypes.c_char_p]
        self.order = 0

    def status(self, name: str, **fields: object) -> int:
        """Run an op on tensors and numbers. Scratch is found and filled with NaN; outputs keep what they hold."""
        numbers: dict[str, float] = {}
        self.library.emu_clear()
        self.library.emu_set_order(self.order)
        for field, value in fields.items():
            if isinstance(value, torch.Tensor):
                numbers[field] = value.data_ptr() if value.numel() else 0
                self._announce(field, value, POINTERS[name][field])
            else:
                numbers[field] = value if isinstance(value, float) else int(value or 0)
        if name in _abi.WITH_SCRATCH:
            needed = self.library.oasis_scratch_bytes(_abi.NUMBERS[name], _abi.PACK[name](**numbers))
            scratch = torch.full((needed + 256,), 0xFF, dtype=torch.uint8)
            scratch = scratch[-scratch.data_ptr() % 256 :][:needed]
            self._announce("scratch", scratch, True)
            numbers |= {"scratch": scratch.data_ptr(), "scratch_bytes": needed}
        function = getattr(self.library, f"oasis_{name}")
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int32
        status = function(_abi.PACK[name](**numbers))
        if findings := self.library.emu_findings().decode():
            raise Finding(findings)
        return status

    def run(self, name: str, **fields: object) -> None:
        """As `status`, of a call that must succeed."""
        status = self.status(name, **fields)
        assert status == _abi.OK, f"{name}: status {status}, {self.error()}"

    def error(self) -> str:
        return self.library.oasis_last_error().decode()

    def _announce(self, field: str, tensor: torch.Tensor, writable: bool) -> None:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            self.library.emu_tensor(field.encode(), tensor.data_ptr(), (last + 1) * tensor.itemsize, writable)
