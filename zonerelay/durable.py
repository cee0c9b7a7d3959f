"""Writes the files that lie beside a spool, or that a command makes, so that they survive a power cut.

This is the only module that makes, replaces or renames such files; `tests/unit/test_durable_files.py` refuses
other ways, and lists the exceptions (storage engines, locks, output for the operator) with their reasons.

Promise: when a function returns, the file, its name and the names of the directories that were made for it
are on the disk. When it raises OSError, the old file is there as it was. A reader finds the whole old file or
the whole new one. Everything here blocks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

DRAFT = ".new"
"""The end of the name of a file that is being written. A power cut may leave one: it is nothing, and a reader
of a directory passes over it.
"""
PRIVATE = 0o600
_PIECE = 256 * 1024
_MAX_PREFIX = 100


def write(
    path: Path,
    content: bytes | Iterable[bytes],
    *,
    mode: int = PRIVATE,
    dress: Callable[[int], None] | None = None,
) -> None:
    """Replace the file. It has its mode before it has content, and a command that root runs leaves it to its
    owner. `dress` gives the descriptor of the new file another owner and mode instead. A symbolic link stays
    one.
    """
    path = path.resolve()
    with _draft_of(path, mode) as (draft, file):
        if dress is not None:
            dress(file.fileno())
        else:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                old = path.stat()
                os.fchown(file.fileno(), old.st_uid, old.st_gid)
        _fill(file, content)
        draft.replace(path)
    sync_directory(path.parent)


def create(path: Path, content: bytes, *, mode: int = PRIVATE) -> bool:
    """Make the file, unless there is one. False: another process was first, and its file is the file."""
    with _draft_of(path, mode) as (draft, file):
        _fill(file, content)
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
    sync_directory(path.parent)
    return True


def append(path: Path, content: bytes, *, mode: int = PRIVATE) -> None:
    """Write behind the end of the file, which is made if there is none."""
    is_new = not path.exists()
    with open(path, "ab", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)
        file.flush()
        os.fdatasync(file.fileno())
    if is_new:
        sync_directory(path.parent)


def copy(source: Path, target: Path) -> None:
    """Copy a file with the rights that it has. The directory of the target is made."""
    make_directory(target.parent)
    with source.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        write(target, iter(lambda: file.read(_PIECE), b""), mode=mode)


def rename(old: Path, new: Path) -> None:
    """Give a file or a directory another name, over a file that has it. What a file contains is synced first;
    for a directory see `sync_tree`.
    """
    if old.is_file():
        _sync(old, 0)
    old.replace(new)
    sync_directory(new.parent)
    if old.parent != new.parent:
        sync_directory(old.parent)


def unlink(path: Path) -> None:
    """Remove a file that would do harm if it came back. Its absence is no error."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        sync_directory(path.parent)


def make_directory(path: Path, mode: int = 0o700) -> None:
    """Make a directory with the parents that it lacks, all with this mode (`Path.mkdir` gives parents another
    one). Several processes may make the same one at a time.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=mode, exist_ok=True)
        sync_directory(each.parent)


def sync_directory(directory: Path) -> None:
    """Make durable which names a directory has."""
    _sync(directory, os.O_DIRECTORY)


def sync_tree(directory: Path) -> None:
    """Make durable what was written below a directory by other means: many files at once, a database. The
    directory's own name is its maker's business.
    """
    # One for all: a sync of each of many new files takes a commit of the file system for each. It tells no
    # errors, though; those of the files follow, which then cost nothing.
    os.sync()
    for place, _, names in os.walk(directory):
        for name in names:
            _sync(Path(place, name), os.O_NOFOLLOW)
        sync_directory(Path(place))


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _draft_of(path: Path, mode: int) -> Iterator[tuple[Path, IO[bytes]]]:
    """Yield a file beside `path` that no other writer has; it is gone afterwards, unless it was renamed."""
    draft = path.with_name(f".{path.name[:_MAX_PREFIX]}.{secrets.token_hex(4)}{DRAFT}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            yield draft, file
    except OSError as error:
        # A write that fails does not know its file, and an operator does not know the draft.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        draft.unlink(missing_ok=True)


def _fill(file: IO[bytes], content: bytes | Iterable[bytes]) -> None:
    for piece in (content,) if isinstance(content, bytes) else content:
        file.write(piece)
    file.flush()
    os.fsync(file.fileno())
