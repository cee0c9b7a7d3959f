"""Tells whether a file has changed, and lets processes change a directory one after the other.

A process that opens a SQLite file takes the lock as well: SQLite does not wait for other processes while it
sets the journal mode of a new file, it says at once that the database is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from zonerelay import durable

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
