"""Carries out operators' commands on a store without a relay, and without joining a shared queue as a node.

A check and a view change nothing and work while relays are running. A repair requires stopped relays.
Functions that are not `async` block, and so do the check and the repair of a LevelDB spool.
"""

import asyncio
import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path

from zonerelay import durable
from zonerelay.config.settings import Backend, Settings, SpoolSettings
from zonerelay.model.clock import Clock, SystemClock
from zonerelay.process.threads import STORE
from zonerelay.store import check
from zonerelay.store.contract import QueueView, StoreCorruptError, StoreError, StoreOpenError
from zonerelay.store.keys.partition import SeenFile, open_partition
from zonerelay.store.keys.port import Engine, NodeTakenError
from zonerelay.store.leveldb.damage.directory import lock_directory
from zonerelay.store.leveldb.damage.losses import Losses
from zonerelay.store.leveldb.offline import READ_BUFFER, check_leveldb, repair_leveldb, take_snapshot
from zonerelay.store.leveldb.spool import LevelDb, SpoolKeys
from zonerelay.store.objects.disk import LOCK, Directories, disk_engine, foreign_in, judge_mark
from zonerelay.store.objects.engine import ObjectEngine, epoch_of
from zonerelay.store.open import seen_directory, shared_engine
from zonerelay.store.queue.reads import PartitionsView, QueueReads
from zonerelay.store.spool_paths import disk_directories, spool_of, spools_of

_LOOKS = 10
_WRITER = "spool repair"
"""The writer name of every repair. So a repair does not wait for the lease of an earlier one that was
killed.
"""

_SHELF = (
    '[spool] backend = "memory" is for tests: its shelf is a single file that is checked as a whole at '
    "startup. Copy the file while the relay is stopped, or export its mail with zonerelay spool export"
)


def acknowledge_loss(spool: SpoolSettings, loss: str) -> bool:
    """Dismiss a loss of mail in the spool of any worker. Return false if no spool has this loss.

    Raises StoreError if a relay has the spool open or the dismissal cannot be stored, and OSError.
    """
    for worker in spools_of(spool):
        path = spool_of(spool, worker).path
        if not path.is_dir():
            continue
        lock = lock_directory(path)
        try:
            losses = Losses(path)
            losses.refresh()
            if losses.acknowledge(loss):
                return True
        finally:
            os.close(lock)
    return False


def forget_queue(settings: Settings) -> str:
    """Discard what this machine recorded about the shared store, so that it accepts the store as it is. A
    relay that has refused it checks again within seconds.

    Returns the mark of the known queue, or "" if none was known. Raises StoreError, OSError.
    """
    known = ""
    for path in sorted(seen_directory(settings).glob("*.seen")):
        seen = SeenFile(path, "")
        known = seen.seen.mark or known
        seen.forget()
        seen.close()
    return known


Forgive = Callable[[str, str], None]


@contextlib.asynccontextmanager
async def opened_engine(
    settings: Settings,
    environment: Mapping[str, str],
    *,
    place: Path | None = None,
    forgive: Forgive | None = None,
    writes: bool = False,
) -> AsyncIterator[Engine]:
    """Open the storage engine that the settings select. A temporary index is made in `place`. With `writes`,
    a disk queue, whose directories are locked, is opened with its own index. `forgive` is that of
    `ObjectEngine`. Raises StoreError.
    """
    spool = settings.spool
    engine: Engine
    with tempfile.TemporaryDirectory(prefix=".zonerelay-", dir=place) as index:
        match spool.backend:
            case Backend.REDIS | Backend.POSTGRES | Backend.S3:
                engine = shared_engine(settings, environment, Path(index), SystemClock())
            case Backend.DISK:
                for path in disk_directories(spool):
                    with contextlib.suppress(FileNotFoundError):
                        judge_mark(path, (path / LOCK).read_bytes())
                own = None if writes else Path(index)
                engine = disk_engine(spool, SystemClock(), index=own, forgive=forgive)
            case _:
                raise StoreOpenError(_SHELF)
        if isinstance(engine, ObjectEngine):
            engine.fresh_for = 1.0  # many pages are read in a row
        try:
            yield engine
        finally:
            await engine.close()


def _patience(settings: Settings) -> float:
    return 1.25 * settings.s3.lease if settings.spool.backend is Backend.S3 else 0.0


