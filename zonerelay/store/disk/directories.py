"""The directories of the disk queue: made, locked for one relay, and proved to fit together.

Messages (`.env`), states (`.meta`) and work in progress (scratch) may each have a directory; the first two
may be the same. Each holds a file `zonerelay.lock`, locked while a relay runs, with the name of the queue
that it belongs to: a directory whose file system is not mounted, or that is another queue's, is refused,
because messages would otherwise look finished, or states lost. Renaming from scratch into place must be
atomic, so it is tried at every start. All of this blocks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zonerelay.config.settings import SpoolSettings
from zonerelay.store.common.private_directories import make_private
from zonerelay.store.contract import StoreError, StoreFullError, StoreOpenError
from zonerelay.store.spool_paths import disk_directories

LOCK_NAME = "zonerelay.lock"
_TRIAL = "zonerelay.trial"
_FORMAT = b"zonerelay queue 1 "
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turns an OSError into a StoreError that names the file."""
    try:
        yield
    except OSError as error:
        raise store_error(error) from error


def store_error(error: OSError) -> StoreError:
    kind = StoreFullError if error.errno in _FULL else StoreError
    return kind(f"the queue directory: {error}")


@dataclass(slots=True)
class Directory:
    """One open directory. `lock` is the descriptor of its locked file; `mark` what stood in it."""

    setting: str
    path: Path
    descriptor: int
    lock: int
    mark: bytes

    def sync(self) -> None:
        with translated():
            os.fsync(self.descriptor)

    def names(self) -> list[str]:
        with translated():
            return os.listdir(self.descriptor)  # noqa: PTH208 - pathlib has none for descriptors

    def remove(self, name: str) -> bool:
        """False when there was none."""
        with translated():
            try:
                os.unlink(name, dir_fd=self.descriptor)
            except FileNotFoundError:
                return False
            return True


@dataclass(slots=True)
class Directories:
    """Open until `close`. `env` and `meta` are one object when they are one directory."""

    env: Directory
    meta: Directory
    scratch: Directory
    _closed: bool = field(default=False, init=False)

    @property
    def is_shared(self) -> bool:
        return self.env is self.meta

    def free_space(self) -> int:
        """Octets that this process may still write to the file system of all three."""
        with translated():
            usage = os.fstatvfs(self.env.descriptor)
        return usage.f_bavail * usage.f_frsize

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            _close([self.env, self.meta, self.scratch])


def open_directories(settings: SpoolSettings) -> Directories:
    """Make, lock and try them. Raises StoreOpenError in words; removes no file of others."""
    env_path, meta_path, scratch_path = disk_directories(settings)
    opened: list[Directory] = []
    try:
        env = _open("env_directory", env_path, opened)
        meta = env if _same(env_path, meta_path) else _open("meta_directory", meta_path, opened)
        for other, path in (("env_directory", env_path), ("meta_directory", meta_path)):
            if scratch_path.exists() and _same(path, scratch_path):
                raise StoreOpenError(
                    f"{scratch_path} cannot be [spool] scratch_directory and {other} at once: scratch needs"
                    " a directory of its own"
                )
        scratch = _open("scratch_directory", scratch_path, opened)
        directories = Directories(env, meta, scratch)
        _try_renames(directories)
    except BaseException:
        _close(opened)
        raise
    return directories


def _same(one: Path, other: Path) -> bool:
    return one == other or (one.exists() and other.exists() and one.samefile(other))


def _open(setting: str, path: Path, opened: list[Directory]) -> Directory:
    _make(setting, path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=descriptor)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise StoreOpenError(
            f"[spool] {setting} {path} cannot be used: {error.strerror}; give it to the user that zonerelay"
            " runs as, or choose another directory"
        ) from error
    directory = Directory(setting, path, descriptor, lock, b"")
    opened.append(directory)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        directory.mark = os.pread(lock, 200, 0)
    except BlockingIOError as error:
        raise StoreOpenError(
            f"another zonerelay has this directory open: {path} ([spool] {setting}); stop it or choose"
            " another directory: two relays cannot share one"
        ) from error
    except OSError as error:
        raise StoreOpenError(f"{path} cannot be locked ([spool] {setting}): {error.strerror}") from error
    return directory


def _make(setting: str, path: Path) -> None:
    try:
        make_private(path)
    except OSError as error:
        raise StoreOpenError(
            f"cannot create the directory {path} ([spool] {setting}): {error.strerror}; create it and give it"
            " to the user that zonerelay runs as, or choose another one"
        ) from error
    if not path.is_dir():
        raise StoreOpenError(f"{path} is not a directory; choose another [spool] {setting}")


def _try_renames(directories: Directories) -> None:
    """Equal device numbers would not do: a rename between two mounts of one file system fails too."""
    scratch = directories.scratch
    for target in (directories.env, directories.meta):
        try:
            os.close(os.open(_TRIAL, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=scratch.descriptor))
            os.rename(_TRIAL, _TRIAL, src_dir_fd=scratch.descriptor, dst_dir_fd=target.descriptor)
            os.unlink(_TRIAL, dir_fd=target.descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(_TRIAL, dir_fd=scratch.descriptor)
            raise StoreOpenError(
                f"files cannot be renamed from {scratch.path} ([spool] scratch_directory) to {target.path}"
                f" ({target.setting}): {error.strerror}; both have to be on the same file system"
            ) from error


# --- what belongs together


def check_marks(directories: Directories, *, identity: str, pending: bool, used: bool) -> None:
    """All three carry one queue's name; new ones get it. StoreOpenError when they do not belong together.

    `used`: one of them holds messages or states; `pending`: the last run left work that is in scratch.
    """
    keep, scratch = [directories.env], directories.scratch
    if not directories.is_shared:
        keep.append(directories.meta)
    marked = [directory for directory in (*keep, scratch) if directory.mark]
    for directory in marked:
        if not directory.mark.startswith(_FORMAT):
            raise StoreOpenError(
                f"{directory.path / LOCK_NAME} is not of a queue that this zonerelay can read: run the"
                " release that wrote it, or drain the queue there first"
            )
    _check_same_queue(marked)
    unmarked = [d for d in keep if not d.mark] if used else []
    if not scratch.mark and pending:
        unmarked.append(scratch)
    if marked and unmarked:
        first, there = unmarked[0], marked[0]
        raise StoreOpenError(
            f"{first.path} ([spool] {first.setting}) is not a part of the queue in {there.path}: is its file"
            f" system mounted? If it is right as it is, copy {there.path / LOCK_NAME} into it"
        )
    mark = marked[0].mark if marked else b"%b%b\n" % (_FORMAT, identity.encode())
    _write_marks([d for d in (*keep, scratch) if not d.mark], mark)


def _check_same_queue(marked: Sequence[Directory]) -> None:
    for other in marked[1:]:
        if other.mark != marked[0].mark:
            raise StoreOpenError(
                f"{marked[0].path} and {other.path} belong to different queues; look at [spool]"
                f" {marked[0].setting} and {other.setting}"
            )


def _write_marks(directories: Sequence[Directory], mark: bytes) -> None:
    with translated():
        for directory in directories:
            os.pwrite(directory.lock, mark, 0)
            os.fsync(directory.lock)
            os.fsync(directory.descriptor)
            directory.mark = mark


def _close(directories: Sequence[Directory]) -> None:
    """Also gives up the locks."""
    for directory in {id(directory): directory for directory in directories}.values():
        os.close(directory.descriptor)
        os.close(directory.lock)
