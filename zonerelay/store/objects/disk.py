"""Opens the queue in local directories: a log of batches, a file for each body, and an index.

    meta_directory     zonerelay.lock, mark, beats, nodes/0/log, nodes/0/snapshot (`objects`), reserve file
    env_directory      zonerelay.lock, and the bodies in plain text (a file for each 512 KiB)
    scratch_directory  zonerelay.lock, and the index of this machine, which is rebuilt when in doubt

Each `zonerelay.lock` is locked while a relay runs. The first two name the queue that they belong to. A
directory whose file system is not mounted, or that belongs to another queue, is refused and left unchanged.

Objects are files (`DirectoryPlace`). A temporary file is written and synced, linked to its name, and the
directory is synced. `link` fails if the name exists, so only one of two writers can create a file. A
temporary file that a crash has left is ignored, and removed when it is listed and was not modified for a
minute. Reserved space (`reserve`) is released for writes that free space. Values have unique names that no
batch refers to yet, so they need no temporary file. They may have a separate directory.
"""

import asyncio
import contextlib
import errno
import itertools
import os
import re
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from zonerelay import durable
from zonerelay.config.settings import SpoolSettings
from zonerelay.model.clock import Clock
from zonerelay.process.tasks import gathered
from zonerelay.process.threads import STORE
from zonerelay.store import directories, records
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import StoreError, StoreFullError, StoreOpenError
from zonerelay.store.keys.partition import open_partition
from zonerelay.store.keys.port import first_release
from zonerelay.store.objects.engine import Object, ObjectEngine, checked_values, epoch_of, is_large
from zonerelay.store.objects.index import ValueLocation
from zonerelay.store.queue.partition_keeper import open_queue
from zonerelay.store.queue.store import PartitionStore
from zonerelay.store.spool_paths import disk_directories

LOCK = "zonerelay.lock"
_FORMAT, _FIRST_FORMAT = b"zonerelay queue 2 ", b"zonerelay queue 1 "
_BODY = re.compile(records.MESSAGE_PREFIX + rb"\S+ \d+")
LOOKS, LOOK_PAUSE = 50, 0.02
"""The number of checks for files that are being removed, and the pause between them in seconds."""
THREADS = 8
"""Concurrent syncs of several files cost little more than one."""
STALE = 60.0
PAGE = 1000
_FULL = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")


def is_apart(key: bytes, value: bytes) -> bool:
    """Return whether a value is stored in its own file. All bodies are, so that people can read them."""
    return is_large(key, value) or _BODY.fullmatch(key) is not None


def disk_engine(
    spool: SpoolSettings,
    clock: Clock,
    *,
    index: Path | None = None,
    reserve: int = 0,
    forgive: Callable[[str, str], None] | None = None,
) -> ObjectEngine:
    """Return the engine of a disk queue, whose only partition is number 0. With a separate `index` it only
    reads, and a relay may be running.
    """
    env, meta, scratch = disk_directories(spool)
    place = DirectoryPlace(meta, values=env, reserve=reserve, is_reader=index is not None)
    return ObjectEngine(place, index or scratch, clock=clock, lease=0.0, is_apart=is_apart, forgive=forgive)


