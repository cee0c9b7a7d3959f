"""Opens the queue in a partition of any engine, and keeps it usable.

On failure: `Partition` reports when writing becomes impossible and possible again. In between, callers
receive StoreError, and everything in memory except claims is discarded. Only new mail is refused if there is
no space for it. The keeper of a LevelDB spool is in `store/leveldb`.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TypeVar

from zonerelay.model.envelope import MessageId
from zonerelay.store import records
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import StoreError, StoreFullError, Unhealthy
from zonerelay.store.keys.partition import Partition
from zonerelay.store.keys.port import FencedError, Op, Write, clear
from zonerelay.store.queue.keeper import QueueKeeper
from zonerelay.store.queue.reads import QueueReads
from zonerelay.store.queue.store import PartitionStore

T = TypeVar("T")
Release = Callable[[], Awaitable[None]]
Foreign = Callable[[], Awaitable[str]]


def _undo(write: Write) -> Write | None:
    """Return a write that removes the new mail of a refused write, or None if it contains no new mail. The
    client has received 451 and will retry. Outcomes are written again anyway.
    """
    made = {
        key.split(b" ")[1] for key in write.changes if key[:8] == records.MESSAGE_PREFIX and key[-1:] == b"*"
    }
    is_new = None not in write.changes.values()
    if is_new and all(key[:9] == b"meta once" or made.intersection(key.split(b" ")) for key in write.changes):
        return Write(dict.fromkeys(write.changes), makes_room=True)
    return None


class PartitionKeeper(QueueKeeper):
    """Maintains the queue in a partition, and reopens the partition after a failure."""

    def __init__(
        self,
        partition: Partition,
        around: StoreContext,
        release: Release,
        foreign: Foreign,
        min_free_space: int,
    ) -> None:
        super().__init__(around, min_free_space=min_free_space, counted_from=records.WEBHOOK_PREFIX)
        self._let_go = release
        self._foreign = foreign
        partition.on_failure, partition.on_back = self._fail, self._back
        partition.on_refused = lambda: self.on_failure()
        partition.observe, partition.undo = around.observe_commit, _undo
        self.partition = partition
        self.reads = QueueReads(partition, self._note_unreadable)

    def submit(
        self,
        ops: Sequence[Op],
        *,
        size: int = 0,
        lazy: bool = False,
        applied: Callable[[], None] | None = None,
    ) -> asyncio.Future[None]:
        """Write operations to the partition. Changes and removals count as freeing space; a new message does
        not.
        """
        self.space.note_written(size)
        # A new message begins with its last chunks or its `#`. Chunks alone belong to an arriving message.
        key, value = ops[0]
        is_new = value is not None and key.startswith(records.MESSAGE_PREFIX)
        write = Write(dict(ops), makes_room=not is_new)
        last = ops[-1][0]
        if is_new and last.startswith(records.MESSAGE_PREFIX) and last.rpartition(b" ")[2].isdigit():
            staged = self.partition.stage(write)
            staged.add_done_callback(self._note_staged)
            return staged
        return self.partition.write(write, lazy=lazy, applied=applied)

    def _note_staged(self, staged: asyncio.Future[None]) -> None:
        if not staged.cancelled() and isinstance(staged.exception(), StoreFullError):
            self.health.set("space", Unhealthy.NO_SPACE)  # until the next check

    async def read(self, ask: Callable[[QueueReads], Coroutine[None, None, T]]) -> T:
        return await ask(self.reads)

    def begin(self, last: MessageId | None) -> None:
        self._start(self._count, "count the queue")
        if last is not None:
            self._start(functools.partial(self._sweep, last), "remove uploads that were never completed")
        self._watch_space()

    async def _count(self) -> None:
        counts = self.counts
        while counts.left is not None:
            async with self.partition.batches:
                found, counts.left = await self.reads.count_page(counts.left)
                counts.add(found)
        counts.is_whole = True

    async def _clear_cut_off(self) -> None:
        await self.probe()  # staged values are visible after this write
        await self._sweep_cut_off()

    async def left_over(self) -> str:
        return await super().left_over() or await self._foreign()

    async def _look_at_space(self) -> None:
        free = await self.partition.room()
        if free is None:
            self.health.set("space", None)
        else:
            self.space.note(free)

    def _fail(self, error: StoreError) -> None:
        self._refuse(error, Unhealthy.NO_LEASE if isinstance(error, FencedError) else None, str(error))

    def _back(self) -> None:
        self.on_failure()
        self.health.refuse(None)
        self.health.set("write", None)
        self._start(self._clear_cut_off, "remove an upload that failed")
        self._start(self._count, "count the queue")
        self._start(self._tell_news, "look for stored mail that was rejected")

    async def _release(self) -> None:
        await self._end_tasks()
        await self.partition.close()
        await self._let_go()


async def _nothing() -> None:
    """Do nothing, because there is nothing to release."""


async def _none_foreign() -> str:
    return ""


async def open_queue(
    partition: Partition,
    around: StoreContext,
    *,
    release: Release = _nothing,
    foreign: Foreign = _none_foreign,
    min_free_space: int = 0,
) -> PartitionStore:
    """Open the queue in a partition. `release` is called when the partition is closed, also if the queue
    cannot be opened. `foreign` describes foreign files in its directories. Raises StoreError.
    """
    keeper = PartitionKeeper(partition, around, release, foreign, min_free_space)
    try:
        hints = records.DOMAIN_PREFIX
        await clear(partition, hints, records.after(hints), partition.write)
        await partition.write(Write({records.META_FORMAT: records.FORMAT_VERSION}, makes_room=True))
        last = await keeper.reads.last_message_id()
        is_empty = not await keeper.reads.queues()
    except BaseException:
        await partition.abandon()
        await release()
        raise
    return PartitionStore(keeper, around, last_id=last, empty=is_empty)
