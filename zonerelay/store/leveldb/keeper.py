"""Keeps the LevelDB spool usable: it reopens after a failed write, tells of damage, compacts and sweeps.

`LocalKeeper` says when writing stops and begins again; the repair of this engine is to reopen the database. A
spool that has shown damage takes no new mail until the next start, and delivers what can be read. Half of
`min_free_space` is kept back as ballast and given up when the disk is full, so that the queue can be drained
even then.

What the keepers of the stores on this machine's own disks share: writing, free space, failure, closing.

After a failed write nothing more is written until the engine has repaired its files, which is tried with
growing pauses for as long as it takes (an operator has to free a full disk first). Meanwhile new mail is
refused, nothing is handed out, and everything that was acknowledged stays where it is. Below `min_free_space`
new mail is refused while outcomes are still stored, because they free space.

The engine decides what a repair is and what its memory still knows after it. This module owns the order:
refuse first, repair, believe the repaired state, then write again.

Gives back the space of many messages that were removed: a big drop, an expiry, a backlog delivered.

LevelDB compacts by itself only where it is written to, so the bodies of a dropped queue would stay on disk,
and its tombstones in the way of every walk. The range is compacted in slices, in a thread of its own, with
pauses: while LevelDB does as it is told it does nothing else, and acceptance would come to a stop when new
tables have piled up.
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
from zonerelay.process.threads import STORE
from zonerelay.store.common import records
from zonerelay.store.common.counts import Counts
from zonerelay.store.common.keeper import health
from zonerelay.store.common.keeper.ballast import Ballast
from zonerelay.store.common.keeper.disk_watch import SpaceWatch
from zonerelay.store.common.keeper.health import Health
from zonerelay.store.common.keeper.reader_threads import ReaderThreads
from zonerelay.store.common.write.group_commit import GroupCommitter, WriterThread
from zonerelay.store.contract import StoreCorruptError, StoreError, StoreFullError, Unhealthy
from zonerelay.store.leveldb import scan
from zonerelay.store.leveldb.damage.directory import RESCUE
from zonerelay.store.leveldb.engine import AtomicBatch, Batches, Op, View
from zonerelay.store.leveldb.spool import LevelDb
from zonerelay.store.surroundings import Surroundings

MANY = 20_000
"""Messages that have to be gone before it is worth while."""
SHARE = 4
"""And one for so many deliveries that are left: those are written anew."""
SLICE = 16 * 1024 * 1024
MOST_SLICES = 64
PAUSE = 0.2
"""Seconds between two slices."""


class Compactor:
    """One per open spool. `left` says how many deliveries there are."""

    def __init__(self, db: LevelDb, left: Callable[[], int]) -> None:
        self._thread = ReaderThreads(db, "spool-compactor")
        self._left = left
        self._count = 0
        self.removed: tuple[MessageId, MessageId] | None = None
        """The first and the last of the messages whose space can be had back."""
        self._seen = 0
        self._task: asyncio.Task[None] | None = None

    def note_removed(self, message_id: MessageId) -> None:
        self._count += 1
        first, last = self.removed or (message_id, message_id)
        self.removed = (min(first, message_id), max(last, message_id))

    def look(self) -> None:
        """Asked every second: begins when many are gone and no more are being removed at present."""
        is_quiet = self._count - self._seen < MANY // 10
        self._seen = self._count
        if not is_quiet or self.removed is None or self._count < max(MANY, self._left() // SHARE):
            return
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(*self.removed))
            self._count = self._seen = 0
            self.removed = None

    async def close(self) -> None:
        """Ends after the slice that is being compacted."""
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
    """Return the keys of messages from the first to the last in parts, then the small records of all."""
    low, high = int(first, 16), int(last, 16)
    step = max(1, -(-(high - low + 1) // count))
    starts = [records.message_prefix(MessageId(f"{number:016x}")) for number in range(low, high + 1, step)]
    stops = [*starts[1:], whole(first, last)[1]]
    others = (records.DELIVERY_PREFIX, records.WEBHOOK_PREFIX, records.DEFERRED_PREFIX, records.DOMAIN_PREFIX)
    return [*zip(starts, stops, strict=True), *((prefix, records.after(prefix)) for prefix in others)]


class Place(Protocol):
    """What an engine has opened."""

    def free_space(self) -> int:
        """Return bytes that this process may still write there. Raises StoreError."""


Opened = TypeVar("Opened", bound=Place)
Operation = TypeVar("Operation")
Job = TypeVar("Job")
Repaired = TypeVar("Repaired")


class LocalKeeper(abc.ABC, Generic[Opened, Operation, Job, Repaired]):
    """Belongs to the event loop that opened the store. `Repaired` is what a repair brings back."""

    NAME = "spool"
    FAILED = "the spool cannot be written: %s"
    NOT_YET = "the spool cannot be repaired yet: %s"
    COPIES = 1
    """How often an octet that is written may be on the disk for some time."""

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

    # --- what an engine says

    @abc.abstractmethod
    def _prepare(self, submissions: Sequence[Sequence[Operation]], size: int) -> Job:
        """On the event loop: makes one job of what was submitted. `size` is in bytes."""

    @abc.abstractmethod
    def _write(self, job: Job) -> float:
        """In the writer thread: makes the job durable. Returns the seconds that it took."""

    @abc.abstractmethod
    def _probe_op(self) -> Operation:
        """Return the smallest change that shows that the engine can write."""

    @abc.abstractmethod
    def _begin_repair(self, error: StoreError) -> Callable[[], Coroutine[None, None, Repaired]]:
        """Memory forgets what it is no longer certain of. Returns one attempt at a repair."""

    @abc.abstractmethod
    def _repaired(self, found: Repaired) -> None:
        """Memory learns what the repair has found. Nothing is written before this returns."""

    @abc.abstractmethod
    async def _release(self) -> None:
        """Closes what the engine has opened and ends its threads."""

    def _first_pause(self) -> float:
        """Return seconds until the first attempt at a repair."""
        return health.FIRST_PAUSE

    # --- writing

    async def probe(self) -> None:
        self.check_usable()
        await self.committer.submit([self._probe_op()])

    # --- free space

    def start(self) -> None:
        """Watches the free space from here on."""
        self._watcher = self._loop.create_task(self._space.run())

    async def _look_after_space(self) -> None:
        self._note_space(await self._read_space())

    async def _read_space(self) -> int:
        """Return bytes that are free, the ballast included. Raises StoreError."""
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
        """Writes what was submitted, then releases everything. A second call does nothing."""
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
"""Seconds of which a log that lost its end looks like one that was torn by a power cut."""
COMPACT_INTERVAL = 5.0
"""Seconds between two compactions while there is too little space."""
LARGE_BATCH = 256 * 1024
"""Octets from which a batch is put together in the writer thread."""
SWEEP_PAUSE = 20
"""The pause after a page of the search for aborted uploads, as a multiple of the time that the page took. No
caller waits for the search; a million messages take 100 s of CPU time, and while a third of a thread did so,
new mail lost a fifth of its rate.
"""
LONGEST_DAMAGED = 60.0
"""Seconds between two attempts to reopen a spool whose damage makes it fail, for the outcomes that wait:
LevelDB's compaction meets the damage again after each reopening.
"""
MOST_REFUSED = 1
"""Times that damage may make it fail before nothing is handed out any more. A crash repeats what waits."""
MOST_KINDS = 16
"""Of damage that are told one by one, and messages that are named."""

_log = logging.getLogger("zonerelay.store")


_PAUSED = (
    "the spool cannot be written for long because it is damaged: deliveries pause until the next start, so"
    " that none is repeated; now and then it is reopened to store the outcomes that wait"
)


class WriteJob(NamedTuple):
    """One write. Records are put into a batch on the event loop: plyvel lets go of the interpreter at every
    single one, and another thread would wait long to get it back. Bodies are worth that wait.
    """

    batch: AtomicBatch | None
    batches: Batches


class SpoolKeeper(LocalKeeper[LevelDb, Op, WriteJob, View]):
    """One open spool directory with its threads. A repair brings a view of the reopened spool."""

    FAILED = "the spool cannot be written and is being reopened: %s"
    NOT_YET = "the spool cannot be reopened yet: %s"
    # LevelDB moves what is written from its log through its levels.
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

    def sweep(self, view: View, last: MessageId | None) -> None:
        """Sweep what the last run left and watch the space. `view` is the spool as it was opened, `last` the
        highest id in it: new messages have higher ones.
        """
        self._db.on_damage = functools.partial(self._tell, self._damaged)
        self._db.on_unreadable = functools.partial(self._tell, self._note_unreadable)
        if self._db.damage:
            self._damaged(self._db.damage)
        self.note_losses()
        self._spawn(self._sweep(view, last))
        self.start()

    def check_claims(self) -> None:
        """Raises StoreError while nothing may be handed out."""
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
        """The upload failed with the spool, which may hold chunks of it: the next repair removes them."""
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
        # With less than a compaction takes LevelDB fails, is reopened and begins anew, again and again, and
        # few outcomes are stored in between. So room is kept back again only beside what a compaction takes:
        # right after a reopening there seems to be plenty.
        wanted = max(self._min_free_space, opened.moved_at_once())
        free = self._ballast.count_in(opened.free_space(), wanted=wanted)
        return free - (wanted - self._min_free_space)

    async def _compact(self) -> None:
        """Without new mail LevelDB would keep what was removed for ever, and there would be no new mail."""
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
        # That it failed is only seen at the next write; reopening then gives it more room.
        await self.committer.submit([self._probe_op()])
        if self._compactor.removed is removed:
            self._compactor.removed = None
        self._note_space(await self._read_space())

    # --- damage

    def _tell(self, known: Callable[[str], None], text: str) -> None:
        """Callable in every thread that reads or writes."""
        with contextlib.suppress(RuntimeError):  # the loop was closed: no listener is left
            self._loop.call_soon_threadsafe(known, text)

    def _damaged(self, text: str) -> None:
        if text not in self._damage and len(self._damage) < MOST_KINDS:
            self._damage.add(text)
            _log.error("the spool %s is damaged: %s", self._db.path, text)
            self._on_damage(text)
        self._health.set("damage", Unhealthy.DAMAGED, _damage_advice(self._db.path, "; ".join(self._damage)))

    def _note_unreadable(self, text: str) -> None:
        """LevelDB is sound, a record is not: others are as good as before."""
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
        """Shows the losses that openings have found, until an operator acknowledges them."""
        told = dict(self._db.losses.problems())
        for identity in self._losses - told.keys():
            self._health.note(f"loss {identity}", None)
        for identity, text in told.items():
            self._health.note(f"loss {identity}", text)
            if identity not in self._losses:
                self._on_damage(text)
        self._losses = set(told)

    async def acknowledge(self, identity: str) -> bool:
        """False when no such loss waits for it. Raises StoreError."""
        known = await self.reader.run(self._db.losses.acknowledge, identity)
        self.note_losses()
        return known

    # --- failure and recovery

    def _begin_repair(self, error: StoreError) -> Callable[[], Coroutine[None, None, View]]:
        if isinstance(error, StoreCorruptError):
            self._damaged(str(error))
            self._refused += 1
            self._pause = min(self._pause * 2, LONGEST_DAMAGED)
            if self._refused > MOST_REFUSED:
                self._health.note("paused", _PAUSED)
        self.on_failure()
        self.counts = Counts()  # a count that is under way adds to the old one
        full = isinstance(error, StoreFullError)
        return lambda: self.reader.read(_reopen, self._ballast, full)

    def _first_pause(self) -> float:
        return self._pause

    def _repaired(self, found: View) -> None:
        self.note_losses()
        self._spawn(self._sweep_cut_off())
        self._spawn(self._tell_of_all())
        self._spawn(self._count(found))

    async def _tell_of_all(self) -> None:
        """Mail that was refused may be in the spool all the same, when only its sync failed."""
        try:
            for zone in await self.reader.read(scan.queues):
                self._on_news(zone)
        except StoreError as error:
            _log.warning("could not look for mail that was refused and is in the spool: %s", error)

    async def _sweep_cut_off(self) -> None:
        """On a full disk that is the space that is missing. A message may be there after all."""
        while self._cut_off and not self._db.losses.open:
            message_id = self._cut_off.pop()
            try:
                await self._sweep_from(records.message_prefix(message_id), message_id)
                self.note_removed(message_id)
            except StoreError:
                self._cut_off.add(message_id)  # for the next repair
                return

    # --- after a start

    async def _sweep(self, view: View, last: MessageId | None) -> None:
        """Count the queue, then remove the chunks of uploads that a crash cut off."""
        await self._count(view)
        if last is None or self._db.damage or self._db.losses.open:
            return  # chunks whose message is in what is damaged look like an upload that was cut off
        try:
            start: bytes | None = records.MESSAGE_PREFIX
            while start is not None:
                start, took = await self._sweep_from(start, last)
                await asyncio.sleep(took * SWEEP_PAUSE)
        except StoreError as error:
            _log.warning("could not sweep the spool, the next start will: %s", error)

    async def _sweep_from(self, start: bytes, last: MessageId) -> tuple[bytes | None, float]:
        """Removes the aborted uploads of one page. Returns the key of the next, and the seconds it took."""
        began = self._clock.monotonic()
        aborted, following = await self.reader.read(scan.aborted_uploads, start, last)
        took = self._clock.monotonic() - began
        for prefix in aborted:
            await self._remove(prefix)
        return following, took

    async def _count(self, view: View) -> None:
        counts = self.counts
        try:
            start: bytes | None = records.WEBHOOK_PREFIX
            while start is not None:
                found, start = await self.reader.read(scan.count_page, start, view)
                counts.add(found)
            counts.is_whole = True
        except StoreError as error:
            _log.warning("could not count the queue, there are no figures of it: %s", error)
        finally:
            view.close()

    async def _remove(self, prefix: bytes) -> None:
        """Does not wait for other writes: a spool on a full disk may be good for some milliseconds."""
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


def _reopen(db: LevelDb, ballast: Ballast, full: bool) -> View:
    if full:
        ballast.drop()
    ballast.make_way(functools.partial(db.reopen, full=full))
    return db.snapshot()
