"""Reserves disk space in a file of real blocks, which is removed when the disk is full.

LevelDB writes a table before it opens a spool whose log is not empty, and a log before it removes anything.
Without a reserve a queue on a full disk could never be drained. The reserve counts as free space. Every
function blocks and is called in the store's reader thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from zonerelay.store.contract import StoreFullError

T = TypeVar("T")

FILE_NAME = "ballast"
"""In the spool's directory, where LevelDB ignores unknown names."""

PART = 4
"""The divisor of the full size that gives the part needed to reopen the spool: a table and a manifest."""

_ROUNDING = 1024 * 1024

_log = logging.getLogger("zonerelay.store")


class ReserveFile:
    """The reserve file of a spool. `held` is its size in bytes. A `size` of 0 disables it."""

    def __init__(self, directory: Path, size: int) -> None:
        self._path = directory / FILE_NAME
        self._size = size
        self._was_needed = False
        self.held = self._found()

    def _found(self) -> int:
        """Return the size of the file that the last run left."""
        with contextlib.suppress(OSError):
            return self._path.stat().st_blocks * 512
        return 0

    @property
    def is_whole(self) -> bool:
        return self._size <= self.held <= self._size + _ROUNDING

    def count_in(self, free: int, *, wanted: int) -> int:
        """Return the free space including the reserve, and restore the reserve if there is enough space.

        After the reserve was used, restoring it needs more space (`size` in addition to `wanted`). LevelDB
        has just discarded its output when it was reopened, and writes it again. Without free space it would
        fail again and again, and nothing would leave the queue. Until then a part is reserved, because that
        output may fill the disk once more.
        """
        counted = free + self.held
        if self._was_needed and counted < wanted + self._size:
            part = self._size // PART
            if self.held < part and free >= 2 * part:
                self._keep(part)
        elif not self.is_whole and free >= wanted:
            self.make()
        return counted

    def make(self) -> None:
        """Create the reserve. If there is too little space, or the file system cannot do it, it is tried
        again later.
        """
        if not self._size:
            self.drop()
        elif self._keep(self._size):
            self._was_needed = False

    def _keep(self, size: int) -> bool:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, min(size, os.fstat(descriptor).st_size))
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            _log.warning("cannot keep room back for a full disk: %s", error)
            self.drop()
            return False
        self.held = size
        return True

    def make_way(self, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt`. If the disk is full, remove the reserve and call `attempt` once
        more.
        """
        try:
            return attempt()
        except StoreFullError:
            if not self.drop():
                raise
        return attempt()

    def drop(self) -> bool:
        """Remove the reserve, and return false if there was none."""
        had, self.held = self.held, 0
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            _log.error("cannot give up the room that was kept back for a full disk: %s", error)
            return False
        if had:
            self._was_needed = True
            _log.warning("gave up the room that was kept back for a full disk: %d bytes", had)
        return True
