"""Lets the processes of a relay change what lies in one directory one after the other.

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
