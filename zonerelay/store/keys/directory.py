"""Keeps objects as files: a draft is written and synced, linked to its name, and the directory is synced.

`link` fails where a file is, so two writers cannot both make one. A draft that a crash has left is nothing;
it is removed when it is listed and has not been touched for a minute. Room that is kept back (`reserve`) is
given up for what makes room.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from zonerelay import durable
from zonerelay.store.common.keeper.ballast import Ballast
from zonerelay.store.contract import StoreError, StoreFullError

THREADS = 8
"""Syncs of several files at once cost little more than one."""
STALE = 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")


class DirectoryPlace:
    """The objects below one directory."""

    def __init__(self, directory: Path, *, reserve: int = 0) -> None:
        self._directory = directory
        with _translated():
            durable.make_directory(directory)
        self._ballast = Ballast(directory, reserve)
        self._ballast.make()
        self._threads = ThreadPoolExecutor(THREADS, "keys-files")

    async def create(self, name: str, data: bytes, *, makes_room: bool = False) -> bool:
        create = partial(self._create, self._directory / name, data)
        return await self._run(partial(self._ballast.make_way, create) if makes_room else create)

    def _create(self, path: Path, data: bytes) -> bool:
        with _translated():
            if not path.parent.is_dir():
                durable.make_directory(path.parent)
            return durable.create(path, data)

    async def replace(self, name: str, data: bytes) -> None:
        def write() -> None:
            with _translated():
                durable.make_directory((self._directory / name).parent)
                durable.write(self._directory / name, data)

        await self._run(partial(self._ballast.make_way, write))

    async def read(self, name: str) -> bytes | None:
        def read() -> bytes | None:
            with _translated():
                try:
                    return (self._directory / name).read_bytes()
                except FileNotFoundError:
                    return None

        return await self._run(read)

    async def names(self, prefix: str) -> AsyncIterator[list[str]]:
        if found := await self._run(partial(self._names, prefix)):
            yield found

    def _names(self, prefix: str) -> list[str]:
        found: list[str] = []
        with _translated():
            for place, _, files in os.walk(self._directory / prefix):
                for name in files:
                    path = Path(place, name)
                    if not name.startswith("."):
                        found.append(str(path.relative_to(self._directory)))
                    elif name.endswith(durable.DRAFT):
                        with contextlib.suppress(FileNotFoundError):
                            if path.stat().st_mtime < time.time() - STALE:
                                path.unlink()
        return sorted(found)

    async def remove(self, name: str) -> None:
        def remove() -> None:
            path = self._directory / name
            with _translated():
                path.unlink(missing_ok=True)
                if path.name == "end":  # the last of a snapshot
                    with contextlib.suppress(OSError):
                        path.parent.rmdir()

        await self._run(remove)

    async def room(self) -> int | None:
        def room() -> int:
            with _translated():
                usage = os.statvfs(self._directory)
            return usage.f_bavail * usage.f_frsize + self._ballast.held

        return await self._run(room)

    async def close(self) -> None:
        self._threads.shutdown()

    async def _run(self, function: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except RuntimeError as error:
            raise StoreError("the directory is closed") from error


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = StoreFullError if error.errno in _FULL else StoreError
        raise kind(f"the queue directory: {error}") from error