async def check_spool(
    settings: Settings,
    worker: int,
    findings: check.Findings,
    tell: check.Tell,
    *,
    environment: Mapping[str, str],
    place: Path,
) -> check.SpoolContents:
    """Check the spool of one worker. A shared queue belongs to the first worker. Temporary files are made in
    `place`.

    Raises StoreError, or OSError, if the spool cannot be checked at all.
    """
    spool = spool_of(settings.spool, worker)
    if spool.backend is Backend.LEVELDB:
        return check_leveldb(spool.path, place, findings, _stoppable(tell))
    async with opened_engine(
        replace(settings, spool=spool),
        environment,
        place=place,
        forgive=lambda name, what: findings.add(check.DamageKind.UNREADABLE, name, what),
    ) as engine:
        try:
            contents = await check_engine(engine, findings, tell)
        except StoreCorruptError as error:  # of something that has no other copy, such as a snapshot
            findings.add(check.DamageKind.UNREADABLE, str(spool.path), str(error))
            return check.SpoolContents(0, 0, 0)
    if spool.backend is Backend.DISK and _was_started(spool):
        env, meta, _ = disk_directories(spool)
        if _mark_of(env) != _mark_of(meta):
            what = f"it does not name the queue in {meta}, so no relay opens the queue"
            findings.add(check.DamageKind.UNREADABLE, str(env / LOCK), what)
        for path in await STORE.run(foreign_in, *disk_directories(spool)):
            if epoch_of(path) < 0:
                findings.add(check.DamageKind.STRAY_FILE, path, "not a file of this queue")
    return contents


