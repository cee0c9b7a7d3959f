"""Keeps a queue usable: watches its health and free space, counts its deliveries, and removes unfinished
uploads.

After a failed write nothing more is written until the keeper has repaired what it writes to. Until then new
mail is refused, nothing is claimed, and all acknowledged data is kept. The order is: refuse, repair, read the
repaired state, and write again. Below `min_free_space` new mail is refused while outcomes are still stored,
because they free space.

`Health` has the reasons, which name no internals, because clients and `/readyz` show them. A refusal means
that no operation is possible at present; every caller receives it. A cause without a refusal (little space,
damage) refuses new mail while the queue is drained. `problems` is for the operator: the details of each
cause, and notes, which do not refuse mail.
"""

import abc
import asyncio
import functools
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from zonerelay.model.delivery import Delivery, DeliveryKey, QueueName
from zonerelay.model.envelope import MessageId
from zonerelay.process.tasks import Tasks, cancel_all
from zonerelay.store import records
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import QueueCounts, StoreCorruptError, StoreError, StoreFullError, Unhealthy
from zonerelay.store.keys.port import Op
from zonerelay.store.queue.reads import QueueReads

INTERVAL = 1.0
"""Seconds between two checks of the free space."""
SWEEP_PAUSE = 20
"""The pause after a page of the search for aborted uploads, as a multiple of the page's duration. No caller
waits for the search. For a million messages it takes 100 s of CPU time, and without pauses it reduced the
rate of new mail by a fifth.
"""
MOST_KINDS = 16
"""The number of kinds of damage that are reported one by one, and of unreadable records."""

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, None]]  # Any: nothing is sent

_log = logging.getLogger("zonerelay.store")


class Health:
    """The health of a store, with the reasons why it accepts no new mail. Damage takes precedence over all
    others, then the first cause. `on_change` is called with every new reason, and with None when there is
    none.
    """

    def __init__(self, on_change: Callable[[str | None], None]) -> None:
        self._on_change = on_change
        self._causes: dict[str, Unhealthy] = {}
        self._texts: dict[str, str] = {}
        self._closed = False
        self._changed = asyncio.Event()
        self.refusal: StoreError | None = None
        self.reason: Unhealthy | None = None

    def refuse(self, refusal: StoreError | None) -> None:
        """Refuse every operation with this error, or allow all operations again if it is `None`."""
        self.refusal = refusal
        self._tell()

    async def usable(self) -> bool:
        """Wait until the store is usable. Return whether it was unusable before."""
        was_refused = self.refusal is not None
        while self.refusal is not None:
            await self._changed.wait()
        return was_refused

    def _tell(self) -> None:
        # A caller that begins to wait now waits for the next change.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def check_usable(self) -> None:
        """Raise StoreError if the store has failed or is closed."""
        if self.refusal is not None:
            # A new exception for each caller, because raising one again adds a traceback to it.
            raise type(self.refusal)(*self.refusal.args)

    def check_writable(self) -> None:
        """Raise StoreFullError if there is too little space for new mail, StoreCorruptError if the store is
        damaged, or StoreError as `check_usable` does.
        """
        if self.reason is not None:
            self.check_usable()
            raise (StoreCorruptError if self.reason is Unhealthy.DAMAGED else StoreFullError)(self.reason)

    def problems(self) -> tuple[str, ...]:
        return tuple(self._texts.values())

    def note(self, cause: str, text: str | None) -> None:
        """Set or clear a problem that is reported to operators but does not stop the store from accepting
        mail.
        """
        if text is None:
            self._texts.pop(cause, None)
        else:
            self._texts[cause] = text

    def set(self, cause: str, reason: Unhealthy | None, text: str = "") -> None:
        """Set the reason why mail is refused because of this cause, or clear it with `None`. `text` is shown
        to the operator in place of the reason.
        """
        if self._closed:
            return
        before = self.reason
        if reason is None:
            self._causes.pop(cause, None)
        else:
            self._causes[cause] = reason
        self.note(cause, None if reason is None else text or reason)
        reasons = self._causes.values()
        self.reason = Unhealthy.DAMAGED if Unhealthy.DAMAGED in reasons else next(iter(reasons), None)
        if self.reason != before:
            self._on_change(self.reason)
        self._tell()

    def close(self) -> None:
        """Mark the store as closed on purpose. `on_change` is no longer called."""
        self._closed = True
        self.reason = Unhealthy.CLOSED


