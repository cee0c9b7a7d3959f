"""Detects changed files, and opens SQLite databases next to the spool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from zonerelay import durable
from zonerelay.process.threads import Closable

if TYPE_CHECKING:
    import sqlite3

C = TypeVar("C", bound=Closable)

# What tells a file that has changed from one that has not, for files that are read again then.
#
# A relay runs for years: packages replace the certificate authorities, DHCP and VPNs the name servers.

FileState = tuple[int, ...]


def file_state(path: str | Path) -> FileState:
    """Return a value that identifies the state of a file (its times, inode, device and size), following
    links. It changes when the file is modified, replaced or removed.

    Runs on the event loop: a stat takes microseconds on a small local file, and a thread would cost a
    hundred.
    """
    try:
        found = os.stat(path)  # noqa: PTH116  (half the time of Path.stat)
    except OSError as error:
        return (error.errno or 0,)
    # The change time reveals a chmod, the inode a rename.
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev, found.st_size)


def identity(path: Path) -> tuple[int, int] | None:
    """Return a file's device and inode numbers, which change if it is replaced, or None if it does
    not exist.
    """
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


_BUSY, _READ_ONLY, _CORRUPT, _FULL, _CANNOT_OPEN, _NO_DATABASE = 5, 8, 11, 13, 14, 26
_SQLITE = {
    _BUSY: "another process has locked it",
    _READ_ONLY: "the relay is not allowed to write to it",
    _CORRUPT: "it is damaged",
    _FULL: "the disk is full",
    _CANNOT_OPEN: "the relay is not allowed to open it or its directory",
    _NO_DATABASE: "it is damaged",
}
"""By result codes of SQLite, which https://sqlite.org/rescode.html explains."""


def in_words(error: Exception) -> str:
    """Describe an OSError or SQLite error in a few words."""
    if isinstance(error, OSError):
        # asyncio writes "Connect call failed" for the reason. The numbers of TLS and DNS are their own.
        of_system = type(error) is OSError or isinstance(error, ConnectionError)
        return os.strerror(error.errno) if error.errno and of_system else error.strerror or str(error)
    return _SQLITE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, str(error))


def is_damage(error: Exception) -> bool:
    """Return whether an SQLite error means that the content of the file is damaged."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (_CORRUPT, _NO_DATABASE)


@contextlib.contextmanager
def closed_on_failure(opened: C) -> Iterator[C]:
    """Yield an object, and close it if the block fails."""
    try:
        yield opened
    except BaseException:
        opened.close()
        raise


class SideDatabase:
    """An SQLite database in the spool directory. It is opened on first use, and reopened when its file has
    been removed or replaced, because SQLite would continue to use a file that nobody else sees. Blocks.
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
        """Whether the open database file was removed or replaced."""
        return self._database is not None and identity(self.path) != self._identity

    def opened(self) -> sqlite3.Connection:
        """Return the open connection, and open or reopen the database if necessary. Raise sqlite3.Error or
        OSError if the database cannot be opened.
        """
        if self.is_gone:
            self.close()
        if self._database is None:
            # SQLite does not wait for other processes while it sets the journal mode of a new file.
            with durable.locked_directory(self.path.parent) if self._lock else contextlib.nullcontext():
                self._database, self._identity = self._connect(self.path), identity(self.path)
        return self._database

    def close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()