def _mark_of(directory: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return (directory / LOCK).read_bytes()
    return b""


def _was_started(spool: SpoolSettings) -> bool:
    return (disk_directories(spool)[1] / "mark").exists()


@contextlib.asynccontextmanager
async def view_spool(
    settings: Settings, worker: int, environment: Mapping[str, str], place: Path
) -> AsyncIterator[QueueView]:
    """Open the queue of one worker for reading: a LevelDB spool as it is now, any other message by message in
    its current state. Temporary files are made in `place`. Raises StoreError and OSError.
    """
    settings = replace(settings, spool=spool_of(settings.spool, worker))
    if settings.spool.backend is not Backend.LEVELDB:
        async with opened_engine(settings, environment, place=place) as engine, view_engine(engine) as view:
            yield view
        return
    with tempfile.TemporaryDirectory(prefix=".zonerelay-", dir=place) as scratch:
        db = LevelDb(Path(scratch) / "copy", write_buffer=READ_BUFFER)
        await STORE.run(take_snapshot, settings.spool.path, db.path)
        db.open()
        try:
            yield PartitionsView([QueueReads(SpoolKeys(db))])
        finally:
            db.close()


async def living(settings: Settings, environment: Mapping[str, str]) -> int:
    """Return how many relays on all machines use the shared queue, where each worker counts as one. A relay
    that was killed counts until its lease ends. Raises StoreError.
    """
    async with opened_engine(settings, environment) as engine:
        return len(await living_nodes(engine, _patience(settings)))


async def repair_spool(
    settings: Settings,
    worker: int,
    salvage: check.Salvage,
    tell: check.Tell,
    *,
    carry_out: bool,
    environment: Mapping[str, str],
) -> check.RepairResult:
    """Repair the spool of one worker of a stopped relay. Without `carry_out`, return what a repair would do.

    Raises StoreError with a message, or OSError, in which case nothing was changed.
    """
    spool, is_disk = spool_of(settings.spool, worker), settings.spool.backend is Backend.DISK
    if spool.backend is Backend.LEVELDB:
        home = settings.spool.path.parent
        return repair_leveldb(spool.path, home, salvage, _stoppable(tell), carry_out=carry_out)
    if is_disk and not _was_started(spool):
        return check.RepairResult()
    kept = spool.path.with_name(f"{spool.path.name}.before-repair-{time.strftime('%Y%m%dT%H%M%S')}.jsonl")
    settings = replace(settings, spool=spool)
    damaged, lost = dict[str, str](), dict[str, str]()
    async with contextlib.AsyncExitStack() as stack:
        if is_disk:
            directories = await STORE.open(Directories, spool)
            stack.push_async_callback(STORE.run, directories.close)
            if carry_out:  # the index of this machine may have mail whose entry in the log is damaged
                async with opened_engine(settings, environment, forgive=damaged.__setitem__) as engine:
                    try:
                        async with view_engine(engine):
                            pass
                    except StoreCorruptError as error:  # of a snapshot, which the index may replace
                        damaged["nodes/0/snapshot"] = str(error)
        engine = await stack.enter_async_context(
            opened_engine(settings, environment, forgive=lost.__setitem__, writes=carry_out)
        )
        done = await repair_engine(
            engine,
            salvage,
            tell,
            kept=kept,
            carry_out=carry_out,
            clock=SystemClock(),
            patience=_patience(settings),
        )
        if (lost or damaged) and carry_out:
            assert isinstance(engine, ObjectEngine)
            await _leave_out(engine, disk_directories(spool)[1], damaged | lost, kept.with_suffix(".log"))
    done.noted += [f"{name}: {what}" for name, what in damaged.items() if name not in lost]
    done.lost += [f"{name}: {what}; the mail that it contained is lost" for name, what in lost.items()]
    return done


async def _leave_out(engine: ObjectEngine, meta: Path, lost: Mapping[str, str], kept: Path) -> None:
    """Copy the damaged entries of a disk queue's log to `kept`, and replace the log by a snapshot."""
    for name in filter(lambda each: (meta / each).is_file(), lost):
        await STORE.run(durable.copy, meta / name, kept / Path(name).name)
    keeper = engine.keeper(0)
    try:
        await keeper.enter(uuid.uuid4().hex, mark="")
        await keeper.compact()
        await keeper.leave()
    finally:
        await keeper.close()


# --- the queue of any engine, without joining it as a node


async def nodes_of(engine: Engine) -> list[int]:
    return [each.node for each in await engine.peers()] or [0]


async def check_engine(engine: Engine, findings: check.Findings, tell: check.Tell) -> check.SpoolContents:
    """Check the records of every partition of an engine. Raises StoreError."""
    found = [check.SpoolContents()]
    for node in await nodes_of(engine):
        keeper = engine.keeper(node)
        try:
            if await keeper.look() is not None:
                found.append(await check.compare(keeper, findings, tell))
        finally:
            await keeper.close()
    return check.SpoolContents(*map(sum, zip(*found, strict=True)))


async def repair_engine(
    engine: Engine,
    salvage: check.Salvage,
    tell: check.Tell,
    *,
    kept: Path,
    carry_out: bool,
    clock: Clock,
    patience: float = 0.0,
) -> check.RepairResult:
    """Repair the records of every partition of an engine. Without `carry_out`, return what a repair would do.
    `kept` is the file of old records, and `patience` is that of `living_nodes`.

    Raises StoreError with a message, also while relays use the queue, and OSError.
    """
    if alive := await living_nodes(engine, patience, besides=_WRITER):
        raise StoreError(
            f"the queue is in use by relays (node {', '.join(map(str, alive))}); stop them on all "
            "machines. Nothing was changed"
        )
    repair = check.RecordRepair(salvage, kept, carry_out=carry_out)
    deliveries = 0
    try:
        for node in await nodes_of(engine):
            keeper = engine.keeper(node)
            try:
                if await keeper.look() is None:
                    continue  # no relay has been started here yet
                if not carry_out:
                    deliveries += (await check.mend(keeper, repair, tell, None)).deliveries
                    continue
            finally:
                await keeper.close()
            try:
                partition = await open_partition(engine, node, token=_WRITER, clock=clock)
            except NodeTakenError as error:
                raise StoreError(f"the queue is in use by relays: {error}. Nothing was changed") from error
            try:
                deliveries += (await check.mend(partition, repair, tell, partition.write)).deliveries
            finally:
                await partition.close()
    except StoreCorruptError as error:
        raise StoreError(
            f"{error}: the damage is in the storage below the queue, whose administrator must repair it "
            "first. Everything repaired or salvaged so far is kept"
        ) from error
    finally:
        repair.close()
    return repair.repaired(deliveries)


async def living_nodes(engine: Engine, patience: float = 0.0, *, besides: str = "") -> list[int]:
    """Return the numbers of the nodes whose writers have a valid lease. A node that was killed counts until
    its lease ends. `patience` is the time, in seconds, that an engine without a clock needs to see that a
    lease is not renewed. A writer with the name `besides` does not count.
    """
    alive: list[int] = []
    for _ in range(_LOOKS):
        held = [each for each in await engine.peers() if not each.is_left and not each.is_over]
        alive = [each.node for each in held if not besides or each.writer != besides]
        if not alive or not patience:
            break
        await asyncio.sleep(patience / _LOOKS)
    return alive


@contextlib.asynccontextmanager
async def view_engine(engine: Engine) -> AsyncIterator[PartitionsView]:
    """Open a view of a shared queue without becoming one of its nodes. Raises StoreError."""
    keepers = [engine.keeper(node) for node in await nodes_of(engine)]
    try:
        yield PartitionsView([QueueReads(each) for each in keepers if await each.look() is not None])
    finally:
        for each in keepers:
            await each.close()


# --- work that blocks


def _stoppable(tell: check.Tell) -> check.Tell:
    """Return a progress callback that can stop work that blocks the event loop. If the command is cancelled,
    the work ends at its next report, so it leaves nothing half done.
    """
    task = asyncio.current_task()

    def report(done: int, total: int) -> None:
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        tell(done, total)

    return report
