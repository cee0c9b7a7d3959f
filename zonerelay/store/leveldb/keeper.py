"""Keeps the LevelDB spool usable: reopens it after a failed write, reports damage, and reclaims space.

A repair is to reopen the database. It is tried with growing pauses without limit, because an operator may
have to free a full disk first. A spool with damage accepts no new mail until the next start, and delivers all
readable mail. Half of `min_free_space` is reserved as a file that is removed if the disk is full, so that the
queue can be drained even then.

`Compactor` reclaims the space of many removed messages, after a large drop, an expiry or a delivered backlog.
LevelDB only compacts where it writes, so the bodies of a dropped queue would stay on disk, and their
tombstones would slow down every scan. The range is compacted in slices, in a separate thread, with pauses.
LevelDB does nothing else during a requested compaction, and acceptance would stop when too many new tables
exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import NamedTuple, TypeVar

from zonerelay.config.settings import SpoolSettings, space_guard
from zonerelay.model.envelope import MessageId
from zonerelay.process.threads import STORE
from zonerelay.store import records
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import StoreCorruptError, StoreError, StoreFullError, Unhealthy
from zonerelay.store.directories import ReaderThreads, ReserveFile
from zonerelay.store.keys.group_commit import GroupCommitter, SubmittedChanges, WriterThread
from zonerelay.store.keys.port import Op, clear
from zonerelay.store.leveldb.damage.directory import RESCUE
from zonerelay.store.leveldb.engine import AtomicBatch, Batches
from zonerelay.store.leveldb.spool import LevelDb, SpoolKeys, SpoolReads, run_through
from zonerelay.store.queue.keeper import MOST_KINDS, QueueKeeper
from zonerelay.store.queue.reads import QueueReads
from zonerelay.store.queue.store import PartitionStore

MANY = 20_000
"""The smallest number of removed messages that starts a compaction."""
SHARE = 4
"""A compaction also needs one removed message for this many remaining deliveries, because those are
rewritten.
"""
SLICE = 16 * 1024 * 1024
MOST_SLICES = 64
PAUSE = 0.2
"""Seconds between two slices."""


class Compactor:
    """Compacts an open spool in the background. `left` returns the number of deliveries."""

    def __init__(self, db: LevelDb, left: Callable[[], int]) -> None:
        self._thread = ReaderThreads(db, "spool-compactor")
        self._left = left
        self._count = 0
        self.removed: tuple[MessageId, MessageId] | None = None
        """The first and the last of the messages whose space can be reclaimed."""
        self._seen = 0
        self._task: asyncio.Task[None] | None = None

    def note_removed(self, message_id: MessageId) -> None:
        self._count += 1
        first, last = self.removed or (message_id, message_id)
        self.removed = (min(first, message_id), max(last, message_id))

    def look(self) -> None:
        """Start a compaction if many messages were removed and few are being removed at present. Called every
        second.
        """
        is_quiet = self._count - self._seen < MANY // 10
        self._seen = self._count
        if not is_quiet or self.removed is None or self._count < max(MANY, self._left() // SHARE):
            return
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(self._count, *self.removed))
            self._count = self._seen = 0
            self.removed = None

    async def close(self) -> None:
        """Stop the compaction after the current range of keys."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await STORE.run(self._thread.stop)

    async def _run(self, count: int, first: MessageId, last: MessageId) -> None:
        try:
            size = await self._thread.read(LevelDb.size, *whole(first, last))
            for start, stop in slices(first, last, min(MOST_SLICES, 1 + size // SLICE)):
                await self._thread.read(LevelDb.compact, start, stop)
                await asyncio.sleep(PAUSE)
        except StoreError as error:
            _log.warning("the disk space of removed messages cannot be freed yet: %s", error)
            # The spool is being reopened, perhaps because the disk is full.
            self.note_removed(first)
            self.note_removed(last)
            self._count += count


def whole(first: MessageId, last: MessageId) -> tuple[bytes, bytes]:
    return records.message_prefix(first), records.after(records.message_prefix(last))


def slices(first: MessageId, last: MessageId, count: int) -> list[tuple[bytes, bytes]]:
    """Return the key ranges to compact: those of the messages from `first` to `last`, then those of small
    records.
    """
    low, high = int(first, 16), int(last, 16)
    step = max(1, -(-(high - low + 1) // count))
    starts = [records.message_prefix(MessageId(f"{number:016x}")) for number in range(low, high + 1, step)]
    stops = [*starts[1:], whole(first, last)[1]]
    others = (records.DELIVERY_PREFIX, records.WEBHOOK_PREFIX, records.DEFERRED_PREFIX, records.DOMAIN_PREFIX)
    return [*zip(starts, stops, strict=True), *((prefix, records.after(prefix)) for prefix in others)]


FIRST_PAUSE = 0.1
"""Seconds from the failure to the first attempt to reopen the spool."""
LONGEST_PAUSE = 5.0
"""The longest pause between two attempts, in seconds. Each pause is twice as long as the one before."""
MARK_INTERVAL = 1.0
"""Seconds of writes whose loss at the end of a log looks like an incomplete write after a power cut."""
COMPACT_INTERVAL = 5.0
"""Seconds between two compactions while there is too little space."""
LARGE_BATCH = 256 * 1024
"""The size in bytes from which a batch is created in the writer thread."""
LONGEST_DAMAGED = 60.0
"""The longest pause in seconds before a spool with damage is reopened to store waiting outcomes. LevelDB's
compaction finds the damage again after each reopening.
"""
MOST_REFUSED = 1
"""The number of failures caused by damage after which nothing is claimed any more. A crash repeats the
attempts whose outcomes wait.
"""

T = TypeVar("T")

_log = logging.getLogger("zonerelay.store")


_PAUSED = (
    "and deliveries pause until the next start, so that none is repeated, because writes fail repeatedly; the"
    " spool is reopened from time to time to store pending outcomes"
)


class WriteJob(NamedTuple):
    """A write that the writer thread carries out. Records are added to the batch on the event loop, because
    plyvel releases the interpreter at every record, and another thread would wait long to get it back. For
    bodies that wait is worthwhile.
    """

    batch: AtomicBatch | None
    batches: Batches


class SpoolKeeper(QueueKeeper):
    """Maintains an open LevelDB spool with the threads that read, write and compact it."""

    def __init__(
        self,
        reader: ReaderThreads[LevelDb],
        *,
        reserve_file: ReserveFile,
        min_free_space: int,
        around: StoreContext,
        view: SpoolReads,
    ) -> None:
        """Create the keeper of an open spool. `view` reads the state of the spool when it was opened."""
        # LevelDB copies written data from its log through its levels.
        super().__init__(around, min_free_space=min_free_space, copies=3)
        self.reader = reader
        self._view = view
        self._db = reader.opened
        self.name = f"the spool {self._db.path}"
        self._reads = SpoolReads(self._db)
        self._writer = WriterThread(
            "spool-writer", self._write, lambda result: self.committer.written(result)
        )
        self.committer: GroupCommitter[Sequence[Op], WriteJob] = GroupCommitter(
            self._prepare,
            self._writer.put,
            clock=around.clock,
            observe=around.observe_commit,
            failed=self._fail,
        )
        self.submit = self.committer.submit
        self._reserve_file = reserve_file
        self._min_free_space = min_free_space
        self._loop = asyncio.get_running_loop()
        self._compactor = Compactor(self._db, lambda: self.counts.total)
        self._mark_at = 0.0
        self._compact_after = 0.0
        self._damage: set[str] = set()
        self._losses: set[str] = set()
        self._refused = 0
        self._pause = FIRST_PAUSE

    def begin(self, last: MessageId | None) -> None:
        self._db.on_damage = functools.partial(self._tell, self._damaged)
        self._db.on_unreadable = functools.partial(self._tell, self._note_unreadable)
        if self._db.damage:
            self._damaged(self._db.damage)
        self.note_losses()
        self._tasks.start(self._begin(last))
        self._watch_space()

    async def _begin(self, last: MessageId | None) -> None:
        await self._count(self._view)
        # Chunks whose message was damaged look like an interrupted upload.
        if last is not None and not (self._db.damage or self._db.losses.open):
            self._start(functools.partial(self._sweep, last), "remove aborted uploads until the next start")

    async def read(self, ask: Callable[[QueueReads], Coroutine[None, None, T]]) -> T:
        """Call `ask` with the spool's read operations in the reader thread, and return its result."""
        return await self.reader.run(lambda: run_through(ask(self._reads)))

    def note_removed(self, message_id: MessageId) -> None:
        self._compactor.note_removed(message_id)

    def check_claims(self) -> None:
        super().check_claims()
        if self._refused > MOST_REFUSED:
            raise StoreCorruptError(Unhealthy.DAMAGED)

    async def _count(self, view: SpoolReads) -> None:
        counts = self.counts
        try:
            start: bytes | None = records.WEBHOOK_PREFIX
            while start is not None:
                found, start = await self.reader.run(lambda at: run_through(view.count_page(at)), start)
                counts.add(found)
            counts.is_whole = True
        except StoreError as error:
            _log.warning("the queue cannot be counted, so its size is not shown: %s", error)
        finally:
            view.close()

    # --- writing

    def _prepare(self, submissions: Sequence[SubmittedChanges[Sequence[Op]]], size: int) -> WriteJob:
        self.space.note_written(size)
        batches = [each.ops for each in submissions]
        return WriteJob(self._db.batch(batches) if size < LARGE_BATCH else None, batches)

    def _write(self, job: WriteJob) -> float:
        """Write and sync the job in the writer thread, and return how long that took in seconds."""
        db, now = self._db, self._clock.monotonic
        batch = job.batch or db.batch(job.batches)
        started = now()
        db.commit(batch)
        ended = now()
        if ended >= self._mark_at:
            self._mark_at = ended + MARK_INTERVAL
            db.note_synced()
        return ended - started

    # --- free space

    async def _look_at_space(self) -> None:
        if self.space.note(await self._read_space()):
            await self._compact()
        elif self.health.refusal is None:
            self._compactor.look()

    async def _read_space(self) -> int:
        """Return the free space in bytes, including the reserve file. Raises StoreError."""
        return await self.reader.read(self._count_space)

    def _count_space(self, opened: LevelDb) -> int:
        opened.look()
        least = self._min_free_space
        # With less space than a compaction needs, LevelDB fails, is reopened and begins again, and few
        # outcomes are stored in between. So the reserve is only restored if a compaction still has enough
        # space. Right after a reopening there seems to be plenty.
        wanted = max(least, opened.moved_at_once()) if least else 0
        return self._reserve_file.count_in(opened.free_space(), wanted=wanted) - (wanted - least)

    async def _compact(self) -> None:
        """Compact the ranges of removed data while the disk lacks space. LevelDB itself would not, because
        without new mail it writes little.
        """
        removed = self._compactor.removed
        if self.health.refusal is not None or self._clock.monotonic() < self._compact_after:
            return
        if not self._tasks and self.counts.is_whole and not self.counts.total:
            start, stop = records.MESSAGE_PREFIX, records.after(records.MESSAGE_PREFIX)
        elif removed is not None:
            start, stop = whole(*removed)
        else:
            return
        self._compact_after = self._clock.monotonic() + COMPACT_INTERVAL
        await self.reader.read(LevelDb.compact, start, stop)
        # A failure only shows at the next write. Reopening then gives LevelDB more space.
        await self.probe()
        if self._compactor.removed is removed:
            self._compactor.removed = None
        self.space.note(await self._read_space())

    # --- damage

    def _tell(self, known: Callable[[str], None], text: str) -> None:
        """Call `known(text)` on the event loop. Can be called in every thread that reads or writes."""
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody needs the text
            self._loop.call_soon_threadsafe(known, text)

    def _damaged(self, text: str) -> None:
        if text not in self._damage and len(self._damage) < MOST_KINDS:
            self._damage.add(text)
            _log.error("the spool %s is damaged: %s", self._db.path, text)
            self._on_damage(text)
        self.health.set("damage", Unhealthy.DAMAGED, self._damage_advice())

    def _damage_advice(self) -> str:
        goes_on = "readable mail is delivered, and the rest stays in the spool"
        return (
            f"the spool {self._db.path} is damaged ({'; '.join(self._damage)}): new mail is rejected,"
            f" {_PAUSED if self._refused > MOST_REFUSED else goes_on}. Check the disk and the kernel log."
            f" When the queue has drained, stop the relay. {RESCUE}"
        )

    def note_losses(self) -> None:
        """Report the losses that were found when the spool was opened, until an operator dismisses them."""
        described = dict(self._db.losses.problems())
        for identity in self._losses - described.keys():
            self.health.note(f"loss {identity}", None)
        for identity, text in described.items():
            self.health.note(f"loss {identity}", text)
            if identity not in self._losses:
                self._on_damage(text)
        self._losses = set(described)

    async def acknowledge(self, identity: str) -> bool:
        known = await self.reader.run(self._db.losses.acknowledge, identity)
        self.note_losses()
        return known

    # --- failure and recovery

    def _fail(self, error: StoreError) -> None:
        _log.error("the spool cannot be written and is being reopened: %s", error)
        if isinstance(error, StoreCorruptError):
            self._refused += 1
            self._pause = min(self._pause * 2, LONGEST_DAMAGED)
            self._damaged(str(error))
            self._stop_writing(error)
        else:
            self._refuse(error)
        if not self._is_closing:
            self._tasks.start(self._recover(full=isinstance(error, StoreFullError)))

    async def _recover(self, *, full: bool) -> None:
        pause = self._pause
        while True:
            await asyncio.sleep(pause)
            try:
                view = await self.reader.read(_reopen, self._reserve_file, full)
                free = await self._read_space()
                break
            except StoreError as error:
                _log.warning("the spool still cannot be reopened: %s", error)
                pause = min(2 * pause, max(self._pause, LONGEST_PAUSE))
        self.on_failure()  # what was read since the failure may have changed
        self.note_losses()
        if not self._db.losses.open:
            self._tasks.start(self._sweep_cut_off())
        self._start(self._tell_news, "look for stored mail that was rejected")
        self._tasks.start(self._count(view))
        self.health.refuse(None)
        self.committer.resume()
        self.space.note(free)
        self.health.set("write", None)

    # --- closing

    async def _release(self) -> None:
        self.committer.refuse(StoreError(Unhealthy.CLOSED))
        await self.committer.drain()
        self._writer.stop()
        await self._end_tasks()
        await self._compactor.close()
        self._db.on_damage = self._db.on_unreadable = lambda text: None
        await self.reader.read(LevelDb.close)
        self.reader.stop()


def _reopen(db: LevelDb, reserve_file: ReserveFile, full: bool) -> SpoolReads:
    if full:
        reserve_file.drop()
    reserve_file.make_way(functools.partial(db.reopen, full=full))
    return run_through(SpoolReads(db).view())


async def open_leveldb(settings: SpoolSettings, around: StoreContext) -> PartitionStore:
    """Open a LevelDB spool and return its store. Raises StoreOpenError. Deliveries can start at once;
    counting and cleaning continue in the background.
    """
    reader = ReaderThreads(LevelDb(settings.path, write_buffer=settings.write_buffer), "spool-reader")
    guard = space_guard(settings)
    reserve_file = ReserveFile(settings.path, guard // 2)
    try:
        last_id, is_empty, view = await reader.run(
            reserve_file.make_way, functools.partial(_open, reader.opened)
        )
    except BaseException:
        reader.stop()  # a cancelled opening runs to its end
        reader.opened.close()
        raise
    keeper = SpoolKeeper(reader, reserve_file=reserve_file, min_free_space=guard, around=around, view=view)
    return PartitionStore(keeper, around, last_id=last_id, empty=is_empty)


def _open(db: LevelDb) -> tuple[MessageId | None, bool, SpoolReads]:
    """Open the spool's database for its keeper. Return the last message id, whether there is no delivery, and
    a view of this moment.
    """
    db.open()
    try:
        # The overflow index is emptied, because after a start the cursors find everything themselves.
        keys, hints = SpoolKeys(db), records.DOMAIN_PREFIX
        run_through(clear(keys, hints, records.after(hints), keys.write))
        reads = SpoolReads(db)
        last = run_through(reads.last_message_id())
        return last, not run_through(reads.queues()), run_through(reads.view())
    except StoreError as error:
        db.close()
        raise db.open_error(error) from error
