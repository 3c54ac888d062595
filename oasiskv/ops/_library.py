"""The native libraries: finding one, checking that it speaks the ABI of `_abi.py`, and calling it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from ..errors import InputError, OasisError
from . import _abi

DTYPES = {torch.float32: _abi.FLOAT32, torch.bfloat16: _abi.BFLOAT16, torch.float16: _abi.FLOAT16}


class LibraryUnavailable(Exception):
    """Why there is no native library; the message is a clause that can follow "because"."""


class Call(Protocol):
    """Calls an op with the fields of its struct. False where the library has no code for these arguments."""

    def __call__(self, **fields: float) -> bool: ...


class Library:
    """A loaded library. `device_type` is "cpu" or "cuda"."""

    def __init__(self, device_type: str, path: Path) -> None:
        self.device_type = device_type
        self.path = path
        # CDLL and not PyDLL: a call releases the interpreter lock.
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise LibraryUnavailable(f"{path.name} does not load: {error}") from error
        version = self._library.oasis_abi_version()
        if version != _abi.VERSION:
            raise LibraryUnavailable(f"{path.name} has ABI version {version}, but this is version {_abi.VERSION}: rebuild it")
        self._library.oasis_struct_size.restype = ctypes.c_size_t
        self._library.oasis_build_info.restype = ctypes.c_char_p
        self._library.oasis_last_error.restype = ctypes.c_char_p
        self._library.oasis_scratch_bytes.restype = ctypes.c_int64
        self._library.oasis_scratch_bytes.argtypes = [ctypes.c_int32, ctypes.c_char_p]
        self.ops = frozenset(name for name in _abi.NUMBERS if self._offers(name))

    def _offers(self, name: str) -> bool:
        size = self._library.oasis_struct_size(_abi.NUMBERS[name])
        if size not in (0, _abi.SIZES[name]):
            raise LibraryUnavailable(f"the arguments of {name} take {size} bytes in {self.path.name}, not {_abi.SIZES[name]}")
        return bool(size)

    @property
    def build_info(self) -> str:
        """Compiler, code paths, and the one that runs here."""
        return str(self._library.oasis_build_info().decode())

    def set_isa(self, name: str) -> bool:
        """Run another code path from now on, for tests. False if this processor cannot."""
        return bool(self._library.oasis_set_isa(name.encode()) == _abi.OK)

    def call(self, name: str) -> Call:
        """The op `name`; where it is not among `ops`, a call that serves nothing."""
        if name not in self.ops:
            return _serves_nothing
        function = self._function(name)
        pack = _abi.PACK[name]
        if self.device_type == "cuda":
            return self._call_on_stream(name, function, pack)

        def call(**fields: float) -> bool:
            return not (status := function(pack(num_threads=torch.get_num_threads(), **fields))) or self._refused(name, status)

        return call

    def _call_on_stream(self, name: str, function: Callable[[bytes], int], pack: Callable[..., bytes]) -> Call:
        number = _abi.NUMBERS[name]

        def call(**fields: float) -> bool:
            stream = torch.cuda.current_stream().cuda_stream
            packed = pack(stream=stream, **fields)
            if name in _abi.WITH_SCRATCH and (needed := self._library.oasis_scratch_bytes(number, packed)):
                # Freed at once: the allocator gives it to later work of the same stream only.
                scratch = torch.empty(needed, dtype=torch.uint8, device="cuda")
                packed = pack(stream=stream, scratch=scratch.data_ptr(), scratch_bytes=needed, **fields)
            if (status := function(packed)) == _abi.UNSUPPORTED:
                torch.cuda.synchronize()  # the reference may read on the host what kernels are writing to the arena
            return not status or self._refused(name, status)

        return call

    def _function(self, name: str) -> Callable[[bytes], int]:
        function = getattr(self._library, f"oasis_{name}")
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int32
        typed: Callable[[bytes], int] = function
        return typed

    def _refused(self, name: str, status: int) -> bool:
        if status == _abi.UNSUPPORTED:
            return False
        message = f"{name}: {self._library.oasis_last_error().decode()}"
        raise InputError(message) if status in (_abi.INVALID, _abi.OUT_OF_RANGE) else OasisError(message)


def _serves_nothing(**_: float) -> bool:
    return False


def load(device_type: str) -> Library:
    """The library for a device type. Raises `LibraryUnavailable`."""
    # An editable install has two folders: the sources, and what the build has installed.
    from . import __path__ as folders

    name = f"liboasiskv_{device_type}.so"
    for folder in folders:
        if (path := Path(folder) / name).is_file():
            return Library(device_type, path)
    raise LibraryUnavailable(f"this installation has no {name}")
