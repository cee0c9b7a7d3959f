"""Keeps the LevelDB spool usable: it reopens after a failed write, tells of damage, compacts and sweeps.

`LocalKeeper` says when writing stops and begins again; the repair of this engine is to reopen the database. A
spool that has shown damage takes no new mail until the next start, and delivers what can be read. Half of
`min_free_space` is kept back as ballast and given up when the disk is full, so that the queue can be drained
even then.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import NamedTuple

from zonerelay.model.message_id import MessageId
from zonerelay.store.common import records
from zonerelay.store.common.counts import Counts
from zonerelay.store.common.keeper import health
from zonerelay.store.common.keeper.ballast import Ballast
from zonerelay.store.common.keeper.local_keeper import LocalKeeper
from zonerelay.store.common.keeper.reader_threads import ReaderThreads
from zonerelay.store.contract import StoreCorruptError, StoreError, StoreFullError, Unhealthy
from zonerelay.store.leveldb import scan
from zonerelay.store.leveldb.compaction import Compactor, whole
from zonerelay.store.leveldb.damage.directory import RESCUE
from zonerelay.store.leveldb.engine import AtomicBatch, Batches, Op, View
from zonerelay.store.leveldb.spool import LevelDb
from zonerelay.store.surroundings import Surroundings

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
