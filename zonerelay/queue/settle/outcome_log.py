"""Collects outcomes and writes them to the store in batches. A write is retried until it succeeds.

Changes of one iteration of the event loop are written with one `settle`. Lazy changes (outcomes of delivered
mail) first wait up to `GATHERING` for others. Promises:

- The changes of an `AtomicWrite` are written together (an outcome and the bounce that reports it).
- Its `then` is called once, after its changes are durable.
- While the store fails, writes are kept in order and retried with back-off. A write that fails although the
  store works is retried alone and does not delay the others.
- A due time is corrected before a retry if the clock was set back meanwhile.
- At most `MAX_UNSETTLED` deliveries should be on their way: a caller with more waits in `room`. Callers also
  wait while the store fails, or has not responded for `SILENT` seconds, because mail whose outcome cannot be
  recorded would be sent again by the other workers that share the store.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from msgspec import structs

from zonerelay.model.clock import Clock
from zonerelay.model.delivery import DeliveryKey
from zonerelay.queue.aio import NextIteration, Slices, Tasks
from zonerelay.store.contract import Change, OwnMessage, Postpone, QueueStore, StoreError
from zonerelay.telemetry.events.events import Events

MAX_UNSETTLED = 1000
MAX_CHANGES = 250
"""The limit of changes in one write of several entries. Preparing the write takes some milliseconds of the
event loop.
"""
GATHERING = 0.01
"""Seconds that lazy writes wait for others: one write for dozens of messages instead of one for each."""
COMPANY = 64
"""The number of changes that are written without waiting for more."""
SILENT = 1.0
"""Seconds without a response of the store after which no new mail is sent."""
RETRY_FIRST = 0.5
RETRY_LONGEST = 30.0


class AtomicWrite(msgspec.Struct, eq=False):
    """Changes that are written atomically, `count` of them of deliveries. A `lazy` write may wait for others,
    because no caller waits for it.
    """

    changes: Sequence[Change]
    count: int
    then: Callable[[], None] | None = None
    lazy: bool = False

    def delivery_keys(self) -> list[DeliveryKey]:
        return [change.delivery.key for change in self.changes if not isinstance(change, OwnMessage)]


class OutcomeLog:
    """Collects outcomes until they are written to the store."""

    def __init__(self, store: QueueStore, events: Events, slices: Slices, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._events = events
        self._slices = slices
        self._tasks = Tasks("queue.journal", events)
        self._flush_once = NextIteration(self._flush)
        self._timer: asyncio.TimerHandle | None = None
        self._gathered: list[AtomicWrite] = []
        self._gathered_changes = 0
        self._entries: set[AtomicWrite] = set()
        self._failed: list[AtomicWrite] = []
        self._unsettled = 0
        self._refusing = False
        self._late: set[int] = set()
        self.has_room = True
        self._room = asyncio.Event()
        self._room.set()
        self.room = self._room.wait
        """Waits until another outcome may be produced: few are being written, and the store accepts them."""

    def reserve(self, count: int) -> None:
        """Count deliveries whose entry is still being made. A negative number counts settled ones."""
        self._unsettled += count
        self._update_room()

    def keys(self) -> set[DeliveryKey]:
        """Return the deliveries with an outcome that is not durable yet."""
        return {key for entry in self._entries for key in entry.delivery_keys()}

    def put(self, entry: AtomicWrite) -> None:
        """Write an entry soon."""
        self._entries.add(entry)
        self._gathered.append(entry)
        self._gathered_changes += len(entry.changes)
        if not entry.lazy or self._gathered_changes >= COMPANY:
            self._flush_once.ask()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHERING, self._flush)

    async def drain(self, timeout: float | None) -> bool:
        """Wait until all outcomes are durable. Return false if the timeout expires first."""
        if self._gathered:
            self._flush()
        return await self._tasks.wait(timeout)

    async def close(self) -> None:
        """Cancel the remaining work. Those deliveries will be attempted again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._tasks.cancel()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        entries, self._gathered, self._gathered_changes = self._gathered, [], 0
        if not entries:
            return
        if self._refusing:
            # The task that retries failed writes takes these too.
            self._failed += entries
            return
        self._tasks.start(self._write(entries))

    async def _write(self, entries: list[AtomicWrite]) -> None:
        for part in _parts(entries):
            if not await self._settle(part):
                self._keep(part)

    async def _settle(self, entries: list[AtomicWrite], *, again: bool = False) -> bool:
        changes = [change for entry in entries for change in entry.changes]
        lazy = not again and len(changes) < COMPANY and all(entry.lazy for entry in entries)
        silence = asyncio.get_running_loop().call_later(SILENT, self._is_late, id(entries))
        try:
            await self._store.settle(changes, lazy=lazy)
        except Exception as error:  # noqa: BLE001 - not even a bug in a store may lose an outcome
            self._events.error("store.settle", error)
            return False
        finally:
            silence.cancel()
            if self._late:
                self._late.discard(id(entries))
                self._update_room()
        await self._announce(deque(entries))
        return True

    async def _announce(self, written: deque[AtomicWrite]) -> None:
        """Call `then` of the entries that were written. Hundreds of log lines take time, so this is done in
        slices.
        """
        try:
            while written:
                if written[0].then is not None:
                    await self._slices.next()
                self._settled(written.popleft())
        finally:
            while written:  # cancelled, but durable outcomes are still reported
                self._settled(written.popleft())

    def _is_late(self, write: int) -> None:
        self._late.add(write)
        self._update_room()

    def _settled(self, entry: AtomicWrite) -> None:
        self._entries.discard(entry)
        self.reserve(-entry.count)
        if entry.then is None:
            return
        try:
            entry.then()
        except Exception as error:  # noqa: BLE001 - the write is done; its announcement must not stop others
            self._events.error("queue.settled", error)

    # Retrying

    def _keep(self, entries: list[AtomicWrite]) -> None:
        trying = bool(self._failed)
        self._failed += entries
        self._refusing = True
        self._update_room()
        if not trying:
            self._tasks.start(self._try_again())

    async def _try_again(self) -> None:
        delay = 0.0
        while self._failed:
            await asyncio.sleep(delay)
            works = await self._store_works()
            progress = works and await self._try_each()
            delay = 0.0 if progress else min(max(delay * 2, RETRY_FIRST), RETRY_LONGEST)
            self._refusing = bool(self._failed) and not (works and await self._probed())
            self._update_room()
        self._refusing = False
        self._update_room()

    async def _store_works(self) -> bool:
        """Return whether the store works. It may notice a past failure only when it is used, and work for a
        while after a repair; LevelDB does so for fractions of a second when it lacks the space to compact its
        tables.
        """
        await self._store.usable()
        if await self._probed():
            return True
        return await self._store.usable() and await self._probed()

    async def _probed(self) -> bool:
        try:
            await self._store.probe()
        except Exception as error:  # noqa: BLE001 - whatever it is, the answer is no
            if not isinstance(error, StoreError):
                self._events.error("store.probe", error)
            return False
        return True

    async def _try_each(self) -> bool:
        """Retry the failed writes and return whether any succeeded. If a part fails, its entries are written
        one by one.

        A store that was just repaired may work for only some milliseconds, so nothing waits for other writes
        here.
        """
        progress, now = False, self._clock.now()
        for entry in self._failed:
            entry.changes = [
                structs.replace(change, delivery=change.delivery.corrected_at(now))
                if isinstance(change, Postpone)
                else change
                for change in entry.changes
            ]
        for part in _parts(list(self._failed)):
            tries = [part]
            while tries:
                entries = tries.pop(0)
                if await self._settle(entries, again=True):
                    self._failed = [entry for entry in self._failed if entry not in entries]
                    progress = True
                elif not await self._probed():
                    return progress
                elif len(entries) > 1:
                    tries = [[entry] for entry in entries]
        return progress

    def _update_room(self) -> None:
        has_room = self._unsettled < MAX_UNSETTLED and not self._refusing and not self._late
        if has_room is self.has_room:
            return
        self.has_room = has_room
        if has_room:
            self._room.set()
        else:
            self._room.clear()


def _parts(entries: list[AtomicWrite]) -> list[list[AtomicWrite]]:
    """Return the entries in parts of at most about `MAX_CHANGES` changes."""
    if sum(len(entry.changes) for entry in entries) <= MAX_CHANGES:
        return [entries]
    parts: list[list[AtomicWrite]] = [[]]
    size = 0
    for entry in entries:
        if size and size + len(entry.changes) > MAX_CHANGES:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += len(entry.changes)
    return parts
