"""Tells whether a file has changed, and lets processes change a directory one after the other; databases of
SQLite beside the spool.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay import durable

if TYPE_CHECKING:
    import sqlite3

# What tells a file that has changed from one that has not, for files that are read again then.
#
# A relay runs for years: packages replace the certificate authorities, DHCP and VPNs the name servers.

FileState = tuple[int, ...]


def file_state(path: str | Path) -> FileState:
    """Returns the state of the file at the end of all links. A file that is not there has one, too.

    Runs on the event loop: a stat takes microseconds on a small local file, a thread would cost a hundred.
    """
    try:
        found = os.stat(path)  # noqa: PTH116  (half the time of Path.stat)
    except OSError as error:
        return (error.errno or 0,)
    # The change time sees a chmod, the inode a rename.
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev, found.st_size)


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode, by which a process tells a file that it has made or opened from a successor."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


_BUSY, _READ_ONLY, _CORRUPT, _FULL, _CANNOT_OPEN, _NO_DATABASE = 5, 8, 11, 13, 14, 26
_SQLITE = {
    _BUSY: "another process has locked it",
    _READ_ONLY: "the relay may not write it",
    _CORRUPT: "it is damaged",
    _FULL: "the disk is full",
    _CANNOT_OPEN: "the relay may not open it or its directory",
    _NO_DATABASE: "it is damaged",
}
"""By result codes of SQLite, which https://sqlite.org/rescode.html explains."""


def in_words(error: Exception) -> str:
    """Return what is wrong with a file, by an OSError or an error of SQLite."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return _SQLITE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, str(error))


def is_damage(error: Exception) -> bool:
    """Whether what SQLite reports does not pass by itself: the content of the file is wrong."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (_CORRUPT, _NO_DATABASE)


@contextlib.contextmanager
def locked_directory(directory: Path) -> Iterator[int]:
    """Waits for the lock, and gives the open directory. Makes it when there is none. Raises OSError."""
    durable.make_directory(directory)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


class SideDatabase:
    """A database of SQLite beside the spool. It is opened when it is used, and again when its file has been
    removed or replaced, for SQLite would go on with a file that nobody else sees. Blocks.
    """

    def __init__(
        self, path: Path, connect: Callable[[Path], sqlite3.Connection], *, lock: bool = True
    ) -> None:
        self.path = path
        self._connect = connect
        self._lock = lock
        self._database: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None

    @property
    def is_gone(self) -> bool:
        """The file that is open is not there any more."""
        return self._database is not None and identity(self.path) != self._identity

    def opened(self) -> sqlite3.Connection:
        """Raises sqlite3.Error and OSError."""
        if self.is_gone:
            self.close()
        if self._database is None:
            # SQLite does not wait for other processes while it sets the journal mode of a new file.
            with locked_directory(self.path.parent) if self._lock else contextlib.nullcontext():
                self._database, self._identity = self._connect(self.path), identity(self.path)
        return self._database

    def close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()
