"""A pack: one file of segments, one after the other, and the index beside it. It grows at its end only."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from ..errors import LayoutMismatch, TierUnavailable
from . import file_index as index
from .file_disk import opened, punch, sync_names, write_all
from .file_index import Placed
from .segments import SegmentKey, SegmentLayout

Sealed = tuple[SegmentKey, memoryview, bytes]
"""An object, and its checksums."""


class Pack:
    """`oasiskv-NUMBER.data` and `.index` in a folder. Files are open only while something is done with them.

    Its methods raise `OSError`. They are for one thread at a time.

    Attributes:
        size: where the next segment goes.
        live_bytes: of the segments that are still there.
        grows: whether more may be added; not after another pack has been begun, or a write has failed half-way.
    """

    def __init__(self, folder: Path, number: int, layout: SegmentLayout) -> None:
        self.number = number
        self.data_path = folder / f"oasiskv-{number:08}.data"
        self._index_path = folder / f"oasiskv-{number:08}.index"
        self._layout = layout
        self.size = 0
        self.live_bytes = 0
        self.grows = True
        self._index_bytes = index.HEADER_BYTES
        self._offsets: list[int] = []
        self._live: dict[int, Placed] = {}

    @property
    def live(self) -> list[Placed]:
        """The segments that are still there, in the order of writing."""
        return list(self._live.values())

    @classmethod
    def create(cls, folder: Path, number: int, layout: SegmentLayout, *, sync: bool) -> Self:
        """Make the files of a new pack, or none. Files of this number must not be there."""
        pack = cls(folder, number, layout)
        with opened(pack.data_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL):
            pass
        try:
            with opened(pack._index_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                write_all(fd, [memoryview(index.header(layout))], 0)
            if sync:
                sync_names(folder)
        except OSError:
            pack.remove()
            raise
        return pack

    def adopt(self) -> bool:
        """Take over files that an earlier process has left; false if they are of no use.

        Raises:
            LayoutMismatch: they are of another layout or version.
            TierUnavailable: they are no regular files.
        """
        for path in (self.data_path, self._index_path):
            if path.is_symlink() or not path.exists():
                return False
            if not path.is_file():
                raise TierUnavailable(f"{path} is no regular file; use another folder, or delete it")
        with opened(self.data_path, os.O_RDWR) as data, opened(self._index_path, os.O_RDWR) as fd:
            self.size = os.fstat(data).st_size
            with open(fd, "rb", closefd=False) as file:
                try:
                    found, end = index.parse(file, os.fstat(fd).st_size, self.size, self._layout)
                except LayoutMismatch as error:
                    raise LayoutMismatch(f"{self._index_path} holds {error}; use another folder, or delete it") from None
            if not found:
                return False
            os.ftruncate(fd, end)
            self._index_bytes = end
            for segment in found.values():
                self._add(segment)
            self._clear_gaps(data)
        return True

    def _clear_gaps(self, data: int) -> None:
        last = max(segment.offset + segment.nbytes for segment in self._live.values())
        if last < self.size:  # data whose record was never written
            os.ftruncate(data, last)
            self.size = last
        start = 0
        for offset in self._offsets:
            if start < offset:
                punch(data, start, offset)
            start = max(start, offset + self._live[offset].nbytes)

    def append(self, objects: Sequence[Sealed], *, sync: bool) -> list[Placed]:
        """Add objects, all of them or none.

        Raises:
            FileNotFoundError: somebody has removed the files.
        """
        added = []
        offset = self.size
        for key, data, checks in objects:
            added.append(Placed(key, offset, data.nbytes // self._layout.slot_bytes, data.nbytes, checks))
            offset += data.nbytes
        records = b"".join([index.placed(segment) for segment in added])
        try:
            with opened(self.data_path, os.O_WRONLY) as fd:
                write_all(fd, [data for _, data, _ in objects], self.size)
                if sync:
                    os.fsync(fd)
            with opened(self._index_path, os.O_WRONLY) as fd:
                write_all(fd, [memoryview(records)], self._index_bytes)
                if sync:
                    os.fsync(fd)
        except OSError:
            self.grows = False
            self._cut()
            raise
        self.size = offset
        self._index_bytes += len(records)
        for segment in added:
            self._add(segment)
        return added

    def _cut(self) -> None:
        """Take back what a failed write has left, as far as that works: without a whole record it counts for nothing."""
        for path, size in ((self._index_path, self._index_bytes), (self.data_path, self.size)):
            with suppress(OSError):  # the failure that led here is what the caller hears of; opening cuts the rest
                os.truncate(path, size)

    def _add(self, segment: Placed) -> None:
        self._live[segment.offset] = segment
        self._offsets.insert(bisect_right(self._offsets, segment.offset), segment.offset)
        self.live_bytes += segment.nbytes

    def forget(self, segment: Placed) -> bool:
        """Give up a segment and its space: false if the file system cannot take the space back while the file is there."""
        if self._live.pop(segment.offset, None) is None:
            return True
        position = bisect_left(self._offsets, segment.offset)
        del self._offsets[position]
        self.live_bytes -= segment.nbytes
        if not self._live and not self.grows:
            self.remove()
            return True
        with opened(self._index_path, os.O_WRONLY) as fd:
            record = index.gone(segment.offset)
            write_all(fd, [memoryview(record)], self._index_bytes)
            self._index_bytes += len(record)
        # The hole takes in the gaps on both sides: neighbours may have given up parts of blocks.
        before = self._live[self._offsets[position - 1]] if position else None
        start = before.offset + before.nbytes if before else 0
        end = self._offsets[position] if position < len(self._offsets) else self.size
        with opened(self.data_path, os.O_WRONLY) as fd:
            return punch(fd, start, end)

    def remove(self) -> None:
        """Delete the files; the index first, since data without one counts for nothing."""
        self.abandon()
        self._index_path.unlink(missing_ok=True)
        self.data_path.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Know of no segment any more."""
        self._live.clear()
        self._offsets.clear()
        self.live_bytes = 0
        self.grows = False
