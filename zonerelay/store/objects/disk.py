"""Opens the queue in local directories: a log of batches, a file for each body, and an index.

    meta_directory     zonerelay.lock, mark, beats, nodes/0/log, nodes/0/snapshot (`objects`), reserve file
    env_directory      zonerelay.lock, and the bodies in plain text (a file for each 512 KiB)
    scratch_directory  zonerelay.lock, and the index of this machine, which is rebuilt when in doubt

Each `zonerelay.lock` is locked while a relay runs. The first two name the queue that they belong to. A
directory whose file system is not mounted, or that belongs to another queue, is refused and left unchanged.
"""

from __future__ import annotations

import asyncio
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zonerelay import durable
from zonerelay.config.settings import SpoolSettings
from zonerelay.model.clock import Clock
from zonerelay.process.threads import STORE
from zonerelay.store import records
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import StoreError, StoreOpenError
from zonerelay.store.directories import FILE_NAME as RESERVE_FILE
from zonerelay.store.directories import lock_configured, make_configured
from zonerelay.store.keys.partition import open_partition
from zonerelay.store.objects.directory import DirectoryPlace, translated
from zonerelay.store.objects.engine import ObjectEngine, epoch_of, is_large
from zonerelay.store.queue.partition_keeper import open_queue
from zonerelay.store.queue.store import PartitionStore
from zonerelay.store.spool_paths import disk_directories

LOCK = "zonerelay.lock"
_FORMAT, _FIRST_FORMAT = b"zonerelay queue 2 ", b"zonerelay queue 1 "
_BODY = re.compile(records.MESSAGE_PREFIX + rb"\S+ \d+")
LOOKS, LOOK_PAUSE = 50, 0.02
"""The number of checks for files that are being removed, and the pause between them in seconds."""


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
    """Return the engine of the queue, whose only partition is 0. With a separate `index` it only reads, and a
    relay may be running.
    """
    env, meta, scratch = disk_directories(spool)
    place = DirectoryPlace(meta, values=env, reserve=reserve, is_reader=index is not None)
    return ObjectEngine(place, index or scratch, clock=clock, lease=0.0, is_apart=is_apart, forgive=forgive)


async def open_disk(spool: SpoolSettings, around: StoreContext) -> PartitionStore:
    """Open the queue. Raises StoreOpenError."""
    directories = await STORE.open(Directories, spool)

    async def release() -> None:
        await engine.close()
        await STORE.run(directories.close)

    async def foreign() -> str:
        found: list[str] = []
        for _ in range(LOOKS):
            if not (found := await STORE.run(directories.foreign)):
                return ""
            await asyncio.sleep(LOOK_PAUSE)
        return f"{len(found)} files, {', '.join(found[:3])}"

    engine = disk_engine(spool, around.clock, reserve=spool.min_free_space // 2)
    try:
        return await open_queue(
            lambda hooks: open_partition(engine, 0, clock=around.clock, hooks=hooks),
            around,
            release=release,
            foreign=foreign,
            min_free_space=spool.min_free_space,
        )
    except StoreOpenError:
        raise
    except StoreError as error:
        raise StoreOpenError(
            f"the queue in {directories.meta.path} cannot be opened: {error}. Its files were not changed"
        ) from error


def judge_mark(path: Path, mark: bytes) -> None:
    """Raise StoreOpenError unless the directory with this mark belongs to a queue of this release."""
    if mark.startswith(_FIRST_FORMAT):
        raise StoreOpenError(
            f"{path} contains a disk queue of zonerelay 0.1.0, which this release does not read. Nothing "
            "was changed. Start 0.1.0 on it until its mail is sent, or export the mail with zonerelay "
            "spool export of 0.1.0 and import it here; then use an empty directory for this release"
        )
    if mark and not mark.startswith(_FORMAT):
        raise StoreOpenError(
            f"{path / LOCK} does not belong to a queue that this zonerelay can read; run the release that "
            "wrote it, or drain the queue there first"
        )


class _QueueDirectory(NamedTuple):
    """A directory of the queue and its option."""

    option: str
    path: Path
    lock: int
    mark: bytes


class Directories:
    """The locked directories of one queue. Every method blocks."""

    def __init__(self, spool: SpoolSettings) -> None:
        """Create, lock and compare the directories. Raises StoreOpenError, in which case no foreign file was
        changed.
        """
        env, meta, scratch = disk_directories(spool)
        self._opened: list[_QueueDirectory] = []
        try:
            self.meta = self._open("meta_directory", meta)
            self.env = self.meta if _same(env, meta) else self._open("env_directory", env)
            if _same(scratch, meta) or _same(scratch, env):
                raise StoreOpenError(
                    f"[spool] scratch_directory {scratch} must be a separate directory, because its files "
                    "are removed"
                )
            self.scratch = self._open("scratch_directory", scratch)
            self._compare()
            self._look_for_log()
        except BaseException:
            self.close()
            raise

    def _open(self, option: str, path: Path) -> _QueueDirectory:
        make_configured(path, option)
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._opened.append(_QueueDirectory(option, path, lock, b""))
            lock_configured(lock, path, option)
            directory = self._opened[-1]._replace(mark=os.pread(lock, 200, 0))
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
        """Raise StoreOpenError if there are bodies but no log. The bodies would be removed."""
        log, snapshots = (self.meta.path / "nodes/0" / kind for kind in ("log", "snapshot"))
        if not any(each.is_dir() and any(each.iterdir()) for each in (log, snapshots)):
            lost = sum(epoch_of(each.name) >= 0 for each in self.env.path.iterdir())
            if lost:
                raise StoreOpenError(
                    f"{log} contains no log, but {lost} bodies are in {self.env.path}. Nothing was "
                    "changed. Restore the log, or move the bodies away to start with an empty queue"
                )

    def foreign(self) -> list[str]:
        return foreign_in(self.env.path, self.meta.path, self.scratch.path)

    def close(self) -> None:
        """Release the locks."""
        for each in self._opened:
            os.close(each.lock)
        self._opened = []


def foreign_in(env: Path, meta: Path, scratch: Path) -> list[str]:
    """Return the files that do not belong to an empty queue."""
    known = {LOCK, RESERVE_FILE, "mark", "nodes", "beats"}
    with translated():
        return sorted(
            str(path)
            for directory in dict.fromkeys((env, meta))
            for path in directory.iterdir()
            if path.name not in known and path not in (env, scratch)
        )


def _same(one: Path, other: Path) -> bool:
    return one == other or (one.exists() and other.exists() and one.samefile(other))
