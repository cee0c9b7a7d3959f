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