class SpaceWatch:
    """Checks the free space every `INTERVAL`, and earlier after many bytes were written. Each byte counts
    `copies` times. With less than `least` bytes new mail is refused; outcomes are still stored. `look` must
    call `note`.
    """

    def __init__(
        self, look: Callable[[], Awaitable[object]], *, least: int, health: Health, copies: int = 1
    ) -> None:
        self._look = look
        self._least = least
        self._health = health
        self._copies = copies
        self._may_write = 0
        self._wanted = asyncio.Event()

    def note_written(self, octets: int) -> None:
        self._may_write -= octets
        if self._may_write < 0:
            self._wanted.set()

    def note(self, free: int) -> bool:
        """Set or clear `NO_SPACE` in the health according to the free space, and return whether there is too
        little.
        """
        left = free - self._least
        self._health.set("space", Unhealthy.NO_SPACE if left < 0 else None)
        # Fast writers must not use up the rest before the next check.
        self._may_write = left // (1 + self._copies) if left >= 0 else sys.maxsize
        return left < 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wanted.clear()
            try:
                await self._look()
            except StoreError as error:
                _log.warning("the free space of the spool cannot be checked: %s", error)
            timer = loop.call_later(INTERVAL, self._wanted.set)
            await self._wanted.wait()
            timer.cancel()


class Submitter(Protocol):
    """Interface: writes operations durably, in order."""

    def __call__(
        self,
        ops: Sequence[Op],
        *,
        size: int = 0,
        lazy: bool = False,
        applied: Callable[[], None] | None = None,
    ) -> asyncio.Future[None]: ...


class Counts:
    """Counts of the deliveries in one spool by durable state. They are changed only on the event loop.

    After a start, a background scan adds the stored deliveries. A scan of a snapshot of the spool is combined
    with all changes since the snapshot. A scan page by page is combined with the changes of keys that it has
    passed (`left`). Until the scan ends, the counts are too low and may be negative, and `is_whole` is false,
    so that callers do not rely on them. Meanwhile `current` returns the counts before a failed write, or zero
    for negative ones.

    The scan sets
    `is_whole` when it ends. `left` is the key at which the scan continues; it will count the changes from
    there on.
    """

    def __init__(self, left: bytes | None = None, before: "Counts | None" = None) -> None:
        """Create empty counts. `before` are the counts before a failed write, which may nevertheless have
        been stored.
        """
        self._before = None if before is None else before._shown
        self.is_whole = False
        self.left = left
        self.moves: dict[QueueName, QueueCounts] = {}
        """The sums without correction, which may be negative."""

    def move(self, key: DeliveryKey, old: Delivery | None, new: Delivery | None) -> None:
        """Count a delivery that changed from `old` (None if it is new) to `new` (None if it was removed)."""
        if self.left is not None and records.delivery_key(key) >= self.left:
            return
        counts = self.moves.get(key.queue)
        if counts is None:
            counts = self.moves[key.queue] = QueueCounts()
        if old is not None:
            counts.count(old.next_attempt, held=old.held, step=-1)
        if new is not None:
            counts.count(new.next_attempt, held=new.held)

    def add(self, found: dict[QueueName, QueueCounts]) -> None:
        """Add the deliveries that a scan of the spool has found."""
        for queue, more in found.items():
            self.moves.setdefault(queue, QueueCounts()).add(more)

    @property
    def total(self) -> int:
        return sum(max(0, counts.total) for counts in self.moves.values())

    @property
    def _shown(self) -> "Counts":
        if self.is_whole or self._before is None or not self._before.is_whole:
            return self
        return self._before

    def waiting(self, queue: QueueName) -> int:
        zones = self._shown.moves
        return max(0, zones[queue].total) if queue in zones else 0

    def current(self) -> dict[QueueName, QueueCounts]:
        return {
            zone: QueueCounts(max(0, counts.ready), max(0, counts.deferred), max(0, counts.held))
            for zone, counts in self._shown.moves.items()
            if zone.is_mail
        }


