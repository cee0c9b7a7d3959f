"""Reads rows that this relay has not claimed and the counts of the whole table, and writes outcomes of rows.

Outcomes are written many in one statement, in order for each row, until each is stored. While the database is
down, outcomes are kept in memory and written when it is back. The caller does not wait. The writer never
holds more outcomes than the relay has claims. A row whose claim was lost is not changed, and the callback
`written` is called. A write that the database rejects for its values is tried once more without error texts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from zonerelay.model.delivery import Delivery
from zonerelay.model.queue_name import MAILBOXES, QueueName, queue_of
from zonerelay.outbox.drafts import BadRowError, RowContent
from zonerelay.outbox.keeper import OutboxKeeper
from zonerelay.outbox.rows.mailboxes import Mailbox
from zonerelay.outbox.rows.row import Row, RowWrite, read_row
from zonerelay.process.tasks import cancel_all
from zonerelay.store.contract import MessageNotFoundError, QueueCounts, StoreError
from zonerelay.store.postgres.driver import Columns, StatementRejectedError, TransactionConflictError

COUNT_EVERY = 10.0
MAX_TOGETHER = 500
GATHERING = 0.005
"""Seconds that outcomes wait for others to share their statement."""
PAUSE = 0.5


class OutboxReader:
    """Reads rows of the outbox that this relay has not claimed. The last count sets `rows`, the number of
    rows by status, `counts` and `oldest` by queue, and `lag`, the seconds that the first due row has waited.
    """

    def __init__(self, keeper: OutboxKeeper) -> None:
        self.rows: dict[str, int] = {}
        self.lag = 0.0
        self._keeper = keeper
        self._statements = keeper.statements
        self._around = keeper.around
        self.counts: dict[QueueName, QueueCounts] = {}
        self.oldest: dict[QueueName, float] = {}

    # --- one row

    async def size(self, row: int) -> int:
        """Return the size of a row in bytes. Raises BadRowError if the row is too large to be read."""
        size = int((await self._existing(self._statements.size, row))[0])
        # Base64 and quoted-printable make a message little smaller than its row. Composing finds the other
        # cases.
        if size > 2 * self._around.settings.max_message_size:
            raise BadRowError(f"the row has {size} bytes, which exceeds max_message_size")
        return size

    async def content(self, row: int) -> RowContent:
        """Read the texts of a row. Check its `size` first."""
        return RowContent(*await self._existing(self._statements.content, row))

    async def _existing(self, statement: str, row: int) -> Columns:
        found = await self._keeper.fetch(statement, row)
        if not found:
            raise MessageNotFoundError(f"row {row} has left the outbox")
        return found[0]

    async def row(self, row: int) -> Row | None:
        """Return an open row, leaving out the recipients that are being attempted. Raises BadRowError."""
        return await self._one(await self._keeper.fetch(self._statements.one, row))

    async def lock(self, row: int, session: str) -> Row | None:
        """Claim a queued row. Raises BadRowError."""
        return await self._one(await self._keeper.fetch(self._statements.lock, row, session))

    async def _one(self, rows: Sequence[Columns]) -> Row | None:
        if not rows:
            return None
        return read_row(rows[0], self._around.settings.zone, await self._mailbox(rows[0]))

    async def _mailbox(self, columns: Columns) -> Mailbox | None:
        if columns[3] is None:
            return None
        found = await self._keeper.fetch(self._statements.mailboxes, [columns[3]])
        return Mailbox.read(found[0]) if found else None

    # --- all rows

    async def scan(self, queue: QueueName | None) -> AsyncIterator[Delivery]:
        """Yield the open deliveries in the order of rows. Invalid rows have none."""
        last = -1
        name = None if queue is None else queue.text
        while rows := await self._keeper.fetch(self._statements.scan, last, name, self._around.settings.zone):
            for columns in rows:
                last = columns[0]
                try:
                    row = read_row(columns, self._around.settings.zone, await self._mailbox(columns))
                except BadRowError:
                    continue
                for delivery in row.open():
                    yield delivery

    async def run(self) -> None:
        """Count the rows every few seconds until this is cancelled."""
        while True:
            with contextlib.suppress(StoreError):  # the keeper has reported it
                await self.count()
            await asyncio.sleep(COUNT_EVERY)

    async def count(self) -> None:
        """Count the rows by queue. Raises StoreError."""
        rows = await self._keeper.fetch(self._statements.counts, self._around.settings.zone)
        # Other zones are arbitrary texts of an application and must not become labels of a metric. Their rows
        # fail when they are claimed.
        known = {zone: queue_of(zone) for zone in self._around.known_zones()} | {MAILBOXES.text: MAILBOXES}
        rows = [row for row in rows if row[0] in known]
        self.counts = {known[row[0]]: QueueCounts(row[1], row[2], row[3]) for row in rows}
        self.oldest = {known[row[0]]: row[4] for row in rows if row[4] is not None}
        found = await self._keeper.fetch(self._statements.figures)
        self.rows = {row[0]: row[1] for row in found}
        self.lag = max((row[3] or 0.0 for row in found), default=0.0)


class OutboxWriter:
    """Writes the outcomes of rows to the database. It calls `written(write, kept)` when a write is durable
    or, with `kept` false, when the claim was lost.
    """

    def __init__(self, keeper: OutboxKeeper, written: Callable[[RowWrite, bool], None]) -> None:
        self._keeper = keeper
        self._events = keeper.around.events
        self._written = written
        self._waiting: dict[tuple[int, str], RowWrite] = {}
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, write: RowWrite) -> None:
        """Queue a write. It replaces an earlier one of the same claim, because it includes that one's
        outcomes.
        """
        self._waiting[write.id, write.token] = write
        self._idle.clear()
        self._wanted.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def has(self, row: int, token: str) -> bool:
        """Return whether a write of this claim is pending."""
        return (row, token) in self._waiting

    def go_on(self) -> None:
        """Resume writing, because the database is back."""
        if self._waiting:
            self._wanted.set()

    def forget(self) -> None:
        """Drop all writes, because every claim was lost."""
        for write in self._waiting.values():
            self._written(write, False)
        self._waiting.clear()
        self._idle.set()

    async def close(self, timeout: float) -> None:
        """Write the remaining outcomes within `timeout`. The relay that takes over the other rows attempts
        them again.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        await cancel_all(self._task)

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            await asyncio.sleep(GATHERING)
            self._wanted.clear()
            while self._waiting:
                batch = list(self._waiting.values())[:MAX_TOGETHER]
                if not await self._safely(batch):
                    await asyncio.sleep(PAUSE)
                    break
            if self._waiting:
                self._wanted.set()
            else:
                self._idle.set()

    async def _safely(self, batch: Sequence[RowWrite]) -> bool:
        try:
            return await self._write(batch)
        except Exception as error:  # noqa: BLE001 - a bug must not end the writing
            self._events.error("outbox.write", error)
            return False

    async def _write(self, batch: Sequence[RowWrite]) -> bool:
        """Write a batch. Return false if the same batch is to be tried again later."""
        try:
            kept = await self._update(batch)
        except StatementRejectedError as error:
            if len(batch) > 1:
                return all([await self._write([each]) for each in batch])
            self._events.error("outbox.write", error)
            kept = set()
            if batch[0].error_log is not None:
                key = batch[0].id, batch[0].token
                self._waiting[key] = batch[0]._replace(error_log=None, state=None)
                return False
        except TransactionConflictError:
            return False
        except StoreError as error:
            self._keeper.failed(error)
            return False
        self._done(batch, kept)
        return True

    async def _update(self, batch: Sequence[RowWrite]) -> set[int]:
        columns: Iterable[Sequence[object]] = zip(*batch, strict=True)
        link, statement = self._keeper.writing_link(), self._keeper.statements.write
        return {row[0] for row in await link.fetch(statement, *map(list, columns))}

    def _done(self, batch: Sequence[RowWrite], kept: set[int]) -> None:
        for write in batch:
            key = write.id, write.token
            if self._waiting.get(key) is write:
                del self._waiting[key]
            self._written(write, write.id in kept)
