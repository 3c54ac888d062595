"""The file tier: segments in files of a folder, on NVMe or on any other file system."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Self

import anyio

from ..errors import ConfigError, OasisError, StateError
from .abc import TierStore
from .checks import check_objects, check_reads
from .file_calls import Calls
from .file_folder import Folder
from .file_reads import Loading
from .location import Location, local_path
from .segments import Outcome, Read, SegmentKey, SegmentLayout, TierTraits
from .threads import Proceed

_PAGE_BYTES = 4096
_SHARE_BYTES = 2 << 20
"""A thread of its own pays off from here on."""

_PATIENCE_S = 5.0


class FileStore(TierStore):
    """Segments in a folder of the file system, found again by the next process: `file:/var/cache/kv?limit=20GiB`.

    One store at a time may have a folder open. It knows nothing of what other programs do there, but survives it: what was
    removed is a miss, what was changed is found by its checksum.

    When something is safe: what `store` has returned for outlives the process, however that ends. A loss of power may take or
    damage some of it; damage is found by its checksum when it is read, so nothing wrong is ever given out. With `sync=yes`,
    `store` returns only when the medium has everything, and a loss of power takes nothing.

    The order of use is kept in memory. The next process starts with the order in which files were written.

    Segments lie in *packs*, files of bounded size that grow at their end. What is forgotten becomes a hole in its file, and a
    pack of which less than a quarter is left is emptied into the one that grows. On a file system without holes, room is made
    by giving up whole packs.

    Args:
        layout: of the segments; the folder holds one layout.
        path: of the folder, made if it is not there; `~` is the home directory.
        limit_bytes: what the segments may take. Beside it there is an index, on the disk and in memory: 8 bytes per slot and
            per 64 KiB, and about 100 (in memory 600) per segment.
        sync: whether `store` waits for the medium.
        direct: read past the page cache, with `O_DIRECT`, where the file system can and slots and the caller's buffers are
            aligned to 4096 bytes; elsewhere through it. For hosts whose memory is needed for better. Not the default: what was
            stored or read lately comes from the page cache at 10 times the speed of a disk, and on the disk that this was tried
            on, direct reads are 10 to 30% faster on one thread, and slower on four.
        threads: that read at once.
        pack_bytes: size of a file, by default a 16th of the limit and 1 GiB at most.
    """

    def __init__(
        self,
        layout: SegmentLayout,
        path: str | os.PathLike[str],
        limit_bytes: int | None = None,
        *,
        sync: bool = False,
        direct: bool = False,
        threads: int = 4,
        pack_bytes: int | None = None,
    ) -> None:
        super().__init__(layout)
        self._path = local_path(path)
        self._limit = limit_bytes
        self._sync = sync
        self._direct = getattr(os, "O_DIRECT", 0) if direct and layout.slot_bytes % _PAGE_BYTES == 0 else 0
        self._threads = threads
        self._pack_bytes = pack_bytes
        self._traits = TierTraits(persistent=True, alignment_bytes=_PAGE_BYTES if self._direct else 1)
        self._readers = anyio.CapacityLimiter(threads)
        self._writers = anyio.CapacityLimiter(1)
        self._opened = False
        self._folder: Folder | None = None
        self._calls = Calls(f"the file tier in {self._path}", self._release)

    @classmethod
    def at(cls, location: Location, layout: SegmentLayout) -> Self:
        limit, sync, direct = location.limit(layout.segment_bytes), location.flag("sync", False), location.flag("direct", False)
        location.finish()
        if not location.path:
            raise ConfigError(f"tier {location.text!r} names no folder; write file:/path/to/folder?limit=20GiB")
        return cls(layout, location.path, limit, sync=sync, direct=direct)

    @property
    def traits(self) -> TierTraits:
        return self._traits

    @property
    def used_bytes(self) -> int:
        return self._folder.used_bytes if self._folder else 0

    @property
    def limit_bytes(self) -> int | None:
        return self._limit

    async def open(self) -> None:
        if self._opened:
            raise StateError(f"the file tier in {self._path} has been opened before; make a new one")
        self._opened = True
        try:
            await self._calls.run(self._open, self._writers)
        except BaseException:
            await self.aclose()
            raise

    def _open(self, _: Proceed) -> None:
        self._folder = Folder(self._path, self.layout, self._limit, self._pack_bytes, sync=self._sync)

    async def store(self, objects: Sequence[tuple[SegmentKey, memoryview]]) -> None:
        folder = self._open_folder()
        check_objects(objects, self.layout, self._traits)
        await self._calls.run(lambda proceed: folder.store(objects, proceed), self._writers)

    async def load(self, reads: Sequence[Read]) -> list[Outcome]:
        folder = self._open_folder()
        check_reads(reads, self.layout, self._traits)
        total = sum([read.into.nbytes for read in reads])
        shares = max(1, min(self._threads, total // _SHARE_BYTES))
        count = max(1, math.ceil(len(reads) / shares))
        loadings = [
            Loading(folder, reads[start : start + count], self.layout.slot_bytes, self._direct)
            for start in range(0, len(reads), count)
        ]
        await self._run_all([loading.run for loading in loadings])
        return [outcome for loading in loadings for outcome in loading.outcomes]

    @property
    def load_blocking(self) -> Callable[[Sequence[Read]], list[Outcome]]:
        return self._load_here

    def _load_here(self, reads: Sequence[Read]) -> list[Outcome]:
        folder = self._open_folder()
        check_reads(reads, self.layout, self._traits)
        loading = Loading(folder, reads, self.layout.slot_bytes, self._direct)
        self._calls.begin()
        try:
            loading.run(self._calls.check)
        finally:
            self._calls.end()
        return loading.outcomes

    async def _run_all(self, pieces: Sequence[Callable[[Proceed], None]]) -> None:
        """Run pieces side by side. All have ended when the first error is raised."""
        failures: list[OasisError] = []

        async def run(piece: Callable[[Proceed], None]) -> None:
            try:
                await self._calls.run(piece, self._readers)
            except OasisError as error:
                failures.append(error)

        async with anyio.create_task_group() as group:
            for piece in pieces[1:]:
                group.start_soon(run, piece)
            if pieces:
                await run(pieces[0])
        if failures:
            raise failures[0]

    async def contains(self, keys: Sequence[SegmentKey]) -> list[bool]:
        folder = self._open_folder()
        return [key in folder for key in keys]

    async def delete(self, keys: Sequence[SegmentKey]) -> None:
        folder = self._open_folder()
        await self._calls.run(lambda proceed: folder.delete(keys, proceed), self._writers)

    async def aclose(self) -> None:
        await self._calls.close(_PATIENCE_S)

    def _release(self) -> None:
        if self._folder:
            self._folder.release()

    def _open_folder(self) -> Folder:
        self._calls.check()
        if self._folder is None:
            raise StateError(f"the file tier in {self._path} is not open; enter it with 'async with'")
        return self._folder
