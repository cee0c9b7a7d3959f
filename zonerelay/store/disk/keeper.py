"""Keeps the disk queue usable: it owns the threads, and repairs the directories after a failed write.

`LocalKeeper` says when writing stops and begins again. Half of `min_free_space` is kept back as ballast and
given up when the disk is full, because a deferral needs a new file before it can replace the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from zonerelay.model.message_id import MessageId
from zonerelay.process.threads import STORE
from zonerelay.store.common.keeper.ballast import Ballast
from zonerelay.store.common.keeper.local_keeper import LocalKeeper
from zonerelay.store.common.keeper.reader_threads import ReaderThreads
from zonerelay.store.contract import StoreError, StoreFullError, Unhealthy
from zonerelay.store.disk import batch as disk_batch
from zonerelay.store.disk import stock as disk_stock
from zonerelay.store.disk.batch import FileBatch, FileBatchWriter, Op
from zonerelay.store.disk.directories import Directories
from zonerelay.store.disk.files import State
from zonerelay.store.surroundings import Surroundings

READ_THREADS = 2
UPLOAD_THREADS = 4

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


Found = dict[MessageId, State]
"""What a repair has found of the messages that the failed writes touched."""


class DiskKeeper(LocalKeeper[Directories, Op, FileBatch, Found]):
    """Open directories with their threads."""

    NAME = "queue"
    FAILED = "the queue directories cannot be written and are being repaired: %s"
    NOT_YET = "the queue directories cannot be repaired yet: %s"

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
        reader = ReaderThreads(directories, "queue-reader", threads=READ_THREADS)
        super().__init__(reader, ballast=ballast, min_free_space=min_free_space, around=around)
        self.directories = directories
        self.read = reader.read
        self.last_id: Callable[[], MessageId | None] = lambda: None
        self.on_failure: Callable[[], tuple[list[MessageId], list[MessageId]]] = lambda: ([], [])
        self.on_repair: Callable[[Found], None] = lambda _found: None
        # Apart, so that a batch of small messages does not wait for large ones to be synced.
        self._uploaders = ReaderThreads(directories, "queue-upload", threads=UPLOAD_THREADS)
        self.work = self._uploaders.run
        self._stagers = ThreadPoolExecutor(disk_batch.IO_THREADS - 1, "queue-writer")
        self._writer = FileBatchWriter(directories, self._stagers, noted_id)
        self._number = number

    def note_full(self) -> None:
        """An upload found no room. The next look at the free space says whether there is some again."""
        self._health.set("space", Unhealthy.NO_SPACE)

    # --- writing

    def _prepare(self, submissions: Sequence[Sequence[Op]], size: int) -> FileBatch:
        self.note_written(size)
        self._number += 1
        batch = FileBatch(self._number, self.last_id())
        for ops in submissions:
            batch.add(ops)
        return batch

    def _write(self, batch: FileBatch) -> float:
        started = self._clock.monotonic()
        self._writer.write(batch)
        return self._clock.monotonic() - started

    def _probe_op(self) -> Op:
        return disk_batch.Probe()

    # --- failure and repair

    def _begin_repair(self, error: StoreError) -> Callable[[], Coroutine[None, None, Found]]:
        refused, touched = self.on_failure()
        full = isinstance(error, StoreFullError)
        return lambda: self.read(_repair, self._ballast, refused, touched, full)

    def _repaired(self, found: Found) -> None:
        self.on_repair(found)

    # --- closing

    async def _release(self) -> None:
        await STORE.run(self._close)

    def _close(self) -> None:
        self._uploaders.stop()
        self._stagers.shutdown()
        self.reader.stop()
        self.directories.close()


def _repair(
    directories: Directories, ballast: Ballast, refused: list[MessageId], touched: list[MessageId], full: bool
) -> Found:
    if full:
        ballast.drop()
    return disk_stock.repair(directories, refused, touched)
