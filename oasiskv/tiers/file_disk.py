"""What the file tier asks of the operating system. Its errors become those of tier stores here."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ..errors import TierFull, TierUnavailable

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
_NO_HOLES = {errno.EOPNOTSUPP, errno.ENOSYS}


@contextmanager
def errors_of(folder: Path) -> Iterator[None]:
    """Turns `OSError` into `TierFull` or `TierUnavailable`."""
    try:
        yield
    except TierUnavailable:  # is an OSError itself, and says more already
        raise
    except OSError as error:
        if is_full(error):
            raise TierFull(
                f"the medium of the file tier in {folder} is full ({error}); free space or lower its limit"
            ) from error
        raise TierUnavailable(f"the file tier in {folder} cannot be used: {error}") from error


def is_full(error: OSError) -> bool:
    """Whether an error says that there is no room, for this file or for this user."""
    return error.errno in _FULL


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file descriptor for as long as the block runs. Symbolic links are not followed. Raises `OSError`."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def write_all(fd: int, buffers: list[memoryview], offset: int) -> None:
    """Write buffers one after the other. Raises `OSError`."""
    while buffers:
        count = os.pwritev(fd, buffers[:_IOV_MAX], offset)
        buffers, offset = _after(buffers, count), offset + count


def read_all(fd: int, buffers: list[memoryview], offset: int, size: int) -> bool:
    """Fill buffers of `size` bytes in all one after the other; false if the file ends before, or if the medium cannot read it.
    Raises `OSError` for anything else."""
    while True:
        try:
            count = os.preadv(fd, buffers if len(buffers) <= _IOV_MAX else buffers[:_IOV_MAX], offset)
        except OSError as error:
            if error.errno == errno.EIO:
                return False
            raise
        if count == size:
            return True
        if not count:
            return False
        buffers, offset, size = _after(buffers, count), offset + count, size - count


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of buffers when their first `count` bytes are done."""
    for position, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[position + 1 :]]
        count -= buffer.nbytes
    return []


def sync_names(folder: Path) -> None:
    """Have the medium know the names of the files in a folder. Raises `OSError`."""
    with opened(folder, os.O_RDONLY) as fd:
        os.fsync(fd)


def punch(fd: int, start: int, end: int) -> bool:
    """Give the blocks of a range back to the file system; false where it cannot. Raises `OSError`."""
    fallocate = _fallocate()
    if fallocate is None:
        return False
    result = fallocate(fd, _KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(end - start))
    if not result:
        return True
    code = ctypes.get_errno()
    if code in _NO_HOLES:
        return False
    raise OSError(code, f"a hole from {start} to {end}: {os.strerror(code)}")


@cache
def _fallocate() -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = ctypes.CDLL(None, use_errno=True).fallocate64
    except AttributeError:  # not Linux, or a libc without it
        return None
    return function
