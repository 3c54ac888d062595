"""The CUDA library on a GPU, called as the emulated one is."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from oasiskv.ops import _abi


class Device:
    """Runs ops on the current stream. Host tensors must be page-locked."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.oasis_last_error.restype = ctypes.c_char_p
        self.library.oasis_scratch_bytes.restype = ctypes.c_int64
        self.library.oasis_scratch_bytes.argtypes = [ctypes.c_int32, ctypes.c_char_p]

    def run(self, name: str, **fields: object) -> None:
        numbers: dict[str, float] = {"stream": torch.cuda.current_stream().cuda_stream}
        for field, value in fields.items():
            if isinstance(value, torch.Tensor):
                assert value.is_cuda or value.is_pinned() or not value.numel(), field
                numbers[field] = value.data_ptr() if value.numel() else 0
            else:
                numbers[field] = value if isinstance(value, float) else int(value or 0)
        scratch = None
        if name in _abi.WITH_SCRATCH:
            needed = self.library.oasis_scratch_bytes(_abi.NUMBERS[name], _abi.PACK[name](**numbers))
            scratch = torch.full((needed,), 0xFF, dtype=torch.uint8, device="cuda")
            numbers |= {"scratch": scratch.data_ptr(), "scratch_bytes": needed}
        function = getattr(self.library, f"oasis_{name}")
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int32
        status = function(_abi.PACK[name](**numbers))
        assert status == _abi.OK, f"{name}: status {status}, {self.library.oasis_last_error().decode()}"
