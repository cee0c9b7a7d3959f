"""Writes files durably, so that they survive a power failure, and locks directories between processes.

This is the only module that creates, replaces or renames such files. `tests/unit/test_durable_files.py`
forbids other ways, and lists the exceptions (storage engines, locks, output for the operator) with their
reasons.

Promise: when a function returns, the file, its name and the names of the directories that were created for it
are on disk. When it raises OSError, the old file is unchanged. A reader finds the complete old file or the
complete new one. All functions block.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
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
    """Replace the content of a file durably. The mode is set before the content is written, and a command
    that runs as root keeps the file's owner. `dress` sets another owner and mode on the descriptor of the new
    file instead. A symbolic link is kept.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():  # root could replace a device
        raise OSError(errno.EINVAL, "not a regular file", str(path))
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
    """Create a file with this content unless it exists. Return False if another process was first."""
    with _draft_of(path, mode) as (draft, file):
        _fill(file, content)
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
    sync_directory(path.parent)
    return True


def append(path: Path, content: bytes, *, mode: int = PRIVATE) -> None:
    """Append to a file, which is created if it does not exist."""
    is_new = not path.exists()
    with open(path, "ab", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)
        file.flush()
        os.fdatasync(file.fileno())
    if is_new:
        sync_directory(path.parent)


def copy(source: Path, target: Path) -> None:
    """Copy a file with its permissions, creating the directory of the target."""
    make_directory(target.parent)
    with source.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        write(target, iter(lambda: file.read(_PIECE), b""), mode=mode)


def rename(old: Path, new: Path) -> None:
    """Rename a file or a directory, replacing a file of the new name. The content of a file is synced first;
    for a directory see `sync_tree`.
    """
    if old.is_file():
        _sync(old, 0)
    old.replace(new)
    sync_directory(new.parent)
    if old.parent != new.parent:
        sync_directory(old.parent)


def unlink(path: Path) -> None:
    """Remove a file so that it does not reappear after a crash. A missing file is not an error."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        sync_directory(path.parent)


def make_directory(path: Path, mode: int = 0o700) -> None:
    """Create a directory and its missing parents, all with this mode. Several processes may create the same
    one at the same time.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=mode, exist_ok=True)
        sync_directory(each.parent)


@contextlib.contextmanager
def locked_directory(directory: Path, *, patience: float | None = None) -> Iterator[int]:
    """Lock a directory for the block, and yield its descriptor; the directory is created if it does not
    exist. Raise OSError if that fails, or if the lock is not free within `patience` seconds.
    """
    make_directory(directory)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = None if patience is None else time.monotonic() + patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if until is None else fcntl.LOCK_NB))
                break
            except BlockingIOError as error:
                if until is not None and time.monotonic() >= until:
                    raise OSError(error.errno, "another process has locked the directory") from error
                time.sleep(0.02)
        yield descriptor
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Sync a directory, so that the names of new files in it survive a crash."""
    _sync(directory, os.O_DIRECTORY)


def sync_tree(directory: Path) -> None:
    """Sync all files and directories below a directory. The caller makes the directory's own name durable."""
    # One sync for all files, because syncing each of many new files causes a commit of the file system for
    # each. It reports no errors, however; the syncs of the files that follow do, and cost nothing then.
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
    """Yield a temporary file next to `path` that no other process writes. It is removed at the end, unless it
    was renamed.
    """
    draft = path.with_name(f".{path.name[:_MAX_PREFIX]}.{secrets.token_hex(4)}{DRAFT}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            yield draft, file
    except OSError as error:
        # The error of a failed write does not name its file, and an operator does not know the temporary
        # file.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        draft.unlink(missing_ok=True)


def _fill(file: IO[bytes], content: bytes | Iterable[bytes]) -> None:
    for piece in (content,) if isinstance(content, bytes) else content:
        file.write(piece)
    file.flush()
    os.fsync(file.fileno())