async def open_disk(spool: SpoolSettings, around: StoreContext) -> PartitionStore:
    """Open a queue in local directories and return its store. Raises StoreOpenError."""
    opened = await STORE.open(Directories, spool)

    async def release() -> None:
        await engine.close()
        await STORE.run(opened.close)

    async def foreign() -> str:
        found: list[str] = []
        for _ in range(LOOKS):
            if not (found := await STORE.run(foreign_in, *disk_directories(spool))):
                return ""
            await asyncio.sleep(LOOK_PAUSE)
        return f"{len(found)} files, {', '.join(found[:3])}"

    engine = disk_engine(spool, around.clock, reserve=spool.min_free_space // 2)
    try:
        try:
            partition = await open_partition(engine, 0, clock=around.clock)
        except BaseException:
            await release()
            raise
        return await open_queue(
            partition, around, release=release, foreign=foreign, min_free_space=spool.min_free_space
        )
    except StoreOpenError:
        raise
    except StoreError as error:
        raise StoreOpenError(
            f"the queue in {opened.meta.path} cannot be opened: {error}. Its files were not changed"
        ) from error


def judge_mark(path: Path, mark: bytes) -> None:
    """Raise StoreOpenError unless the content of the lock file (`mark`) is that of a queue of this
    release.
    """
    if mark.startswith(_FIRST_FORMAT):
        raise first_release(str(path), "an empty directory")
    if mark and not mark.startswith(_FORMAT):
        raise StoreOpenError(
            f"{path / LOCK} does not belong to a queue that this zonerelay can read; run the release that "
            "wrote it, or drain the queue there first"
        )


class _QueueDirectory(NamedTuple):
    """A locked directory of the queue, with the name of the option that sets its path."""

    option: str
    path: Path
    lock: int
    mark: bytes


class Directories:
    """The locked directories of one queue. Every method blocks."""

    def __init__(self, spool: SpoolSettings) -> None:
        """Create and lock the directories, and check that they belong together. Raises StoreOpenError, in
        which case no foreign file was changed.
        """
        env, meta, scratch = disk_directories(spool)
        self._locks = contextlib.ExitStack()
        self.close = self._locks.close
        try:
            self.meta = self._open("meta_directory", meta)
            self.env = self.meta if _same(env, meta) else self._open("env_directory", env)
            if _same(scratch, meta) or _same(scratch, env):
                raise StoreOpenError(
                    f"[spool] scratch_directory {scratch} must be a separate directory, because its files "
                    "are removed"
                )
            self._open("scratch_directory", scratch)
            self._compare()
            self._look_for_log()
        except BaseException:
            self.close()
            raise

    def _open(self, option: str, path: Path) -> _QueueDirectory:
        directories.make_configured(path, option)
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._locks.callback(os.close, lock)
            directories.lock_configured(lock, path, option)
            directory = _QueueDirectory(option, path, lock, os.pread(lock, 200, 0))
        except OSError as error:
            raise StoreOpenError(
                f"[spool] {option} {path} cannot be used: {error.strerror}; give it to the user that "
                "zonerelay runs as, or choose another directory"
            ) from error
        judge_mark(path, directory.mark)
        return directory

    def _compare(self) -> None:
        meta, env = self.meta, self.env
        if meta.mark and env.mark and meta.mark != env.mark:
            raise StoreOpenError(
                f"{env.path} and {meta.path} belong to different queues; check [spool] {env.option} "
                f"and {meta.option}"
            )
        if bool(meta.mark) != bool(env.mark):
            there, other = (meta, env) if meta.mark else (env, meta)
            raise StoreOpenError(
                f"{other.path} ([spool] {other.option}) does not belong to the queue in {there.path}; "
                f"check whether its file system is mounted. If it is correct, copy {there.path / LOCK} "
                "into it"
            )
        if not meta.mark:
            mark = b"%b%b\n" % (_FORMAT, uuid.uuid4().hex.encode())
            with translated():
                for each in dict.fromkeys((meta, env)):
                    os.pwrite(each.lock, mark, 0)
                    os.fsync(each.lock)
                    durable.sync_directory(each.path)

    def _look_for_log(self) -> None:
        """Raise StoreOpenError if there are bodies but no log, because the bodies would be removed."""
        log, snapshots = (self.meta.path / "nodes/0" / kind for kind in ("log", "snapshot"))
        if not any(each.is_dir() and any(each.iterdir()) for each in (log, snapshots)):
            lost = sum(epoch_of(each.name) >= 0 for each in self.env.path.iterdir())
            if lost:
                raise StoreOpenError(
                    f"{log} contains no log, but {lost} bodies are in {self.env.path}. Nothing was "
                    "changed. Restore the log, or move the bodies away to start with an empty queue"
                )


def foreign_in(env: Path, meta: Path, scratch: Path) -> list[str]:
    """Return the files that would not exist in the directories of a new, empty queue."""
    known = {LOCK, directories.FILE_NAME, "mark", "nodes", "beats"}
    with translated():
        return sorted(
            str(path)
            for directory in dict.fromkeys((env, meta))
            for path in directory.iterdir()
            if path.name not in known and path not in (env, scratch)
        )


def _same(one: Path, other: Path) -> bool:
    return one == other or (one.exists() and other.exists() and one.samefile(other))


# --- files


class DirectoryPlace:
    """Objects stored as files below one directory. `values` is the directory for the values of the only node.
    A reader creates, reserves and removes nothing.
    """

    is_conditional = True

    def __init__(
        self, directory: Path, *, values: Path | None = None, reserve: int = 0, is_reader: bool = False
    ) -> None:
        self._directory = directory
        self._values = values
        self._is_reader = is_reader
        self._reserve = reserve
        self._reserve_file = directories.ReserveFile(directory, reserve)
        self._unsynced: set[Path] = set()
        """Directories with new names of values that are not synced. Each change makes a new set, because
        objects are created concurrently, and each must sync all directories itself.
        """
        if not is_reader:
            with translated():
                durable.make_directory(directory)
            self._reserve_file.make()
        self._threads = directories.ReaderThreads(self, "keys-files", THREADS)
        self._run = self._threads.run

    def _path(self, name: str) -> Path:
        _, is_value, tail = name.partition("/values/")
        if self._values is None or not is_value:
            return self._directory / name
        return self._values / tail

    async def create(
        self, name: str, data: bytes, *, values: Sequence[Object] = (), makes_room: bool = False
    ) -> bool:
        path = self._path(name)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}{durable.DRAFT}")
        unsynced = self._unsynced
        places = unsynced | {self._path(each).parent for each, _ in values}

        write_draft = partial(_write, draft, [data])
        writes: list[Callable[[], None]] = [partial(self._with_room, write_draft, makes_room=makes_room)]
        writes += self._writes(values, makes_room=makes_room)
        try:
            await gathered(self._run(each) for each in writes)
            is_ours = await self._run(partial(self._publish, draft, path, places, makes_room=makes_room))
        except StoreError:
            await self._run(_drop, draft)
            raise
        if self._unsynced is unsynced:
            self._unsynced = set()
        return is_ours

    def _publish(self, draft: Path, path: Path, before: Iterable[Path], *, makes_room: bool) -> bool:
        def is_linked() -> bool:
            with translated(), contextlib.suppress(FileExistsError):
                os.link(draft, path)
                return True
            return False

        with translated():
            try:
                for directory in before:
                    durable.sync_directory(directory)
                if not self._with_room(is_linked, makes_room=makes_room):
                    return False
            finally:
                _drop(draft)
            durable.sync_directory(path.parent)
        return True

    async def store(self, values: Sequence[Object]) -> None:
        await gathered(self._run(each) for each in self._writes(values, makes_room=False))
        self._unsynced = {*self._unsynced, *(self._path(name).parent for name, _ in values)}

    def _writes(self, values: Sequence[Object], *, makes_room: bool) -> list[Callable[[], None]]:
        """Return functions, one for each thread, that write and sync the values."""

        def write(some: Sequence[Object]) -> None:
            for name, pieces in some:
                self._with_room(partial(_write, self._path(name), pieces), makes_room=makes_room)

        return [partial(write, values[number::THREADS]) for number in range(min(THREADS, len(values)))]

    def _with_room(self, act: Callable[[], T], *, makes_room: bool) -> T:
        return self._reserve_file.make_way(act) if makes_room else act()

    async def replace(self, name: str, data: bytes) -> None:
        def write() -> None:
            with translated():
                durable.make_directory(self._path(name).parent)
                durable.write(self._path(name), data)

        await self._run(self._reserve_file.make_way, write)

    async def read(self, name: str) -> bytes | None:
        def read() -> bytes | None:
            with translated(), contextlib.suppress(FileNotFoundError):
                return self._path(name).read_bytes()
            return None

        return await self._run(read)

    async def read_values(self, name: str, spans: Sequence[ValueLocation]) -> list[bytes] | None:
        def read() -> list[bytes] | None:
            with translated(), contextlib.suppress(FileNotFoundError), self._path(name).open("rb") as file:
                values = [os.pread(file.fileno(), each.size, each.first) for each in spans]
                return checked_values(values, spans, name)
            return None

        return await self._run(read)

    async def names(self, prefix: str) -> AsyncIterator[list[str]]:
        walk = self._walk(prefix)
        while found := await self._run(lambda: list(itertools.islice(walk, PAGE))):
            yield found

    def _walk(self, prefix: str) -> Iterator[str]:
        top = self._path(prefix)
        places = [top]
        with translated():
            while places:
                with contextlib.suppress(FileNotFoundError), os.scandir(places.pop()) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            places.append(Path(entry.path))
                        elif not entry.name.startswith("."):
                            yield prefix + str(Path(entry.path).relative_to(top))
                        elif entry.name.endswith(durable.DRAFT) and not self._is_reader:
                            _remove_stale(Path(entry.path))

    async def remove(self, names: Sequence[str]) -> None:
        def remove() -> None:
            with translated():
                for path in map(self._path, names):
                    path.unlink(missing_ok=True)
                    if path.name == "end":  # the last object of a snapshot
                        with contextlib.suppress(OSError):
                            path.parent.rmdir()

        await self._run(remove)

    async def room(self) -> int | None:
        return await self._run(self._room)

    def _room(self) -> int:
        with translated():
            places = {each.stat().st_dev: each for each in (self._values, self._directory) if each}
            here = self._directory.stat().st_dev
            free = {device: _free(place) for device, place in places.items()}
        free[here] = self._reserve_file.count_in(free[here], wanted=2 * self._reserve)
        return min(free.values())

    async def close(self) -> None:
        self._threads.stop()


