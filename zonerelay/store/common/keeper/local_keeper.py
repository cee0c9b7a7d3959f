"""What the keepers of the stores on this machine's own disks share: writing, free space, failure, closing.

After a failed write nothing more is written until the engine has repaired its files, which is tried with
growing pauses for as long as it takes (an operator has to free a full disk first). Meanwhile new mail is
refused, nothing is handed out, and everything that was acknowledged stays where it is. Below `min_free_space`
new mail is refused while outcomes are still stored, because they free space.

The engine decides what a repair is and what its memory still knows after it. This module owns the order:
refuse first, repair, believe the repaired state, then write again.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Generic, Protocol, TypeVar

from zonerelay.store.common.keeper import health
from zonerelay.store.common.keeper.ballast import Ballast
from zonerelay.store.common.keeper.disk_watch import SpaceWatch
from zonerelay.store.common.keeper.health import Health
from zonerelay.store.common.keeper.reader_threads import ReaderThreads
from zonerelay.store.common.write.group_commit import GroupCommitter, WriterThread
from zonerelay.store.contract import StoreError, StoreFullError, Unhealthy
from zonerelay.store.surroundings import Surroundings

_log = logging.getLogger("zonerelay.store")


class Place(Protocol):
    """What an engine has opened."""

    def free_space(self) -> int:
        """Octets that this process may still write there. Raises StoreError."""


Opened = TypeVar("Opened", bound=Place)
Op = TypeVar("Op")
Job = TypeVar("Job")
Repaired = TypeVar("Repaired")


class LocalKeeper(abc.ABC, Generic[Opened, Op, Job, Repaired]):
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
        self.committer: GroupCommitter[Op, Job, float] = GroupCommitter(
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
    def _prepare(self, submissions: Sequence[Sequence[Op]], size: int) -> Job:
        """On the event loop: makes one job of what was submitted. `size` is in octets."""

    @abc.abstractmethod
    def _write(self, job: Job) -> float:
        """In the writer thread: makes the job durable. Returns the seconds that it took."""

    @abc.abstractmethod
    def _probe_op(self) -> Op:
        """The smallest change that shows that the engine can write."""

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
        """Seconds until the first attempt at a repair."""
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
        """Octets that are free, the ballast included. Raises StoreError."""
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
