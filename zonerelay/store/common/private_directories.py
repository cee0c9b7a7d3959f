"""Directories and files beside mail: no other user may read them, and they survive a power cut.

Several workers may be making the same ones at the same time: the spool of each but the first is in that of
the first. Blocks.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def make_private(path: Path) -> None:
    """With the parents that it lacks, each for its owner alone (`Path.mkdir` does not do that for parents).
    Raises OSError.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        sync(each.parent)


def take_from_others(directory: Path) -> None:
    """No other user of the machine reads the files of a directory that was there before, with whatever mode.

    The rights of a group stay. Files that are not ours, or that go meanwhile, are left alone. Raises OSError.
    """
    for each in directory.iterdir():
        with contextlib.suppress(PermissionError, FileNotFoundError):
            mode = each.lstat().st_mode
            if stat.S_ISREG(mode) and mode & stat.S_IRWXO:
                each.chmod(stat.S_IMODE(mode) & ~stat.S_IRWXO)


def write_durably(path: Path, content: bytes) -> None:
    """Writes the whole file or leaves it as it was. Raises OSError."""
    part = path.with_name(f"{path.name}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
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
