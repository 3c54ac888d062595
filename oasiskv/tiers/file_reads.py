"""Reading ranges of segments: adjacent ones at once, each slot verified, and the reason found where one is not what it was."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from itertools import groupby

from .file_calls import Proceed
from .file_disk import errors_of, opened, read_all
from .file_folder import Folder, Found
from .file_pack import Pack
from .segments import Outcome, Read

_RUN_BYTES = 1 << 20
"""What is read at once at most. It is verified next, while the processor's cache still has it."""

_RUN_BUFFERS = 1024

_Wanted = tuple[int, int, int, Found]
"""Number of a pack, offset in its data file, the position of the read among all, and its segment. Sorted like this."""


class Loading:
    """Some reads, on one thread.

    Args:
        direct: `O_DIRECT`, or 0 to read through the page cache.

    Attributes:
        outcomes: of the reads, when `run` has returned.
    """

    def __init__(self, folder: Folder, reads: Sequence[Read], slot_bytes: int, direct: int) -> None:
        self.outcomes = [Outcome.MISS] * len(reads)
        self._folder = folder
        self._reads = reads
        self._slot_bytes = slot_bytes
        self._direct = direct

    def run(self, proceed: Proceed) -> None:
        """Fill the buffers. Raises `TierUnavailable`, and what `proceed` raises."""
        todo = list(range(len(self._reads)))
        with errors_of(self._folder.path):
            while todo:  # again for those whose segment went somewhere else meanwhile
                again: list[int] = []
                for _, wanted in groupby(self._find(todo), key=lambda entry: entry[0]):
                    again += self._load_from_pack(list(wanted), proceed)
                todo = again

    def _find(self, todo: list[int]) -> list[_Wanted]:
        reads = self._reads
        wanted = []
        for position, found in zip(todo, self._folder.find([reads[position].key for position in todo]), strict=True):
            read = reads[position]
            if found is not None and read.offset + read.into.nbytes <= found.segment.nbytes:
                wanted.append((found.pack.number, found.segment.offset + read.offset, position, found))
        wanted.sort()
        return wanted

    def _load_from_pack(self, wanted: list[_Wanted], proceed: Proceed) -> list[int]:
        """Returns the positions of reads to be tried again."""
        pack = wanted[0][3].pack
        try:
            return self._load_with(os.O_RDONLY | self._direct, pack, wanted, proceed)
        except FileNotFoundError:
            self._folder.lose(pack)
            return [position for _, _, position, _ in wanted]
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        # The file system refuses O_DIRECT, or the caller's buffers are not aligned.
        return self._load_with(os.O_RDONLY, pack, wanted, proceed)

    def _load_with(self, flags: int, pack: Pack, wanted: list[_Wanted], proceed: Proceed) -> list[int]:
        again: list[int] = []
        hold = self._folder.checks.hold
        since = _RUN_BYTES
        with opened(pack.data_path, flags) as fd:
            for run, size in self._runs(wanted):
                if since >= _RUN_BYTES:
                    proceed()
                    since = 0
                since += size
                read_all(fd, [self._reads[position].into for _, _, position, _ in run], run[0][1])
                for _, _, position, found in run:
                    # A run that is not whole may still have filled the buffers of some reads; each is judged by its slots.
                    read, segment = self._reads[position], found.segment
                    if hold(segment.checks, read.into, read.offset // self._slot_bytes, segment.slots):
                        self.outcomes[position] = Outcome.HIT
                    elif self._folder.forget(found):
                        self.outcomes[position] = Outcome.CORRUPT
                    else:
                        again.append(position)
        return again

    def _runs(self, wanted: list[_Wanted]) -> Iterator[tuple[list[_Wanted], int]]:
        """Reads that follow each other in the file, and their bytes."""
        run: list[_Wanted] = []
        size = 0
        for entry in wanted:
            count = self._reads[entry[2]].into.nbytes
            if run and (entry[1] != run[0][1] + size or size + count > _RUN_BYTES or len(run) == _RUN_BUFFERS):
                yield run, size
                run, size = [], 0
            run.append(entry)
            size += count
        if run:
            yield run, size
