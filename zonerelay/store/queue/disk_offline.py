"""Checks, copies and repairs a disk queue for operators' commands.

A check and a copy use their own index and work while a relay is running. A repair locks the directories.
Unreadable entries of the log count as empty; their content is lost and reported. The old files are kept next
to the queue, and a snapshot replaces the log.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec import structs

from zonerelay import durable
from zonerelay.config.settings import SpoolSettings
from zonerelay.model.clock import SystemClock
from zonerelay.process.threads import STORE
from zonerelay.store.check import Contents, Examination, Fault, Repaired, Salvage, Tell
from zonerelay.store.contract import StoreCorruptError, StoreError
from zonerelay.store.keys.offline import check_engine, repair_engine
from zonerelay.store.keys.repair import kept_beside
from zonerelay.store.objects.directory import DirectoryPlace
from zonerelay.store.objects.objects import epoch_of
from zonerelay.store.queue.disk import LOCK, Directories, disk_engine, foreign_in, judge_mark
from zonerelay.store.spool_paths import disk_directories

TRIES = 5
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
NOTHING = Contents(0, 0, 0)


def _was_started(spool: SpoolSettings) -> bool:
    """Return whether there is a queue. Raises StoreOpenError if it belongs to another release."""
    for path in disk_directories(spool):
        with contextlib.suppress(FileNotFoundError):
            judge_mark(path, (path / LOCK).read_bytes())
    return (disk_directories(spool)[1] / "mark").exists()


async def check_disk(spool: SpoolSettings, examination: Examination) -> Contents:
    """Check the queue. Raises StoreError, or OSError, if it cannot be read at all."""
    findings = examination.findings
    if not await STORE.run(_was_started, spool):
        return NOTHING
    engine = disk_engine(
        spool,
        SystemClock(),
        index=examination.scratch,
        forgive=lambda name, what: findings.add(Fault.UNREADABLE, name, what),
    )
    try:
        contents = await check_engine(engine, findings, examination.tell)
    except StoreCorruptError as error:  # a snapshot has no other copy
        findings.add(Fault.UNREADABLE, str(spool.path), str(error))
        return NOTHING
    finally:
        await engine.close()
        shutil.rmtree(examination.scratch, ignore_errors=True)
    for path in await STORE.run(foreign_in, *disk_directories(spool)):
        if epoch_of(path) < 0:
            findings.add(Fault.STRAY_FILE, path, "not a file of this queue")
    return contents


# --- a copy


async def snapshot_disk(spool: SpoolSettings, into: Path) -> SpoolSettings:
    """Copy the state of the queue at one moment into a directory that does not exist. Bodies are hard links,
    or copies on another file system. Raises StoreError and OSError.
    """
    copy = replace(spool, path=into, env_directory=None, meta_directory=None, scratch_directory=None)
    if not await STORE.run(_was_started, spool):
        return copy
    source, (to_env, to_meta, _) = disk_directories(spool)[0], disk_directories(copy)
    await STORE.run(durable.make_directory, to_env)
    engine = disk_engine(spool, SystemClock(), index=into / "index")
    place = DirectoryPlace(to_meta, values=to_env)
    keeper = engine.keeper(0)
    state = None
    try:
        # First all files, then those that were added during the first step.
        names = [name for name in await STORE.run(os.listdir, source) if epoch_of(name) >= 0]
        gone = await STORE.run(_link, source, to_env, names)
        linked = set(names) - gone
        for _ in range(TRIES):
            state = await keeper.look()
            names = await keeper.value_names()
            gone = await STORE.run(_link, source, to_env, [each for each in names if each not in linked])
            linked |= set(names) - gone
            if not gone:
                break
        if state is not None:
            await place.create("mark", state.mark.encode())
            left = gone - await _names_later(spool, into / "later") if gone else gone
            await keeper.copy_to(place, without=await keeper.stems_of(left))
    finally:
        await keeper.close()
        await engine.close()
        await place.close()
        for each in ("index", "later"):
            shutil.rmtree(into / each, ignore_errors=True)
    return copy


async def _names_later(spool: SpoolSettings, index: Path) -> set[str]:
    """Return the bodies that are named at present. Other missing bodies were removed during the copy."""
    engine = disk_engine(spool, SystemClock(), index=index)
    keeper = engine.keeper(0)
    try:
        await keeper.look()
        return set(await keeper.value_names())
    finally:
        await keeper.close()
        await engine.close()


def _link(source: Path, target: Path, names: Iterable[str]) -> set[str]:
    """Link the files, and return the names of missing ones."""
    gone: set[str] = set()
    for name in names:
        try:
            os.link(source / name, target / name)
        except FileNotFoundError:
            gone.add(name)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(source / name, target / name)
    return gone


# --- a repair


async def repair_disk(spool: SpoolSettings, salvage: Salvage, tell: Tell, *, carry_out: bool) -> Repaired:
    """Repair the queue. Raises StoreError with a message, also while a relay uses the queue, and OSError."""
    if not await STORE.run(_was_started, spool):
        return Repaired(before=0, after=0)
    meta, kept = disk_directories(spool)[1], kept_beside(spool.path)
    lost: dict[str, str] = {}

    def forgive(name: str, what: str) -> None:
        lost[name] = what

    directories = await STORE.run(Directories, spool)
    scratch = Path(await STORE.run(tempfile.mkdtemp))
    engine = disk_engine(spool, SystemClock(), index=None if carry_out else scratch, forgive=forgive)
    try:
        done = await repair_engine(engine, salvage, tell, kept=kept, carry_out=carry_out, clock=SystemClock())
        if lost and carry_out:
            for name in filter(lambda each: (meta / each).exists(), lost):
                await STORE.run(durable.copy, meta / name, kept.with_suffix(".log") / Path(name).name)
            keeper = engine.keeper(0)
            try:
                await keeper.enter(uuid.uuid4().hex, mark="")
                await keeper.compact()
                await keeper.leave()
            finally:
                await keeper.close()
    except StoreCorruptError as error:
        raise StoreError(
            f"{error}: a snapshot of the queue is damaged, and there is no other copy of it. Restore a"
            " backup; the bodies that are there are files in the env_directory"
        ) from error
    finally:
        await engine.close()
        await STORE.run(directories.close)
        await STORE.run(partial(shutil.rmtree, scratch, ignore_errors=True))
    told = tuple(f"{name}: {what}; the mail that it brought is lost" for name, what in lost.items())
    return structs.replace(done, lost=(*done.lost, *told))
