"""Keeps the LevelDB spool usable: it reopens it after a failed write, reports damage, and reclaims space.

`LocalKeeper` owns the order of events after a failure. Nothing more is written until the engine has repaired
its files, which is tried with growing pauses without limit, because an operator may have to free a full disk
first. Until then new mail is refused, nothing is claimed, and all acknowledged data is kept. The order is:
refuse, repair, adopt the repaired state, and write again. Below `min_free_space` new mail is refused while
outcomes are still stored, because they free space.

`SpoolKeeper` is the one for LevelDB, where a repair is to reopen the database. A spool with damage accepts no
new mail until the next start, and delivers all readable mail. Half of `min_free_space` is reserved as a file
that is removed if the disk is full, so that the queue can be drained even then.

`Compactor` reclaims the space of many removed messages, after a large drop, an expiry or a delivered backlog.
LevelDB only compacts where it writes, so the bodies of a dropped queue would stay on disk, and their
tombstones would slow down every scan. The range is compacted in slices, in a separate thread, with pauses.
LevelDB does nothing else during a requested compaction, and acceptance would stop when too many new tables
exist.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.process.threads import STORE
from zonerelay.store.common import records
from zonerelay.store.common.counts import Counts
from zonerelay.store.common.keeper import health
from zonerelay.store.common.keeper.ballast import Ballast
from zonerelay.store.common.keeper.disk_watch import SpaceWatch
from zonerelay.store.common.keeper.health import Health
from zonerelay.store.common.keeper.reader_threads import ReaderThreads
from zonerelay.store.common.write.group_commit import GroupCommitter, WriterThread
from zonerelay.store.contract import QueueCounts, StoreCorruptError, StoreError, StoreFullError, Unhealthy
from zonerelay.store.leveldb import scan
from zonerelay.store.leveldb.damage.directory import RESCUE
from zonerelay.store.leveldb.engine import AtomicBatch, Batches, Op
from zonerelay.store.leveldb.reads import QueueReads
from zonerelay.store.leveldb.scan import SpoolReads, run_through
from zonerelay.store.leveldb.spool import LevelDb
from zonerelay.store.surroundings import Surroundings

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
            self._task = asyncio.get_running_loop().create_task(self._run(*self.removed))
            self._count = self._seen = 0
            self.removed = None

    async def close(self) -> None:
        """Stop after the current slice."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await STORE.run(self._thread.stop)

    async def _run(self, first: MessageId, last: MessageId) -> None:
        try:
            size = await self._thread.read(LevelDb.size, *whole(first, last))
            for start, stop in slices(first, last, min(MOST_SLICES, 1 + size // SLICE)):
                await self._thread.read(LevelDb.compact, start, stop)
                await asyncio.sleep(PAUSE)
        except StoreError as error:
            _log.warning("the space of removed messages is not given back yet: %s", error)


def whole(first: MessageId, last: MessageId) -> tuple[bytes, bytes]:
    return records.message_prefix(first), records.after(records.message_prefix(last))


def slices(first: MessageId, last: MessageId, count: int) -> list[tuple[bytes, bytes]]:
    """Split the keys of messages from the first to the last into ranges, followed by the ranges of all small
    records.
    """
    low, high = int(first, 16), int(last, 16)
    step = max(1, -(-(high - low + 1) // count))
    starts = [records.message_prefix(MessageId(f"{number:016x}")) for number in range(low, high + 1, step)]
    stops = [*starts[1:], whole(first, last)[1]]
    others = (records.DELIVERY_PREFIX, records.WEBHOOK_PREFIX, records.DEFERRED_PREFIX, records.DOMAIN_PREFIX)
    return [*zip(starts, stops, strict=True), *((prefix, records.after(prefix)) for prefix in others)]


class Place(Protocol):
    """The storage that an engine has opened."""

    def free_space(self) -> int:
        """Return the number of bytes that this process may still write. Raises StoreError."""


Opened = TypeVar("Opened", bound=Place)
Operation = TypeVar("Operation")
Job = TypeVar("Job")
Repaired = TypeVar("Repaired")
T = TypeVar("T")


class LocalKeeper(abc.ABC, Generic[Opened, Operation, Job, Repaired]):
    """The base class for the maintenance of local stores. An instance belongs to the event loop that opened
    the store. `Repaired` is the result of a repair.
    """

    NAME = "spool"
    FAILED = "the spool cannot be written: %s"
    NOT_YET = "the spool cannot be repaired yet: %s"
    COPIES = 1
    """How many copies of a written byte may be on the disk for some time."""

    def __init__(
        self, reader: ReaderThreads[Opened], *, ballast: Ballast, min_free_space: int, around: Surroundings
    ) -> None:
        self.reader = reader
        self.committer: GroupCommitter[Operation, Job, float] = GroupCommitter(
            self._prepare,
            functools.partial(WriterThread, "spool-writer", self._write),
            clock=around.clock,
            observe=around.observe_commit,
            failed=self._fail,
        )
        self._ballast = ballast
        self._min_free_space = min_free_space
        self._clock = around.clock
        self._health = Health(around.on_health)
        self.check_usable = self._health.check_usable
        self.check_writable = self._health.check_writable
        self.unhealthy = self._health.unhealthy
        self.problems = self._health.problems
        self.usable = self._health.usable
        self._space = SpaceWatch(
            self._look_after_space, least=min_free_space, health=self._health, copies=self.COPIES
        )
        self.note_written = self._space.note_written
        self._note_space = self._space.note
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None

    # --- defined by the engine

    @abc.abstractmethod
    def _prepare(self, submissions: Sequence[Sequence[Operation]], size: int) -> Job:
        """Create one job of the submissions on the event loop. `size` is in bytes."""

    @abc.abstractmethod
    def _write(self, job: Job) -> float:
        """Make the job durable in the writer thread, and return its duration in seconds."""

    @abc.abstractmethod
    def _probe_op(self) -> Operation:
        """Return the smallest change that shows that the engine can write."""

    @abc.abstractmethod
    def _begin_repair(self, error: StoreError) -> Callable[[], Coroutine[None, None, Repaired]]:
        """Discard unconfirmed state in memory. Return a function that makes one attempt at a repair."""

    @abc.abstractmethod
    def _repaired(self, found: Repaired) -> None:
        """Update memory with the result of a repair. Nothing is written before this returns."""

    @abc.abstractmethod
    async def _release(self) -> None:
        """Close the storage of the engine and end its threads."""

    def _first_pause(self) -> float:
        """Return the seconds until the first attempt at a repair."""
        return health.FIRST_PAUSE

    # --- writing

    async def probe(self) -> None:
        self.check_usable()
        await self.committer.submit([self._probe_op()])

    # --- free space

    def start(self) -> None:
        """Start to watch the free space."""
        self._watcher = self._loop.create_task(self._space.run())

    async def _look_after_space(self) -> None:
        self._note_space(await self._read_space())

    async def _read_space(self) -> int:
        """Return the free space in bytes, including the reserve file. Raises StoreError."""
        return await self.reader.read(self._count_space)

    def _count_space(self, opened: Opened) -> int:
        return self._ballast.count_in(opened.free_space(), wanted=self._min_free_space)

    # --- failure and repair

    def _fail(self, error: StoreError) -> None:
        _log.error(self.FAILED, error)
        self._health.refusal = error
        attempt = self._begin_repair(error)
        if not self._closing:
            self._spawn(self._recover(attempt))
        full = isinstance(error, StoreFullError)
        self._health.set("write", Unhealthy.NO_SPACE if full else Unhealthy.WRITE_FAILED)

    async def _recover(self, attempt: Callable[[], Coroutine[None, None, Repaired]]) -> None:
        async def repair() -> tuple[Repaired, int]:
            return await attempt(), await self._read_space()

        first = self._first_pause()
        found, free = await health.recover(
            repair,
            lambda error: _log.warning(self.NOT_YET, error),
            first=first,
            longest=max(first, health.LONGEST_PAUSE),
        )
        self._repaired(found)
        self._health.refusal = None
        self.committer.resume()
        self._note_space(free)
        self._health.set("write", None)

    # --- closing

    async def close(self) -> None:
        """Write all submissions, then release everything. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        self._health.close()
        self._health.refusal = StoreError(Unhealthy.CLOSED)
        self.committer.refuse(self._health.refusal)
        await self.committer.drain()
        self.committer.stop()
        tasks = list(self._tasks)
        if self._watcher is not None:
            tasks.append(self._watcher)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._release()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


MARK_INTERVAL = 1.0
"""Seconds of writes whose loss at the end of a log looks like an incomplete write after a power cut."""
COMPACT_INTERVAL = 5.0
"""Seconds between two compactions while there is too little space."""
LARGE_BATCH = 256 * 1024
"""The size in bytes from which a batch is created in the writer thread."""
SWEEP_PAUSE = 20
"""The pause after a page of the search for aborted uploads, as a multiple of the page's duration. No caller
waits for the search. For a million messages it takes 100 s of CPU time, and without pauses it reduced the
rate of new mail by a fifth.
"""
LONGEST_DAMAGED = 60.0
"""The longest pause in seconds before a spool with damage is reopened to store waiting outcomes. LevelDB's
compaction finds the damage again after each reopening.
"""
MOST_REFUSED = 1
"""The number of failures caused by damage after which nothing is claimed any more. A crash repeats the
attempts whose outcomes wait.
"""
MOST_KINDS = 16
"""The number of kinds of damage that are reported one by one, and of messages that are named."""

_log = logging.getLogger("zonerelay.store")


_PAUSED = (
    "the spool cannot be written for long because it is damaged: deliveries pause until the next start, so"
    " that none is repeated; now and then it is reopened to store the outcomes that wait"
)


class WriteJob(NamedTuple):
    """The content of one write. Records are added to a batch on the event loop, because plyvel releases the
    interpreter at every record, and another thread would wait long to get it back. For bodies that wait is
    worthwhile.
    """

    batch: AtomicBatch | None
    batches: Batches


class SpoolKeeper(LocalKeeper[LevelDb, Op, WriteJob, SpoolReads]):
    """Maintains an open spool directory with its threads. A repair returns a view of the reopened spool."""

    FAILED = "the spool cannot be written and is being reopened: %s"
    NOT_YET = "the spool cannot be reopened yet: %s"
    # LevelDB copies written data from its log through its levels.
    COPIES = 3

    def __init__(
        self, reader: ReaderThreads[LevelDb], *, ballast: Ballast, min_free_space: int, around: Surroundings
    ) -> None:
        super().__init__(reader, ballast=ballast, min_free_space=min_free_space, around=around)
        self.counts = Counts()
        self._compactor = Compactor(reader.opened, lambda: self.counts.total)
        self.note_removed = self._compactor.note_removed
        self.on_failure: Callable[[], None] = lambda: None
        self._db = reader.opened
        self._reads = SpoolReads(reader.opened)
        self._mark_at = 0.0
        self._compact_after = 0.0
        self._cut_off: set[MessageId] = set()
        self._on_news = around.on_news
        self._on_damage = around.on_damage
        self._damage: set[str] = set()
        self._unreadable: set[str] = set()
        self._losses: set[str] = set()
        self._refused = 0
        self._pause = health.FIRST_PAUSE

    def sweep(self, view: SpoolReads, last: MessageId | None) -> None:
        """Clean up after the last run, and watch the space. `view` is the spool when it was opened, and
        `last` the highest id in it. New messages have higher ids.
        """
        self._db.on_damage = functools.partial(self._tell, self._damaged)
        self._db.on_unreadable = functools.partial(self._tell, self._note_unreadable)
        if self._db.damage:
            self._damaged(self._db.damage)
        self.note_losses()
        self._spawn(self._sweep(view, last))
        self.start()

    async def read(self, ask: Callable[[QueueReads], Coroutine[None, None, T]]) -> T:
        """Read in the reader thread."""
        return await self.reader.run(lambda: run_through(ask(self._reads)))

    async def left_over(self) -> str:
        return await self.read(lambda reads: reads.left_over())

    def check_claims(self) -> None:
        """Raise StoreError if no delivery may be claimed."""
        self._health.check_usable()
        if self._refused > MOST_REFUSED:
            raise StoreCorruptError(Unhealthy.DAMAGED)

    # --- writing

    def _prepare(self, batches: Batches, size: int) -> WriteJob:
        self.note_written(size)
        return WriteJob(self._db.batch(batches) if size < LARGE_BATCH else None, batches)

    def _write(self, job: WriteJob) -> float:
        db, now = self._db, self._clock.monotonic
        batch = job.batch or db.batch(job.batches)
        started = now()
        db.commit(batch)
        ended = now()
        if ended >= self._mark_at:
            self._mark_at = ended + MARK_INTERVAL
            db.note_synced()
        return ended - started

    def _probe_op(self) -> Op:
        return records.META_PROBE, b"%d" % self._clock.now()

    # --- free space

    def note_cut_off(self, message_id: MessageId) -> None:
        """Note that an upload failed with the spool, which may have chunks of it. The next repair removes
        them.
        """
        self._cut_off.add(message_id)

    async def _look_after_space(self) -> None:
        if self._note_space(await self._read_space()):
            await self._compact()
        elif self._health.refusal is None:
            self._compactor.look()

    def _count_space(self, opened: LevelDb) -> int:
        opened.look()
        if not self._min_free_space:
            return super()._count_space(opened)
        # With less space than a compaction needs, LevelDB fails, is reopened and begins again, and few
        # outcomes are stored in between. So the reserve is only restored if a compaction still has enough
        # space. Right after a reopening there seems to be plenty.
        wanted = max(self._min_free_space, opened.moved_at_once())
        free = self._ballast.count_in(opened.free_space(), wanted=wanted)
        return free - (wanted - self._min_free_space)

    async def _compact(self) -> None:
        """Compact removed data while the disk lacks space. LevelDB itself would not, because without new mail
        it writes little.
        """
        removed = self._compactor.removed
        if self._health.refusal is not None or self._clock.monotonic() < self._compact_after:
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
        await self.committer.submit([self._probe_op()])
        if self._compactor.removed is removed:
            self._compactor.removed = None
        self._note_space(await self._read_space())

    # --- damage

    def _tell(self, known: Callable[[str], None], text: str) -> None:
        """Pass a text to the event loop. Can be called in every thread that reads or writes."""
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody needs the text
            self._loop.call_soon_threadsafe(known, text)

    def _damaged(self, text: str) -> None:
        if text not in self._damage and len(self._damage) < MOST_KINDS:
            self._damage.add(text)
            _log.error("the spool %s is damaged: %s", self._db.path, text)
            self._on_damage(text)
        self._health.set("damage", Unhealthy.DAMAGED, _damage_advice(self._db.path, "; ".join(self._damage)))

    def _note_unreadable(self, text: str) -> None:
        """Report an invalid record. The database is intact, so other records are not affected."""
        if text in self._unreadable or len(self._unreadable) > MOST_KINDS:
            return
        self._unreadable.add(text)
        self._on_damage(text)
        count = len(self._unreadable)
        self._health.note(
            "unreadable",
            f"the spool {self._db.path} holds {count if count <= MOST_KINDS else 'many'} records that are"
            f" without sense or incomplete, the first {text}: they stay where they are, and their mail is not"
            " sent; copy the directory while the relay is stopped, and report it",
        )

    def note_losses(self) -> None:
        """Report the losses that were found when the spool was opened, until an operator dismisses them."""
        told = dict(self._db.losses.problems())
        for identity in self._losses - told.keys():
            self._health.note(f"loss {identity}", None)
        for identity, text in told.items():
            self._health.note(f"loss {identity}", text)
            if identity not in self._losses:
                self._on_damage(text)
        self._losses = set(told)

    async def acknowledge(self, identity: str) -> bool:
        """Dismiss a loss, and return false if it does not exist. Raises StoreError."""
        known = await self.reader.run(self._db.losses.acknowledge, identity)
        self.note_losses()
        return known

    # --- failure and recovery

    def _begin_repair(self, error: StoreError) -> Callable[[], Coroutine[None, None, SpoolReads]]:
        if isinstance(error, StoreCorruptError):
            self._damaged(str(error))
            self._refused += 1
            self._pause = min(self._pause * 2, LONGEST_DAMAGED)
            if self._refused > MOST_REFUSED:
                self._health.note("paused", _PAUSED)
        self.on_failure()
        self.counts = Counts()  # an active count adds to the old object
        full = isinstance(error, StoreFullError)
        return lambda: self.reader.read(_reopen, self._ballast, full)

    def _first_pause(self) -> float:
        return self._pause

    def _repaired(self, found: SpoolReads) -> None:
        self.note_losses()
        self._spawn(self._sweep_cut_off())
        self._spawn(self._tell_of_all())
        self._spawn(self._count(found))

    async def _tell_of_all(self) -> None:
        """Announce all queues, because refused mail may have been stored if only its sync failed."""
        try:
            for zone in await self.read(lambda reads: reads.queues()):
                self._on_news(zone)
        except StoreError as error:
            _log.warning("could not look for mail that was refused and is in the spool: %s", error)

    async def _sweep_cut_off(self) -> None:
        """Remove the chunks of failed uploads, which may be the missing space on a full disk. Messages that
        exist are kept.
        """
        while self._cut_off and not self._db.losses.open:
            message_id = self._cut_off.pop()
            try:
                await self._sweep_from(records.message_prefix(message_id), message_id)
                self.note_removed(message_id)
            except StoreError:
                self._cut_off.add(message_id)  # for the next repair
                return

    # --- after a start

    async def _sweep(self, view: SpoolReads, last: MessageId | None) -> None:
        """Count the queue, then remove the chunks of uploads that a crash has interrupted."""
        await self._count(view)
        if last is None or self._db.damage or self._db.losses.open:
            return  # chunks whose message was damaged look like an interrupted upload
        try:
            start: bytes | None = records.MESSAGE_PREFIX
            while start is not None:
                start, took = await self._sweep_from(start, last)
                await asyncio.sleep(took * SWEEP_PAUSE)
        except StoreError as error:
            _log.warning("could not sweep the spool, the next start will: %s", error)

    async def _sweep_from(self, start: bytes, last: MessageId) -> tuple[bytes | None, float]:
        """Remove the aborted uploads of one page. Return the key of the next page, and the duration in
        seconds.
        """
        began = self._clock.monotonic()
        aborted, following = await self.reader.read(scan.aborted_uploads, start, last)
        took = self._clock.monotonic() - began
        for prefix in aborted:
            await self._remove(prefix)
        return following, took

    async def _count(self, view: SpoolReads) -> None:
        counts = self.counts

        def page_at(start: bytes) -> Coroutine[None, None, tuple[dict[QueueName, QueueCounts], bytes | None]]:
            return self.read(lambda _: view.count_page(start))

        try:
            start: bytes | None = records.WEBHOOK_PREFIX
            while start is not None:
                found, start = await page_at(start)
                counts.add(found)
            counts.is_whole = True
        except StoreError as error:
            _log.warning("could not count the queue, there are no figures of it: %s", error)
        finally:
            view.close()

    async def _remove(self, prefix: bytes) -> None:
        """Remove the chunks under a prefix. Does not wait for other writes, because a spool on a full disk
        may be usable for only some milliseconds.
        """
        while keys := await self.reader.read(scan.keys_under, prefix):
            _log.info("removing an aborted upload of %d chunks or more", len(keys))
            await self.committer.submit([(key, None) for key in keys])

    # --- closing

    async def _release(self) -> None:
        await self._compactor.close()
        self._db.on_damage = self._db.on_unreadable = lambda text: None
        await self.reader.read(LevelDb.close)
        self.reader.stop()


def _damage_advice(path: Path, what: str) -> str:
    return (
        f"the spool {path} is damaged ({what}): new mail is refused, what can be read is delivered, and the"
        f" rest stays where it is. Look at the disk and at the kernel's messages. When the queue"
        f" has drained, stop the relay. {RESCUE}"
    )


def _reopen(db: LevelDb, ballast: Ballast, full: bool) -> SpoolReads:
    if full:
        ballast.drop()
    ballast.make_way(functools.partial(db.reopen, full=full))
    return run_through(SpoolReads(db).view())
