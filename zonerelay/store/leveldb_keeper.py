"""Keeps the LevelDB spool usable: writing, free space, reopening after trouble, sweeping after a start.

After a failed write nothing more is written until the database was reopened, which is tried with
growing pauses for as long as it takes (a full disk has to be freed first). Meanwhile new mail is
refused, nothing is handed out, and all that was acknowledged stays where it is. Below
`min_free_space` new mail is refused while outcomes are still stored: they free space.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import NamedTuple

from zonerelay.model.clock import Clock
from zonerelay.store import health, records
from zonerelay.store import leveldb_scan as scan
from zonerelay.store.base import StoreError, StoreFullError
from zonerelay.store.group_commit import GroupCommitter
from zonerelay.store.health import Health
from zonerelay.store.leveldb_engine import LevelDb, Op, View
from zonerelay.store.leveldb_threads import SpoolThreads
from zonerelay.store.tally import Tally

SPACE_INTERVAL = 1.0
"""Seconds between two looks at the free space."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between two attempts to reopen a failed spool."""

_log = logging.getLogger("zonerelay.store")


class Written(NamedTuple):
    """What a write in the writer thread reports."""

    seconds: float
    free_space: int | None


class SpoolKeeper:
    """One open spool directory with its threads."""

    def __init__(
        self,
        threads: SpoolThreads,
        *,
        min_free_space: int,
        clock: Clock,
        on_health: Callable[[str | None], None],
        observe_commit: Callable[[float], None],
    ) -> None:
        self.threads = threads
        self.committer = GroupCommitter(self._write, threads.writer, observe=self._written, failed=self._fail)
        self.counts = Tally()
        self.on_failure: Callable[[], None] = lambda: None
        self._db = threads.db
        self._min_free_space = min_free_space
        self._clock = clock
        self._health = Health(on_health)
        self._observe_commit = observe_commit
        self._space_checked = clock.monotonic() - SPACE_INTERVAL
        self._failure: StoreError | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._space_task: asyncio.Task[None] | None = None

    def start(self, view: View) -> None:
        """Sweep what the last run left, in the background. `view` is the spool as it was opened."""
        self._spawn(self._sweep(view))
        self._look_at_space()

    # --- may it be used?

    def check_open(self) -> None:
        if self._closed:
            raise StoreError(health.CLOSED)

    def check_usable(self) -> None:
        """Raises StoreError while the spool is failed or closed."""
        self.check_open()
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def check_writable(self) -> None:
        """Also raises StoreFullError when there is too little space for new mail."""
        self.check_usable()
        if self.unhealthy() is not None:
            raise StoreFullError(health.NO_SPACE)

    def unhealthy(self) -> str | None:
        if self._clock.monotonic() - self._space_checked >= SPACE_INTERVAL:
            self._look_at_space()
        return self._health.reason

    async def probe(self) -> None:
        self.check_writable()
        mark = b"%d" % self._clock.now()
        await self.committer.submit([(records.META_PROBE, mark)])

    # --- writing

    def _write(self, batches: Sequence[Sequence[Op]]) -> Written:
        """In the writer thread."""
        started = self._clock.monotonic()
        self._db.write(batches)
        ended = self._clock.monotonic()
        is_time = ended - self._space_checked >= SPACE_INTERVAL
        return Written(ended - started, self._db.free_space() if is_time else None)

    def _written(self, written: Written) -> None:
        self._observe_commit(written.seconds)
        if written.free_space is not None:
            self._note_space(written.free_space)

    # --- free space

    def _look_at_space(self) -> None:
        if self._space_task is None and not self._closed:
            self._space_checked = self._clock.monotonic()
            self._space_task = self._spawn(self._check_space())

    async def _check_space(self) -> None:
        try:
            self._note_space(await self.threads.read(LevelDb.free_space))
        except StoreError as error:
            _log.warning("cannot look at the free space of the spool: %s", error)
        finally:
            self._space_task = None

    def _note_space(self, free: int) -> None:
        self._space_checked = self._clock.monotonic()
        self._health.set("space", health.NO_SPACE if free < self._min_free_space else None)
        if free < self._min_free_space and not self._closed:
            # Nobody may be asking: recovery must show by itself.
            asyncio.get_running_loop().call_later(SPACE_INTERVAL, self._look_at_space)

    # --- failure and recovery

    def _fail(self, error: StoreError) -> None:
        _log.error("the spool cannot be written and is being reopened: %s", error)
        self._failure = error
        full = isinstance(error, StoreFullError)
        self.on_failure()
        self.counts = Tally()  # a count that is under way adds to the old one
        if not self._closed:
            self._spawn(self._recover())
        self._health.set("write", health.NO_SPACE if full else health.WRITE_FAILED)

    async def _recover(self) -> None:
        pause = FIRST_PAUSE
        while True:
            await asyncio.sleep(pause)
            try:
                view = await self.threads.read(_reopen)
                break
            except StoreError as error:
                _log.warning("the spool cannot be reopened yet: %s", error)
                pause = min(pause * 2, LONGEST_PAUSE)
        self._failure = None
        self.committer.resume()
        self._spawn(self._count(view))
        self._health.set("write", None)

    # --- after a start

    async def _sweep(self, view: View) -> None:
        """Count the queue, then remove the chunks of uploads that a crash cut off."""
        try:
            await self._count(view, close=False)
            start: bytes | None = records.MESSAGE_PREFIX
            while start is not None:
                aborted, start = await self.threads.read(scan.aborted_uploads, start, view)
                for prefix in aborted:
                    await self._remove(prefix)
        except StoreError as error:
            _log.warning("could not sweep the spool, the next start will: %s", error)
        finally:
            view.close()

    async def _count(self, view: View, *, close: bool = True) -> None:
        counts = self.counts
        try:
            start: bytes | None = records.DELIVERY_PREFIX
            while start is not None:
                found, start = await self.threads.read(scan.count_page, start, view)
                counts.add(found)
        except StoreError as error:
            _log.warning("could not count the queue: %s", error)
        finally:
            if close:
                view.close()

    async def _remove(self, prefix: bytes) -> None:
        while keys := await self.threads.read(scan.keys_under, prefix):
            _log.info("removing an aborted upload of %d chunks or more", len(keys))
            await self.committer.submit([(key, None) for key in keys], lazy=True)

    # --- closing

    async def close(self) -> None:
        """Write what was submitted, then release everything. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.committer.refuse(StoreError(health.CLOSED))
        await self.committer.drain()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.threads.read(LevelDb.close)
        self.threads.stop()
        self._health.set("closed", health.CLOSED)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _reopen(db: LevelDb) -> View:
    db.reopen()
    return db.snapshot()
