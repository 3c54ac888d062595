"""Reading ranges of segments: adjacent ones at once, each slot verified, and the reason found where one is not what it was."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from itertools import groupby

from .file_disk import errors_of, opened, read_all
from .file_folder import Folder, Found
from .file_pack import Pack
from .segments import Outcome, Read
from .threads import Proceed

_RUN_BYTES = 1 << 20
"""What is read at once at most. It is verified next, while the processor's cache still has it."""

_RUN_BUFFERS = 1024

_Wanted = tuple[int, int, int, memoryview, int, Found]
"""Number of a pack, offset in its data file, and position of the read among all, by which this is sorted; then the buffer, its
first slot in the segment, and where that was found."""


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
        reads, slot_bytes = [self._reads[position] for position in todo], self._slot_bytes
        wanted = [
            (found.pack.number, found.segment.offset + read.offset, position, read.into, read.offset // slot_bytes, found)
            for position, read, found in zip(todo, reads, self._folder.find([read.key for read in reads]), strict=True)
            if found is not None and read.offset + read.into.nbytes <= found.segment.nbytes
        ]
        wanted.sort()
        return wanted

    def _load_from_pack(self, wanted: list[_Wanted], proceed: Proceed) -> list[int]:
        """Returns the positions of reads to be tried again."""
        pack = wanted[0][5].pack
        try:
            return self._load_with(os.O_RDONLY | self._direct, pack, wanted, proceed)
        except FileNotFoundError:
            self._folder.lose(pack)
            return [entry[2] for entry in wanted]
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
        # The file system refuses O_DIRECT, or the caller's buffers are not aligned.
        return self._load_with(os.O_RDONLY, pack, wanted, proceed)

    def _load_with(self, flags: int, pack: Pack, wanted: list[_Wanted], proceed: Proceed) -> list[int]:
        again: list[int] = []
        hold, outcomes = self._folder.checks.hold, self.outcomes
        since = _RUN_BYTES
        with opened(pack.data_path, flags) as fd:
            for run, size in _runs(wanted):
                if since >= _RUN_BYTES:
                    proceed()
                    since = 0
                since += size
                read_all(fd, [entry[3] for entry in run], run[0][1], size)
                for _, _, position, into, first, found in run:
                    # Of a run that was cut short, the first reads may be whole; each is judged by its checksums.
                    if hold(found.segment.checks, into, first, found.segment.slots):
                        outcomes[position] = Outcome.HIT
                    elif self._folder.forget(found):
                        outcomes[position] = Outcome.CORRUPT
                    else:
                        again.append(position)
        return again


def _runs(wanted: list[_Wanted]) -> Iterator[tuple[list[_Wanted], int]]:
    """Reads that follow each other in the file, and their bytes."""
    run: list[_Wanted] = []
    size = 0
    for entry in wanted:
        count = entry[3].nbytes
        if run and (entry[1] != run[0][1] + size or size + count > _RUN_BYTES or len(run) == _RUN_BUFFERS):
            yield run, size
            run, size = [], 0
        run.append(entry)
        size += count
    if run:
        yield run, size
