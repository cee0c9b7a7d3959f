"""Keeps room back for a full disk: a file of real blocks that is given up when the store needs space.

LevelDB writes a table before it opens a spool whose log holds anything, and a log before it removes
anything. So a queue on a disk that other programs have filled to the last block could never be drained. The
room counts as free space. All of this blocks: the store's reader thread calls it.
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
"""In the spool's directory, where LevelDB leaves names alone that it does not know."""

PART = 4
"""Of the whole: what a reopening takes, a table and a manifest."""

_ROUNDING = 1024 * 1024

_log = logging.getLogger("zonerelay.store")


class Ballast:
    """The file of one spool. `held` is how many bytes it keeps back; a `size` of 0 wants none."""

    def __init__(self, directory: Path, size: int) -> None:
        self._path = directory / FILE_NAME
        self._size = size
        self._was_needed = False
        self.held = self._found()

    def _found(self) -> int:
        """Return the bytes that the last run kept back."""
        with contextlib.suppress(OSError):
            return self._path.stat().st_blocks * 512
        return 0

    @property
    def is_whole(self) -> bool:
        return self._size <= self.held <= self._size + _ROUNDING

    def count_in(self, free: int, *, wanted: int) -> int:
        """`free` bytes and the room that is kept back; keeps it back again once there is plenty.

        After it was needed that is as much more: LevelDB, reopened, has just thrown away what it had written,
        and begins again. Without the room it would fail again, and again, and nothing would leave the queue.
        Until then a part is kept, for what it writes may fill the disk to its last block once more.
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
        """Keep the room back. When there is none after all, or the file system cannot: another time."""
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
        """Return the result of `attempt`, which is called once more without the room when the disk
        was full.
        """
        try:
            return attempt()
        except StoreFullError:
            if not self.drop():
                raise
        return attempt()

    def drop(self) -> bool:
        """Give the room to LevelDB; false when there was none."""
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
            _log.warning("gave up the room that was kept back for a full disk: %d octets", had)
        return True
