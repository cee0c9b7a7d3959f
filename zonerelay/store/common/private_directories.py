"""Makes the directories and files beside mail, which no other user may read and which survive a power cut.

Several workers may be making the same ones at the same time: the spool of each but the first is in that of
the first. Blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
from pathlib import Path

from zonerelay.store.contract import StoreOpenError


def make_private(path: Path) -> None:
    """With the parents that it lacks, each for its owner alone (`Path.mkdir` does not do that for parents).
    Raises OSError.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        sync(each.parent)


def make_configured(path: Path, option: str) -> None:
    """Makes the directory that `[spool] option` names. Raises StoreOpenError, which says what to do."""
    try:
        make_private(path)
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


def write_durably(path: Path, content: bytes) -> None:
    """Writes the whole file or leaves it as it was; it stays its owner's. Raises OSError.

    Two threads or processes may write the same file: each has a draft of its own, and the last one counts.
    """
    part = path.with_name(f"{path.name}.{threading.get_native_id()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                old = path.stat()  # a command that root runs must leave it to the relay
                os.fchown(descriptor, old.st_uid, old.st_gid)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(directory: Path) -> None:
    """Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
