"""One process at a time may use a folder of the file tier."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ..errors import TierUnavailable


class FolderLock:
    """An exclusive lock on `oasiskv.lock` in a folder, which ends with the process at the latest, however that ends."""

    def __init__(self, folder: Path) -> None:
        """Raises `TierUnavailable` if another store has the folder, `OSError` if the file cannot be made."""
        self._path = folder / "oasiskv.lock"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.check()  # the file may have been deleted since it was opened, and its successor locked by somebody else
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace") or "unknown"
            os.close(self._fd)
            raise TierUnavailable(
                f"the folder {folder} is in use by process {holder}, or a child that it has forked; "
                "close its file tier first, or use another folder"
            ) from None
        except BaseException:
            os.close(self._fd)
            raise

    def check(self) -> None:
        """Raises `TierUnavailable` if the file that is locked is not there any more: the folder may be somebody else's now."""
        if not self._path.exists() or not os.path.samestat(os.fstat(self._fd), os.lstat(self._path)):
            raise TierUnavailable(f"{self._path} has been removed while the folder was in use; open the file tier again")

    def release(self) -> None:
        """Give the folder back. In a forked child, the parent keeps it."""
        os.close(self._fd)
