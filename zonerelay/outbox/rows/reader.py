"""Reads rows that this relay has not claimed, and the counts of the whole table."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from zonerelay.model.delivery import Delivery
from zonerelay.model.queue_name import MAILBOXES, QueueName, queue_of
from zonerelay.outbox.drafts import BadRowError, RowContent
from zonerelay.outbox.keeper import OutboxKeeper
from zonerelay.outbox.rows.mailboxes import Mailbox
from zonerelay.outbox.rows.row import Row, read_row
from zonerelay.process.tasks import cancel_all
from zonerelay.store.contract import MessageNotFoundError, QueueCounts, StoreError
from zonerelay.store.postgres.driver import Columns

COUNT_EVERY = 10.0


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
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._count())

    async def close(self) -> None:
        await cancel_all(self._task)

    # --- one row

    async def size(self, row: int) -> int:
        """Return the size of a row in bytes. Raises BadRowError if the row is too large to be read."""
        found = await self._keeper.fetch(self._statements.size, row)
        if not found:
            raise MessageNotFoundError(f"row {row} has left the outbox")
        # Base64 and quoted-printable make a message little smaller than its row. Composing finds the other
        # cases.
        if found[0][0] > 2 * self._around.settings.max_message_size:
            raise BadRowError(f"the row has {found[0][0]} bytes, which exceeds max_message_size")
        return int(found[0][0])

    async def content(self, row: int) -> RowContent:
        """Read the texts of a row. Check its `size` first."""
        found = await self._keeper.fetch(self._statements.content, row)
        if not found:
            raise MessageNotFoundError(f"row {row} has left the outbox")
        subject, text, html, headers, attachments = found[0]
        return RowContent(subject=subject, text=text, html=html, headers=headers, attachments=attachments)

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

    async def _count(self) -> None:
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
