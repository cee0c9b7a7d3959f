"""The directories of spools that the configuration names: made, locked, and closed to other users. Blocks.

Several workers may be making the same ones at the same time: the spool of each but the first is in that of
the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import stat
from pathlib import Path

from zonerelay import durable
from zonerelay.store.contract import StoreOpenError


def make_configured(path: Path, option: str) -> None:
    """Makes the directory that `[spool] option` names. Raises StoreOpenError, which says what to do."""
    try:
        durable.make_directory(path)
    except OSError as error:
        raise StoreOpenError(
            f"cannot create the directory {path} ([spool] {option}): {error.strerror}; create it and give it"
            " to the user that zonerelay runs as, or choose another one"
        ) from error
    if not path.is_dir():
        raise StoreOpenError(f"{path} is not a directory; choose another [spool] {option}")


def lock_configured(descriptor: int, path: Path, option: str) -> None:
    """Locks an open file or directory until it is closed.

    Raises StoreOpenError when another relay has the lock, and OSError.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreOpenError(
            f"another zonerelay has {path} open; stop it or choose another [spool] {option}: two relays"
            " cannot share one"
        ) from error


def take_from_others(directory: Path) -> None:
    """No other user of the machine reads the files of a directory that was there before, with whatever mode.

    The rights of a group stay. Files that are not ours, or that go meanwhile, are left alone, and so are
    links to the files of another directory, as a snapshot has them. Raises OSError.
    """
    for each in directory.iterdir():
        with contextlib.suppress(PermissionError, FileNotFoundError):
            found = each.lstat()
            mode = found.st_mode
            if stat.S_ISREG(mode) and mode & stat.S_IRWXO and found.st_nlink == 1:
                each.chmod(stat.S_IMODE(mode) & ~stat.S_IRWXO)
