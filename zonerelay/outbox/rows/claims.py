"""Claims rows, reads rows that are not claimed, and writes outcomes to rows.

`OutboxClaims` claims rows in batches, after each notification of new rows and at least once per poll
interval. Strategies (policy → the harm it prevents):

- `FOR UPDATE SKIP LOCKED` → relays never wait for each other, and no two relays have the same row.
- Queues share a window of rows (`ClaimWindow`) → memory is bounded, and a slow server delays no other queue.
- New rows and due retries alternate → neither starves the other.
- An invalid row is failed at once → it delays no other row.
- A claim in the table that this relay does not know is released → a claim whose response was lost with the
  connection does not last as long as the relay.

`OutboxReader` reads rows that this relay has not claimed, and the counts of the whole table.

`OutboxWriter` writes outcomes, many in one statement, in order for each row, until each is stored. While the
database is down, outcomes are kept in memory and written when it is back. The caller does not wait. The
writer never holds more outcomes than the relay has claims. A row whose claim was lost is not changed, and the
callback `written` is called. A write that the database rejects for its values is tried once more without
error texts.
"""

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence, Set
from itertools import islice
from operator import attrgetter

from zonerelay.model.delivery import MAILBOXES, Delivery, DeliveryKey, QueueName, mailbox_zone, queue_of
from zonerelay.model.envelope import MAX_ROW, MessageId, row_id
from zonerelay.outbox.drafts import BadRowError, RowContent
from zonerelay.outbox.keeper import OutboxKeeper
from zonerelay.outbox.rows.mailboxes import Mailbox, Mailboxes
from zonerelay.outbox.rows.row import FAILED, PROCESSING, QUEUED, Row, RowWrite, keys_of, put_off, read_row
from zonerelay.process.tasks import Alarm, cancel_all
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
        """Read the content columns of a row, such as the subject and the text. Callers check its `size`
        first.
        """
        return RowContent(*await self._existing(self._statements.content, row))

    async def _existing(self, statement: str, row: int) -> Columns:
        found = await self._keeper.fetch(statement, row)
        if not found:
            raise MessageNotFoundError(f"row {row} is no longer in the outbox")
        return found[0]

    async def row(self, row: int) -> Row | None:
        """Return an unfinished row, without the recipients to which delivery is in progress, or None. Raises
        BadRowError.
        """
        return self._one(await self._keeper.fetch(self._statements.one, row))

    async def lock(self, row: int, session: str) -> Row | None:
        """Claim a queued row and return it, or None if it cannot be claimed. Raises BadRowError."""
        return self._one(await self._keeper.fetch(self._statements.lock, row, session))

    def _one(self, rows: Sequence[Columns]) -> Row | None:
        return read_row(rows[0], self._around.settings.zone) if rows else None

    # --- all rows

    async def scan(self, queue: QueueName | None, first: int) -> AsyncGenerator[Delivery, None]:
        """Yield the unfinished deliveries of one or all queues by row number, beginning with the row `first`.
        Invalid rows have none.
        """
        last = first - 1
        name = None if queue is None else queue.text
        while rows := await self._keeper.fetch(self._statements.scan, last, name, self._around.settings.zone):
            for columns in rows:
                last = columns[0]
                try:
                    row = read_row(columns, self._around.settings.zone)
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
        """Count the rows by queue and by status. Raises StoreError."""
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
        self._ends: dict[tuple[int, str], asyncio.Future[None]] = {}
        self._task: asyncio.Task[None] | None = None
        """Runs while writes are pending."""

    def put(self, write: RowWrite) -> None:
        """Queue the outcomes of a row for writing to the database. It replaces an earlier one of the same
        claim, because it includes that one's outcomes.
        """
        self._waiting[write.id, write.token] = write
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def store(self, write: RowWrite) -> None:
        """Queue a write, and wait until it is stored or its claim was lost."""
        self.put(write)
        end = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._ends.setdefault((write.id, write.token), end))

    def has(self, row: int, token: str) -> bool:
        """Return whether a write for this row and claim is pending."""
        return (row, token) in self._waiting

    def forget(self) -> None:
        """Discard all pending writes, because every claim was lost."""
        self._done(list(self._waiting.values()), set())

    async def close(self, timeout: float) -> None:
        """Write the remaining outcomes within `timeout`. The relay that takes over the other rows attempts
        them again.
        """
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout)
        await cancel_all(self._task)

    async def _run(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHERING)
            if not await self._safely(list(self._waiting.values())[:MAX_TOGETHER]):
                await asyncio.sleep(PAUSE)

    async def _safely(self, batch: Sequence[RowWrite]) -> bool:
        try:
            return await self._write(batch)
        except Exception as error:  # noqa: BLE001 - a bug must not end the writing
            self._events.error("outbox.write", error)
            return False

    async def _write(self, batch: Sequence[RowWrite]) -> bool:
        """Write the outcomes of a batch of rows in one statement. Return false if the same batch is to be
        tried again later.
        """
        try:
            columns: Iterable[Sequence[object]] = zip(*batch, strict=True)
            rows = await self._keeper.fetch(self._keeper.statements.write, *map(list, columns))
            kept = {row[0] for row in rows}
        except StatementRejectedError as error:
            if len(batch) > 1:
                return all([await self._write([each]) for each in batch])
            self._events.error("outbox.write", error)
            kept = set()
            (write,) = batch
            if write.error_log is not None:
                if self._waiting.get((write.id, write.token)) is write:
                    self._waiting[write.id, write.token] = write._replace(error_log=None, state=None)
                return False
        except TransactionConflictError:
            return False
        except StoreError as error:
            self._keeper.failed(error)
            return False
        self._done(batch, kept)
        return True

    def _done(self, batch: Sequence[RowWrite], kept: set[int]) -> None:
        for write in batch:
            key = write.id, write.token
            if self._waiting.get(key) is write:
                del self._waiting[key]
                if end := self._ends.pop(key, None):
                    end.set_result(None)
            self._written(write, write.id in kept)


