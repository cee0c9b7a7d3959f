"""Stores objects as files. A temporary file is written and synced, linked to its name, and the directory is
synced.

`link` fails if the name exists, so only one of two writers can create a file. A temporary file that a crash
has left is ignored, and removed when it is listed and was not modified for a minute. Reserved space
(`reserve`) is released for writes that free space.

Values have unique names that no batch refers to yet, so they need no temporary file. They may have a separate
directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from zonerelay import durable
from zonerelay.process.tasks import gathered
from zonerelay.store.contract import StoreError, StoreFullError
from zonerelay.store.directories import ReserveFile, lacks_inodes
from zonerelay.store.objects.engine import Object, checked_values
from zonerelay.store.objects.index import ValueLocation

THREADS = 8
"""Concurrent syncs of several files cost little more than one."""
STALE = 60.0
PAGE = 1000
_FULL = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")


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
        self._reserve_file = ReserveFile(directory, reserve)
        self._unsynced: set[Path] = set()
        """Directories with new names of values that are not synced."""
        if not is_reader:
            with translated():
                durable.make_directory(directory)
            self._reserve_file.make()
        self._threads = ThreadPoolExecutor(THREADS, "keys-files")

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
        unsynced, self._unsynced = self._unsynced, set()
        places = unsynced | {self._path(each).parent for each, _ in values}

        def write_draft() -> None:
            self._with_room(partial(_write, draft, [data]), makes_room=makes_room)

        def publish() -> bool:
            return self._publish(draft, path, places, makes_room=makes_room)

        def write_and_publish() -> bool:
            write_draft()
            return publish()

        try:
            if not values:
                return await self._run(write_and_publish)
            await gathered(map(self._run, [write_draft, *self._writes(values, makes_room=makes_room)]))
            return await self._run(publish)
        except StoreError:
            self._unsynced |= unsynced
            await self._run(partial(_drop, draft))
            raise

    def _publish(self, draft: Path, path: Path, before: Iterable[Path], *, makes_room: bool) -> bool:
        with translated():
            try:
                for directory in before:
                    durable.sync_directory(directory)
                self._with_room(partial(_link, draft, path), makes_room=makes_room)
            except FileExistsError:
                return False
            finally:
                _drop(draft)
            durable.sync_directory(path.parent)
        return True

    async def store(self, values: Sequence[Object]) -> None:
        await gathered(map(self._run, self._writes(values, makes_room=False)))
        self._unsynced.update(self._path(name).parent for name, _ in values)

    def _writes(self, values: Sequence[Object], *, makes_room: bool) -> list[Callable[[], None]]:
        """Return functions that make the content of values durable when they are called in several
        threads.
        """

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

        await self._run(partial(self._reserve_file.make_way, write))

    async def read(self, name: str) -> bytes | None:
        def read() -> bytes | None:
            with translated(), contextlib.suppress(FileNotFoundError):
                return self._path(name).read_bytes()
            return None

        return await self._run(read)

    async def read_values(self, name: str, spans: Sequence[ValueLocation]) -> list[bytes] | None:
        def read() -> list[bytes] | None:
            with translated():
                try:
                    file = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    return None
                try:
                    values = [os.pread(file, each.size, each.first) for each in spans]
                finally:
                    os.close(file)
            return checked_values(values, spans, name)

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
        self._threads.shutdown()

    async def _run(self, function: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except RuntimeError as error:
            raise StoreError("the directory is closed") from error


def _write(path: Path, pieces: Sequence[bytes]) -> None:
    """Make the content of a file durable. Its name becomes durable when its directory is synced."""
    with translated():
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, durable.PRIVATE)
        except FileNotFoundError:
            durable.make_directory(path.parent)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, durable.PRIVATE)
        try:
            left = sum(map(len, pieces)) - os.writev(file, pieces)
            rest = memoryview(b"".join(pieces) if left else b"")[-left:]
            while rest:  # a short write, as on an almost full disk
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        finally:
            os.close(file)


def _link(draft: Path, path: Path) -> None:
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError as error:
        raise _store_error(error) from error


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
    """Raise StoreError for an OSError."""
    try:
        yield
    except OSError as error:
        raise _store_error(error) from error


def _store_error(error: OSError) -> StoreError:
    if error.errno not in _FULL:
        return StoreError(f"the queue directory: {error}")
    if error.filename is not None and lacks_inodes(Path(os.fsdecode(error.filename)).parent):
        return StoreFullError(f"the queue directory: its file system has no free inodes (df -i): {error}")
    return StoreFullError(f"the queue directory: {error}")
