"""Creates, locks and protects the spool directories that the configuration names. Every function blocks.

Several workers may create the same directories at the same time, because the spools of all other workers are
in that of the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from zonerelay import durable
from zonerelay.store.contract import StoreOpenError


def make_configured(path: Path, option: str) -> None:
    """Create the directory that `[spool] option` names. Raises StoreOpenError with advice for the
    operator.
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
