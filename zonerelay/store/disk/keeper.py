"""Keeps the disk queue usable: its threads, free space, and what happens after a failed write.

After a failed write nothing more is written until the directories were repaired, which is tried with
growing pauses for as long as it takes. Meanwhile new mail is refused, nothing is handed out, and all that
was acknowledged stays where it is. Below `min_free_space` new mail is refused while outcomes are still
stored: they free space. Half of it is kept back as ballast and given up when the disk is full, because a
deferral needs a new file before it can replace the old one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from zonerelay.model.message_id import MessageId
from zonerelay.store.common import health
from zonerelay.store.common.ballast import Ballast
from zonerelay.store.common.group_commit import GroupCommitter
from zonerelay.store.common.health import Health
from zonerelay.store.common.writer_thread import WriterThread
from zonerelay.store.contract import StoreError, StoreFullError
from zonerelay.store.disk import batch as disk_batch
from zonerelay.store.disk import stock as disk_stock
from zonerelay.store.disk.batch import Batch, BatchWriter, Op
from zonerelay.store.disk.directories import Directories
from zonerelay.store.disk.files import State
from zonerelay.store.surroundings import Surroundings

SPACE_INTERVAL = 1.0
"""Seconds between two looks at the free space."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between two attempts to repair a failed queue."""
READ_THREADS = 2
UPLOAD_THREADS = 4

_log = logging.getLogger("zonerelay.store")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class DiskKeeper:
    """Open directories with their threads."""

    def __init__(
        self,
        directories: Directories,
        *,
        noted_id: MessageId | None,
        number: int,
        ballast: Ballast,
        min_free_space: int,
        around: Surroundings,
    ) -> None:
        """`number` is the highest of a batch that has left something behind."""
        self.directories = directories
        self.last_id: Callable[[], MessageId | None] = lambda: None
        self.on_failure: Callable[[], tuple[list[MessageId], list[MessageId]]] = lambda: ([], [])
        self.on_repair: Callable[[dict[MessageId, State]], None] = lambda _found: None
        self._readers = ThreadPoolExecutor(READ_THREADS, "queue-reader")
        # Apart, so that a batch of small messages does not wait for large ones to be synced.
        self._uploaders = ThreadPoolExecutor(UPLOAD_THREADS, "queue-upload")
        self._stagers = ThreadPoolExecutor(disk_batch.IO_THREADS - 1, "queue-writer")
        self._writer = BatchWriter(directories, self._stagers)
        self._writer.found_last_id(noted_id)
        self.committer: GroupCommitter[Op, Batch, float] = GroupCommitter(
            self._prepare,
            functools.partial(WriterThread, "spool-writer", self._write),
            clock=around.clock,
            observe=around.observe_commit,
            failed=self._fail,
        )
        self._loop = asyncio.get_running_loop()
        self._ballast = ballast
        self._min_free_space = min_free_space
        self._may_write = 0
        self._look_at_space = asyncio.Event()
        self._clock = around.clock
        self._health = Health(around.on_health)
        self.check_usable = self._health.check_usable
        self.check_writable = self._health.check_writable
        self.unhealthy = self._health.unhealthy
        self.problems = self._health.problems
        self.usable = self._health.usable
        self._closed = False
        self._number = number
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._spawn(self._watch_space())

    async def probe(self) -> None:
        self.check_usable()
        await self.committer.submit([disk_batch.Probe()])

    # --- threads

    async def read(self, function: Callable[[Directories, *Ts], T], *args: *Ts) -> T:
        """`function(directories, …)` in a reader thread. Raises what it raises: StoreError."""
        self._check_open()
        return await self._loop.run_in_executor(self._readers, function, self.directories, *args)

    def work(self, function: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Part of an upload, in one of the threads for them."""
        self._check_open()
        return self._loop.run_in_executor(self._uploaders, function, *args)

    def note_upload(self, octets: int) -> None:
        """So much more has arrived of a large message."""
        self._may_write -= octets
        if self._may_write < 0:
            self._look_at_space.set()

    def note_full(self) -> None:
        """An upload found no room. The next look at the free space says whether there is some again."""
        self._health.set("space", health.NO_SPACE)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(health.CLOSED)

    # --- writing

    def _prepare(self, submissions: Sequence[Sequence[Op]], size: int) -> Batch:
        """On the event loop."""
        self.note_upload(size)
        self._number += 1
        batch = Batch(self._number, self.last_id())
        for ops in submissions:
            batch.add(ops)
        return batch

    def _write(self, batch: Batch) -> float:
        """In the writer thread; the seconds that it took."""
        started = self._clock.monotonic()
        self._writer.write(batch)
        return self._clock.monotonic() - started

    # --- free space

    async def _watch_space(self) -> None:
        while True:
            self._look_at_space.clear()
            try:
                self._note_space(await self.read(_free_space, self._ballast, self._min_free_space))
            except StoreError as error:
                _log.warning("cannot look after the free space of the queue: %s", error)
            timer = self._loop.call_later(SPACE_INTERVAL, self._look_at_space.set)
            await self._look_at_space.wait()
            timer.cancel()

    def _note_space(self, free: int) -> None:
        left = free - self._min_free_space
        self._health.set("space", health.NO_SPACE if left < 0 else None)
        # Fast writers must not get from here to the end before the next look.
        self._may_write = left // 2 if left >= 0 else sys.maxsize

    # --- failure and repair

    def _fail(self, error: StoreError) -> None:
        _log.error("the queue directories cannot be written and are being repaired: %s", error)
        self._health.refusal = error
        full = isinstance(error, StoreFullError)
        refused, touched = self.on_failure()
        if not self._closed:
            self._spawn(self._repair(refused, touched, full=full))
        self._health.set("write", health.NO_SPACE if full else health.WRITE_FAILED)

    async def _repair(self, refused: list[MessageId], touched: list[MessageId], *, full: bool) -> None:
        pause = FIRST_PAUSE
        while True:
            await asyncio.sleep(pause)
            try:
                found = await self.read(_repair, self._ballast, refused, touched, full)
                free = await self.read(_free_space, self._ballast, self._min_free_space)
                break
            except StoreError as error:
                _log.warning("the queue directories cannot be repaired yet: %s", error)
                pause = min(pause * 2, LONGEST_PAUSE)
        self.on_repair(found)
        self._health.refusal = None
        self.committer.resume()
        self._note_space(free)
        self._health.set("write", None)

    # --- closing

    async def close(self) -> None:
        """Write what was submitted, then release everything. A second call does nothing."""
        if self._closed:
            return
        self._health.close()
        self._health.refusal = StoreError(health.CLOSED)
        self.committer.refuse(self._health.refusal)
        await self.committer.drain()
        self._closed = True
        self.committer.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.run_in_executor(None, self._release)

    def _release(self) -> None:
        self._uploaders.shutdown()
        self._stagers.shutdown()
        self._readers.shutdown()
        self.directories.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _free_space(directories: Directories, ballast: Ballast, min_free_space: int) -> int:
    return ballast.count_in(directories.free_space(), wanted=min_free_space)


def _repair(
    directories: Directories, ballast: Ballast, refused: list[MessageId], touched: list[MessageId], full: bool
) -> dict[MessageId, State]:
    if full:
        ballast.drop()
    return disk_stock.repair(directories, refused, touched)