def _write(path: Path, pieces: Sequence[bytes]) -> None:
    """Write and sync a file. Its name becomes durable when its directory is synced."""
    with translated():
        if not path.parent.exists():
            durable.make_directory(path.parent)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, durable.PRIVATE)
        with os.fdopen(file, "wb", buffering=0):
            left = sum(map(len, pieces)) - os.writev(file, pieces)
            rest = memoryview(b"".join(pieces) if left else b"")[-left:]
            while rest:  # a short write, as on an almost full disk
                rest = rest[os.write(file, rest) :]
            os.fsync(file)


def _drop(draft: Path) -> None:
    """Remove a temporary file. If that fails, it is removed when it is listed."""
    with contextlib.suppress(OSError):
        draft.unlink()


def _remove_stale(draft: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if draft.stat().st_mtime < time.time() - STALE:
            draft.unlink()


def _free(place: Path) -> int:
    usage = os.statvfs(place)
    return usage.f_bavail * usage.f_frsize


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Convert an OSError in the block to a StoreError."""
    try:
        yield
    except OSError as error:
        raise _store_error(error) from error


def _store_error(error: OSError) -> StoreError:
    if error.errno not in _FULL:
        return StoreError(f"the queue directory: {error}")
    if error.filename is not None and directories.lacks_inodes(Path(os.fsdecode(error.filename)).parent):
        return StoreFullError(f"the queue directory: its file system has no free inodes (df -i): {error}")
    return StoreFullError(f"the queue directory: {error}")