FAILURE_PAUSE = 1.0
BATCH = 100
"""Rows that one statement claims at most."""
MOST = 2000
SHARE = 500
FEW = 10
RESERVE = 2000


class ClaimWindow:
    """Counts the claimed rows of each queue and limits them.

    A queue belongs to a zone or a mailbox, and to one priority. Policies:

    - A queue whose rows fill its share claims no more until they fill only half of it, so one slow server
      does not fill the window.
    - A share is at most `SHARE`, and at most half of the free window, so several slow servers leave space
      for others.
    - A queue with fewer than `FEW` rows may claim beyond `MOST`, so a new queue gets rows even if the
      window is full.
    - The window never holds more than `MOST` + `RESERVE` rows, so memory grows neither with the table nor
      with the number of mailboxes.
    """

    def __init__(self) -> None:
        self._counts: Counter[QueueName] = Counter()
        self._total = 0
        self._full: set[QueueName] = set()
        self._wants_room = False

    @property
    def queues(self) -> Set[QueueName]:
        """The queues that have claimed rows."""
        return self._counts.keys()

    def full(self) -> Collection[QueueName]:
        """Return the queues for which no more rows may be claimed at present."""
        share = self._share()
        self._full = {
            queue
            for queue, count in self._counts.items()
            if count >= share or (queue in self._full and count > share // 2)
        }
        return self._full

    def room(self) -> int:
        """Return the number of rows that may be claimed next. All of a batch may belong to one queue, so it
        is at most one share.
        """
        room = min(BATCH, self._share(), MOST + RESERVE - self._total)
        self._wants_room = room <= 0
        return max(room, 0)

    def _share(self) -> int:
        return max(FEW, min(SHARE, (MOST - self._total) // 2))

    def add(self, queue: QueueName) -> None:
        self._counts[queue] += 1
        self._total += 1

    def remove(self, queue: QueueName) -> bool:
        """Reduce the count of a queue by one row, and return whether more rows should be claimed now."""
        left = self._counts[queue] - 1
        if left:
            self._counts[queue] = left
        else:
            del self._counts[queue]
        self._total -= 1
        if queue in self._full and left <= self._share() // 2:
            self._full.discard(queue)
            return True
        return self._wants_room and self._total <= MOST + RESERVE - FEW


class OutboxClaims:
    """The rows that this relay has claimed, and their deliveries that can be attempted. `forget` is called
    with the message id of each row that this relay no longer has.
    """

    def __init__(
        self, keeper: OutboxKeeper, mailboxes: Mailboxes, forget: Callable[[MessageId], None]
    ) -> None:
        self.rows: dict[MessageId, Row] = {}
        self.changing: set[int] = set()
        """Rows that an operator's request changes now, claimed or not."""
        self.claimed = 0
        self.writer = OutboxWriter(keeper, self._written)
        self._keeper = keeper
        self._mailboxes = mailboxes
        self._forget = forget
        self._statements = keeper.statements
        self._around = keeper.around
        # In the order of claims.
        self._ready: defaultdict[QueueName, dict[DeliveryKey, Delivery]] = defaultdict(dict)
        # Deliveries of lost rows whose attempts have not ended.
        self._lost: set[DeliveryKey] = set()
        self._window = ClaimWindow()
        self._turn_of_due = False
        self._in_doubt = False
        self._wanted = asyncio.Event()
        self._alarm = Alarm(asyncio.get_running_loop().time, self.look)
        keeper.heard = self.look
        keeper.paused = self._paused
        keeper.resumed = self._resumed

    # --- the claimer

    def look(self) -> None:
        """Schedule a search for claimable rows without delay."""
        self._wanted.set()

    def doubt(self) -> None:
        """Record that a row may have been claimed by a statement whose response was lost."""
        self._in_doubt = True
        self.look()

    def _due_in(self, seconds: float) -> None:
        """Schedule a search in `seconds`, when a released row becomes due."""
        if seconds < self._around.settings.poll_interval:
            # Slightly later, because the database's clock decides whether a row is due.
            self._alarm.set(asyncio.get_running_loop().time() + seconds + 0.01)

    async def run(self) -> None:
        """Claim rows until this is cancelled."""
        looked = self._around.clock.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), self._around.settings.poll_interval)
            self._wanted.clear()
            if not self._keeper.usable:
                continue
            try:
                is_time = self._around.clock.monotonic() - looked >= self._around.settings.poll_interval
                if self._in_doubt or is_time:
                    await self._give_back_strays()
                await self._claim_all()
                if is_time:
                    looked = self._around.clock.monotonic()
                    if ids := self._mailboxes.ids:
                        await self._read_mailboxes(ids)
                        self._mailboxes.forget_idle({queue.zone for queue in self._window.queues})
            except StoreError as error:
                self._keeper.failed(error)
            except Exception as error:  # noqa: BLE001 - a bug must not end the claims
                self._around.events.error("outbox.claim", error)
                await asyncio.sleep(FAILURE_PAUSE)

    async def _give_back_strays(self) -> None:
        # Nothing is claimed during this query. A row that is released during it gets another token, or none.
        found = await self._keeper.fetch(self._statements.mine, self._keeper.session)
        strays = [(row, token) for row, token in found if not self._is_known(row, token)]
        if strays:
            await self._keeper.fetch(
                self._statements.give_back, [row for row, _ in strays], [token for _, token in strays]
            )
        self._in_doubt = False

    def _is_known(self, row: int, token: str) -> bool:
        known = self.rows.get(row_id(row)) if 0 <= row <= MAX_ROW else None
        is_claimed = known is not None and known.token == token
        return is_claimed or row in self.changing or self.writer.has(row, token)

    async def _claim_all(self) -> None:
        while limit := self._window.room():
            due_only = self._turn_of_due
            rows = await self._claim(limit, due_only=due_only)
            self._turn_of_due = not due_only
            if len(rows) < limit and not due_only:
                break
        else:
            return
        ahead = await self._keeper.fetch(self._statements.next_due)
        if ahead:
            self._due_in(max(ahead[0][0], 0.0))

    async def _claim(self, limit: int, *, due_only: bool) -> Sequence[Columns]:
        full = list(map(str, self._window.full()))
        values = (limit, self._keeper.session, full, self._around.settings.zone, due_only)
        rows = await self._keeper.fetch(self._statements.claim, *values)
        self.claimed += len(rows)
        unknown = {row[3] for row in rows if row[3] is not None} - set(self._mailboxes.ids)
        if unknown:
            await self._read_mailboxes(list(unknown))
        queues = {queue for row in rows if (queue := self._admitted(row))}
        for queue in queues:
            self._around.on_news(queue)
        return rows

    async def _read_mailboxes(self, ids: Sequence[int]) -> None:
        found = await self._keeper.fetch(self._statements.mailboxes, ids)
        self._mailboxes.found(Mailbox.read(row) for row in found)
        self._mailboxes.gone(set(ids) - {row[0] for row in found})

    # --- rows added and removed

    def _admitted(self, columns: Columns) -> QueueName | None:
        """Add the deliveries of a claimed row to those that can be attempted. Return its queue, or `None` if
        the row has no delivery for now and its new state was queued for writing.
        """
        try:
            mailbox = self._mailbox_of(columns)
            row = read_row(columns, self._around.settings.zone)
            if mailbox is None and row.zone not in self._around.known_zones():
                raise BadRowError("the zone of the row is not configured")
            if mailbox is None or not (problem := mailbox.problem()):
                return self._admit(row)
            self.writer.put(put_off(columns, f"waits: {problem}"))
        except BadRowError as error:
            self._refused(columns[0], columns[1], columns[4], str(error))
        except Exception as error:  # noqa: BLE001 - an error of one row must not stop the others
            self._around.events.error("outbox.claim", error)
            self.writer.put(put_off(columns, "waits: temporary internal error of the relay"))
        return None

    def _admit(self, row: Row) -> QueueName | None:
        if (before := self.rows.get(row.message_id)) is not None:
            self.lose([before])  # it was queued again while this relay had it
        self.rows[row.message_id] = row
        self._window.add(row.queue)
        deliveries = row.take_due(self._around.clock.now())
        if not deliveries:
            self._finished(row)
            self.writer.put(row.write(self._around.clock.now(), self._around.redact))
            return None
        for delivery in deliveries:
            if delivery.key in self._lost:
                # An attempt of an earlier claim has not ended. It counts again, because another attempt would
                # be a duplicate.
                self._lost.discard(delivery.key)
            else:
                self._ready[row.queue][delivery.key] = delivery
        return row.queue

    def _mailbox_of(self, columns: Columns) -> Mailbox | None:
        if columns[3] is None:
            return None
        mailbox = self._mailboxes.use(mailbox_zone(columns[3]))
        if mailbox is None:
            raise BadRowError("no mailbox has this mailbox_id")
        return mailbox

    def refuse(self, row: Row, problem: str) -> None:
        """Set the status of a claimed row to failed, because it has proved to be invalid."""
        for key in keys_of(row):
            self.withdraw(key)
        row.out.clear()
        self._refused(row.id, row.token, row.attempts, problem)

    def _refused(self, row: int, token: str, attempts: int, problem: str) -> None:
        self._around.events.row_refused(row, problem)
        self.writer.put(RowWrite(row, token, FAILED, attempts, problem, None, None))

    def _written(self, write: RowWrite, kept: bool) -> None:
        """Update the claims after a write to a row. `kept` is false if another relay has the row."""
        row = self.rows.get(row_id(write.id))
        if row is not None and row.token == write.token:
            if not kept:
                self.lose([row])
            elif write.status != PROCESSING:
                self._finished(row)
                if write.status == QUEUED:
                    self._due_in(write.delay or 0.0)
        if kept and write.status != PROCESSING:
            self._around.events.metrics.outbox_finished.add((write.status,))

    def _finished(self, row: Row) -> None:
        """Remove the claim of a row whose last attempt has ended."""
        del self.rows[row.message_id]
        self._forget(row.message_id)
        if self._window.remove(row.queue):
            self.look()
        if row.queue not in self._window.queues:
            self._ready.pop(row.queue, None)

    def lose(self, rows: Collection[Row]) -> None:
        """Remove the claims of rows that other relays have claimed, or that were changed manually."""
        rows = [row for row in rows if self.rows.get(row.message_id) is row]
        attempted = self._attempted(rows)
        for row in rows:
            for key in keys_of(row):
                self.withdraw(key)
            self._finished(row)
        self._lost.update(attempted)
        if attempted:
            self._around.on_lost(attempted)

    def is_lost(self, message_id: MessageId) -> bool:
        """Return whether another relay may be sending the message that this relay had claimed."""
        if message_id in self.rows and not self._keeper.holds_lease:
            return True
        return any(key.message_id == message_id for key in self._lost)

    # --- failures of the database

    def _paused(self) -> None:
        """Prevent new attempts of claimed deliveries. The claims stay with this relay until the lease
        ends.
        """
        if attempted := self._attempted(self.rows.values()):
            self._around.on_lost(attempted)

    def _resumed(self, kept: bool) -> None:
        if kept:
            self.doubt()
            for queue in list(self._window.queues):
                self._around.on_news(queue)
        else:
            self.lose(list(self.rows.values()))
            self.writer.forget()

    # --- ready deliveries

    def take(
        self,
        queue: QueueName,
        limit: int,
        *,
        skip_domains: Collection[str] = (),
        since: MessageId | None = None,
        domain: str | None = None,
    ) -> list[Delivery]:
        """Remove and return deliveries that can be attempted, as `QueueStore.claim` does. Rows never count as
        new mail.
        """
        ready = self._ready.get(queue)
        if ready is None or since is not None or not self._keeper.may_begin:
            return []
        wanted = (
            each
            for each in ready.values()
            if (each.domain not in skip_domains if domain is None else each.domain == domain)
        )
        found = sorted(islice(wanted, limit), key=attrgetter("message_id"))
        for each in found:
            del ready[each.key]
        return found

    def _attempted(self, rows: Iterable[Row]) -> list[DeliveryKey]:
        """Return the deliveries of these rows that `take` has returned and whose attempts have not ended."""
        return [key for row in rows for key in keys_of(row) if key not in self._ready[row.queue]]

    def settled(self, key: DeliveryKey) -> Row | None:
        """Return the claimed row of a delivery whose attempt has ended, or `None` if the row was lost."""
        row = self.rows.get(key.message_id)
        if row is not None and key.recipient in row.out:
            return row
        self._lost.discard(key)
        return None

    def give_back(self, key: DeliveryKey) -> None:
        if (row := self.settled(key)) is not None:
            self._ready[key.queue][key] = row.delivery(key.recipient, due=True)

    def withdraw(self, key: DeliveryKey) -> None:
        """Remove a delivery from those that can be attempted, because an operator has changed it or its row
        was removed.
        """
        if key.queue in self._ready:
            self._ready[key.queue].pop(key, None)
