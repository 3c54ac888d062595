"""The segments of a folder: which pack has them, in what order they were used, and what goes when the limit is reached."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..errors import TierFull
from .file_checks import Checks
from .file_disk import errors_of, is_full, opened, read_all, sync_names
from .file_index import Placed
from .file_lock import FolderLock
from .file_pack import Pack, Sealed
from .segments import SegmentKey, SegmentLayout

_NAME = re.compile(r"oasiskv-(\d{8})\.(?:data|index)")
_GROUP_BYTES = 8 << 20
"""What is written and registered at once: how long others wait for a writer, and what a cancelled store may still write."""

_PACK_BYTES = (64 << 10, 1 << 30)
"""The least and the most that a pack may hold; between them, a limit is divided into 16 packs."""

_SPARSE = 0.25
"""A pack of which less than this is left is emptied into another one: writing grows by a third at most."""


class Found(NamedTuple):
    """Where a segment is now."""

    pack: Pack
    segment: Placed


class Folder:
    """Blocks, and may be called from any thread. Raises `TierUnavailable` and `TierFull`.

    One thread writes at a time, under `_writing`. `_table` guards what readers look at, and is never held while the disk works.
    """

    def __init__(self, path: Path, layout: SegmentLayout, limit: int | None, pack_bytes: int | None, *, sync: bool) -> None:
        self.path = path
        self.checks = Checks(layout.slot_bytes)
        self._layout = layout
        self._limit = limit
        self._sync = sync
        least, most = _PACK_BYTES
        self._pack_bytes = pack_bytes or (most if limit is None else min(most, max(limit // 16, least)))
        self._writing = threading.Lock()
        self._table = threading.Lock()
        self._segments: OrderedDict[SegmentKey, Found] = OrderedDict()
        self._packs: dict[int, Pack] = {}
        self._next_number = 0
        self._punches = True
        self.used_bytes = 0
        with errors_of(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(path)
            try:
                self._adopt_packs()
                self._make_room(0)
                if sync:
                    sync_names(path)
            except BaseException:
                self._lock.release()
                raise

    def release(self) -> None:
        """Let other processes have the folder. Nothing may be running or be called any more."""
        self._lock.release()

    def _adopt_packs(self) -> None:
        numbers = {int(match[1]) for name in os.listdir(self.path) if (match := _NAME.fullmatch(name))}
        for number in sorted(numbers):
            pack = Pack(self.path, number, self._layout)
            if not pack.adopt():
                pack.remove()
                continue
            for earlier in self._packs.values():
                earlier.grows = False
            self._packs[number] = pack
            for segment in pack.live:
                older = self._segments.pop(segment.key, None)
                if older:  # a move that was cut short: both are whole
                    self._give_up(older)
                self._segments[segment.key] = Found(pack, segment)
        self._next_number = max(numbers, default=0) + 1
        self._count()

    def __contains__(self, key: SegmentKey) -> bool:
        return key in self._segments

    def find(self, keys: Sequence[SegmentKey]) -> list[Found | None]:
        """Where segments are; they count as used now."""
        with self._table:
            found = [self._segments.get(key) for key in keys]
            for place in dict.fromkeys(found):  # many reads are of few segments
                if place is not None:
                    self._segments.move_to_end(place.segment.key)
        return found

    def store(self, objects: Sequence[tuple[SegmentKey, memoryview]], proceed: Callable[[], None]) -> None:
        """Write objects that are not there yet, group by group. `proceed` is called before each, and may raise."""
        for group in self._groups(objects):
            proceed()
            with self._changing():
                known = self.find([key for key, _ in group])
                new = {key: data for (key, data), place in zip(group, known, strict=True) if place is None}
                if new:
                    self._make_room(sum(data.nbytes for data in new.values()))
                    self._write([(key, data, self.checks.of(data)) for key, data in new.items()])
                    self._thin_out()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """What changes files does so here: alone, in a folder that is still ours."""
        with errors_of(self.path), self._writing:
            self._lock.check()
            yield

    def _groups(self, objects: Sequence[tuple[SegmentKey, memoryview]]) -> Iterator[list[tuple[SegmentKey, memoryview]]]:
        most = min(_GROUP_BYTES, self._pack_bytes, self._limit or _GROUP_BYTES)
        group: list[tuple[SegmentKey, memoryview]] = []
        size = 0
        for key, data in objects:
            if group and size + data.nbytes > most:
                yield group
                group, size = [], 0
            group.append((key, data))
            size += data.nbytes
        if group:
            yield group

    def _write(self, objects: Sequence[Sealed]) -> None:
        count = sum(data.nbytes for _, data, _ in objects)
        pack = self._growing(count)
        try:
            added = pack.append(objects, sync=self._sync)
        except FileNotFoundError:  # somebody has removed its files: it is lost, and a new one takes the objects
            self._lose(pack)
            pack = self._growing(count)
            added = pack.append(objects, sync=self._sync)
        except OSError:
            if not pack.live:
                self._remove(pack)
            raise
        with self._table:
            for segment in added:  # one that was only moved keeps its place in the order of use
                self._segments[segment.key] = Found(pack, segment)
        self._count()

    def _growing(self, count: int) -> Pack:
        """A pack that has room for `count` bytes, or a new one."""
        last = next(reversed(self._packs.values()), None)
        if last is not None and last.grows:
            if not last.size or last.size + count <= self._pack_bytes:
                return last
            last.grows = False
            if not last.live:
                self._remove(last)
        pack = Pack.create(self.path, self._next_number, self._layout, sync=self._sync)
        self._packs[pack.number] = pack
        self._next_number += 1
        return pack

    def _make_room(self, count: int) -> None:
        if self._limit is None:
            return
        if count > self._limit:
            raise TierFull(
                f"a segment of {count} bytes does not fit into {self.path}, which may hold {self._limit}; raise its limit"
            )
        while self.used_bytes + count > self._limit:
            with self._table:
                oldest = next(iter(self._segments.values()), None)
            if oldest is None:  # what is left are dead parts that only whole files give back
                self._remove(next(iter(self._packs.values())))
            elif self._punches:
                self._forget(oldest)
            else:
                self._remove(oldest.pack)

    def delete(self, keys: Sequence[SegmentKey], proceed: Callable[[], None]) -> None:
        """Forget segments and give their space back. `proceed` is called before each, and may raise."""
        for key in keys:
            proceed()
            with self._changing():
                found = self._segments.get(key)
                if found:
                    self._forget(found)
                    self._thin_out()

    def forget(self, found: Found) -> bool:
        """Forget a segment that turned out to be damaged; false if it is not there any more, or somewhere else by now."""
        with self._changing():
            there = self._segments.get(found.segment.key) is found
            if there:
                self._forget(found)
        return there

    def lose(self, pack: Pack) -> None:
        """Know no more of a pack whose files are gone."""
        with self._writing:
            self._lose(pack)

    def _forget(self, found: Found) -> None:
        with self._table:  # first of all, so that whoever reads what is left of its bytes finds it gone
            self._segments.pop(found.segment.key, None)
        self._give_up(found)
        self._count()

    def _give_up(self, found: Found) -> None:
        pack = found.pack
        try:
            self._punches = pack.forget(found.segment) and self._punches
        except FileNotFoundError:
            self._lose(pack)
        else:
            if not pack.live and not pack.grows:
                self._remove(pack)

    def _remove(self, pack: Pack) -> None:
        self._lose(pack)
        pack.remove()

    def _lose(self, pack: Pack) -> None:
        with self._table:
            for segment in pack.live:
                found = self._segments.get(segment.key)
                if found and found.segment is segment:
                    del self._segments[segment.key]
        pack.abandon()
        self._packs.pop(pack.number, None)
        self._count()

    def _thin_out(self) -> None:
        """Empty packs of which little is left into the one that grows: their number stays in proportion to the limit."""
        for pack in [pack for pack in self._packs.values() if not pack.grows and pack.live_bytes < pack.size * _SPARSE]:
            try:
                for segment in pack.live:
                    self._move(pack, segment)
            except FileNotFoundError:  # lost, with what was still in it
                pass
            except OSError as error:
                if is_full(error):  # then it stays as it is: nobody has asked for this
                    return
                raise
            self._remove(pack)

    def _move(self, pack: Pack, segment: Placed) -> None:
        data = memoryview(bytearray(segment.nbytes))
        with opened(pack.data_path, os.O_RDONLY) as fd:
            read_all(fd, [data], segment.offset, segment.nbytes)
        if self.checks.of(data) == segment.checks:
            self._write([(segment.key, data, segment.checks)])

    def _count(self) -> None:
        self.used_bytes = sum(pack.live_bytes if self._punches else pack.size for pack in self._packs.values())
