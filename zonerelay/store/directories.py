"""Manages what engines on local disks have in common: directories, the reserve file, and the reader threads.

Several workers may create the same directories at the same time, because the spools of all other workers are
in that of the first.

The reserve file consists of real blocks and is removed when the disk is full. LevelDB writes a table before
it opens a spool whose log is not empty, and a log before it removes anything. Without a reserve a queue on a
full disk could never be drained. The reserve counts as free space.

Functions and the methods of `ReserveFile` block. `ReaderThreads` runs them, so that reads continue while a
write syncs. A spool is opened and repaired in its only reader thread, while no write is active, so a read
never sees a half-opened database.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar, TypeVarTuple

from zonerelay import durable
from zonerelay.store.contract import StoreError, StoreFullError, StoreOpenError, Unhealthy


def make_configured(path: Path, option: str) -> None:
    """Create the directory that the option `option` in `[spool]` names. Raises StoreOpenError with advice for
    the operator.
    """
    try:
        durable.make_directory(path)
    except OSError as error:
        raise StoreOpenError(
            f"cannot create the directory {path} ([spool] {option}): {error.strerror}; create it for the "
            "user that zonerelay runs as, or choose another one"
        ) from error
    if not path.is_dir():
        raise StoreOpenError(f"{path} is not a directory; choose another [spool] {option}")


def lock_configured(descriptor: int, path: Path, option: str) -> None:
    """Lock an open file or directory until it is closed.

    Raises StoreOpenError if another relay has the lock, and OSError.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreOpenError(
            f"another zonerelay has opened {path}; stop it or choose another [spool] {option}, because two "
            "relays cannot share a directory"
        ) from error


def take_from_others(directory: Path) -> None:
    """Remove the permissions of other users from the files of an existing directory, whatever their mode.

    Permissions of the group stay. Files of other owners, files that are removed at the same time, and hard
    links to files of another directory, as in a snapshot, are left alone. Raises OSError.
    """
    for each in directory.iterdir():
        with contextlib.suppress(PermissionError, FileNotFoundError):
            found = each.lstat()
            mode = found.st_mode
            if stat.S_ISREG(mode) and mode & stat.S_IRWXO and found.st_nlink == 1:
                each.chmod(stat.S_IMODE(mode) & ~stat.S_IRWXO)


def lacks_inodes(path: Path) -> bool:
    """Return whether the file system has no free inodes. Return false if that is unknown or it does not count
    inodes.
    """
    try:
        usage = os.statvfs(path)
    except OSError:
        return False
    return usage.f_files > 0 and usage.f_favail == 0


T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Opened = TypeVar("Opened")

FILE_NAME = "ballast"
"""In the spool's directory, where LevelDB ignores unknown names."""

PART = 4
"""The divisor of the full size that gives the part needed to reopen the spool: a table and a manifest."""

_ROUNDING = 1024 * 1024

_log = logging.getLogger("zonerelay.store")


class ReserveFile:
    """The reserve file of a spool, which is removed when the disk is full. `held` is its size in bytes. A
    `size` of 0 disables it.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self._path = directory / FILE_NAME
        self._size = size
        self._was_needed = False
        self.held = self._found()

    def _found(self) -> int:
        """Return the size on disk of the reserve file that the previous process left, or 0 if there
        is none.
        """
        with contextlib.suppress(OSError):
            return self._path.stat().st_blocks * 512
        return 0

    @property
    def is_whole(self) -> bool:
        return self._size <= self.held <= self._size + _ROUNDING

    def count_in(self, free: int, *, wanted: int) -> int:
        """Return the free space with the reserve added to it, and restore the reserve if there is enough
        space.

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
        """Create the reserve file. If there is too little space, or the file system cannot do it, it is tried
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
            _log.warning("the reserve file for a full disk cannot be created: %s", error)
            self.drop()
            return False
        self.held = size
        return True

    def make_way(self, attempt: Callable[[], T]) -> T:
        """Call `attempt`, and once more after removing the reserve file if the disk is full. Return its
        result. Several threads may do this at the same time.
        """
        held = self.held
        try:
            return attempt()
        except StoreFullError:
            if not self.drop() and not held:
                raise
        return attempt()

    def drop(self) -> bool:
        """Remove the reserve file, and return false if there was none."""
        had, self.held = self.held, 0
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            _log.error("the reserve file for a full disk cannot be removed: %s", error)
            return False
        if had:
            self._was_needed = True
            _log.warning("removed the reserve file because the disk is full: %d bytes", had)
        return True


class ReaderThreads(Generic[Opened]):
    """Threads in which an engine runs blocking functions on the object that it has opened. An instance
    belongs to one event loop.
    """

    def __init__(self, opened: Opened, name: str, threads: int = 1) -> None:
        self.opened = opened
        self._executor = ThreadPoolExecutor(threads, name)
        self._loop = asyncio.get_running_loop()
        self._stopped = False

    def run(self, function: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Call `function(*args)` in a thread. Raises StoreError after `stop`."""
        if self._stopped:
            raise StoreError(Unhealthy.CLOSED)
        return self._loop.run_in_executor(self._executor, function, *args)

    async def read(self, function: Callable[[Opened, *Ts], T], *args: *Ts) -> T:
        """Call `function(opened, *args)` in a thread. Raises the exceptions of the function, which are
        StoreErrors.
        """
        return await self.run(function, self.opened, *args)

    def stop(self) -> None:
        """Block until every function that runs in a thread has returned."""
        self._stopped = True
        self._executor.shutdown()