class QueueKeeper(abc.ABC):
    """Maintains one queue: repairs it after a failed write, and checks its space. An instance belongs to the
    event loop that opened the queue.
    """

    name = "the spool"
    submit: Submitter

    def __init__(
        self, around: StoreContext, *, min_free_space: int, copies: int = 1, counted_from: bytes | None = None
    ) -> None:
        """Create the keeper of a queue. `copies` is how many copies of a written byte may be on the disk for
        some time, and `counted_from` where a count of `Counts` begins.
        """
        self.health = Health(around.on_health)
        self.space = SpaceWatch(self._look_at_space, least=min_free_space, health=self.health, copies=copies)
        self.counts = Counts(counted_from)
        self.on_failure: Callable[[], None] = lambda: None
        self._counted_from = counted_from
        self._clock = around.clock
        self._on_news = around.on_news
        self._on_damage = around.on_damage
        self._unreadable: set[str] = set()
        self._cut_off: set[MessageId] = set()
        self._tasks = Tasks()
        self._watcher: asyncio.Task[None] | None = None
        self._is_closing = False

    # --- defined by the engine

    @abc.abstractmethod
    def begin(self, last: MessageId | None) -> None:
        """Start to count the deliveries in the background, and to remove unfinished uploads with ids up to
        `last`.
        """

    @abc.abstractmethod
    async def read(self, ask: Callable[[QueueReads], Coroutine[None, None, T]]) -> T:
        """Call `ask` with the queue's read operations and return its result."""

    @abc.abstractmethod
    async def _look_at_space(self) -> None:
        """Measure the free space and pass it to `space.note`."""

    @abc.abstractmethod
    async def _release(self) -> None:
        """Complete all submitted writes, then close the engine."""

    # --- as in the contract; an engine may know more

    async def probe(self) -> None:
        self.health.check_usable()
        await self.submit([(records.META_PROBE, b"%d" % self._clock.now())])

    async def left_over(self) -> str:
        return await self.read(lambda reads: reads.left_over())

    async def acknowledge(self, identity: str) -> bool:
        """Dismiss a loss, and return false if it does not exist. Raises StoreError."""
        return False

    def check_claims(self) -> None:
        """Raise StoreError if deliveries must not be claimed at present."""
        self.health.check_usable()

    def note_removed(self, message_id: MessageId) -> None:  # noqa: B027 - most engines need nothing
        """Record that a message was removed, for an engine that must reclaim the space."""

    # --- background tasks

    def _start(self, work: Work, what: str) -> None:
        async def run() -> None:
            try:
                await work()
            except StoreError as error:
                _log.warning("could not %s: %s", what, error)

        self._tasks.start(run())

    def _watch_space(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self.space.run())

    async def _sweep(self, last: MessageId) -> None:
        """Remove the chunks of uploads that were interrupted by a crash. New messages have higher ids than
        `last`.
        """
        start: bytes | None = records.MESSAGE_PREFIX
        while start is not None:
            began = self._clock.monotonic()
            aborted, start = await self._aborted(start, last)
            pause = (self._clock.monotonic() - began) * SWEEP_PAUSE
            await self._clear(aborted)
            await asyncio.sleep(pause)

    async def _sweep_cut_off(self) -> None:
        """Remove the chunks of failed uploads, because they may occupy the space that a full disk lacks.
        Messages that exist are kept.
        """
        while self._cut_off:
            message_id = self._cut_off.pop()
            try:
                aborted, _ = await self._aborted(records.message_prefix(message_id), message_id)
                await self._clear(aborted)
                self.note_removed(message_id)
            except StoreError:
                self._cut_off.add(message_id)  # for the next repair
                return

    async def _aborted(self, start: bytes, last: MessageId) -> tuple[list[bytes], bytes | None]:
        return await self.read(lambda reads: reads.aborted_uploads(start, last))

    async def _clear(self, prefixes: Sequence[bytes]) -> None:
        """Remove the chunks of the uploads with these key prefixes. Does not wait for other writes, because a
        spool on a full disk may be usable for only some milliseconds.
        """
        for prefix in prefixes:
            while keys := await self.read(functools.partial(QueueReads.keys_under, prefix=prefix)):
                _log.info("removing an aborted upload of at least %d chunks", len(keys))
                await self.submit([(key, None) for key in keys])

    async def _tell_news(self) -> None:
        """Report every queue to the scheduler, because mail whose write failed may be stored if only the sync
        failed.
        """
        for queue in await self.read(lambda reads: reads.queues()):
            self._on_news(queue)

    # --- failures

    def note_cut_off(self, message_id: MessageId) -> None:
        """Record that an upload failed because the queue failed. Its chunks may be stored; the next repair
        removes them.
        """
        self._cut_off.add(message_id)

    def _refuse(self, error: StoreError, reason: Unhealthy | None = None, text: str = "") -> None:
        """Refuse all operations after a failed write, and set the reason."""
        self._stop_writing(error)
        full = isinstance(error, StoreFullError)
        self.health.set("write", reason or (Unhealthy.NO_SPACE if full else Unhealthy.WRITE_FAILED), text)

    def _stop_writing(self, error: StoreError) -> None:
        """Refuse all operations after a failed write, which may nevertheless have been stored."""
        self.health.refuse(error)
        self.on_failure()
        self.counts = Counts(self._counted_from, self.counts)  # an active count adds to the old object

    def _note_unreadable(self, text: str) -> None:
        """Report an invalid record of the spool to operators. Other records are not affected."""
        if text in self._unreadable or len(self._unreadable) > MOST_KINDS:
            return
        self._unreadable.add(text)
        self._on_damage(text)
        count = len(self._unreadable)
        self.health.note(
            "unreadable",
            f"{self.name} contains {count if count <= MOST_KINDS else 'many'} records that are invalid or"
            f" incomplete, the first {text}. They are kept, and their mail is not sent. Stop the relay and"
            " run zonerelay spool repair to restore what can be restored",
        )

    # --- closing

    async def close(self) -> None:
        """Complete all submitted writes, then close the queue. A second call does nothing."""
        if self._is_closing:
            return
        self._is_closing = True
        self.health.close()
        self.health.refuse(StoreError(Unhealthy.CLOSED))
        await self._release()

    async def _end_tasks(self) -> None:
        await cancel_all(self._watcher)
        await self._tasks.cancel()
