"""Claims rows in batches, after each notification of new rows and at least once per poll interval.

Strategies (policy → the harm it prevents):

- `FOR UPDATE SKIP LOCKED` → relays never wait for each other, and no two relays have the same row.
- Queues share a window of rows (`ClaimWindow`) → memory is bounded, and a slow server delays no other queue.
- New rows and due retries alternate → neither starves the other.
- An invalid row is failed at once → it delays no other row.
- A claim in the table that this relay does not know is released → a claim whose response was lost with the
  connection does not last as long as the relay.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MAX_ROW, MessageId, row_id
from zonerelay.model.queue_name import QueueName, mailbox_zone
from zonerelay.outbox.drafts import BadRowError
from zonerelay.outbox.keeper import OutboxKeeper
from zonerelay.outbox.rows.mailboxes import Mailbox, Mailboxes
from zonerelay.outbox.rows.row import Row, keys_of, put_off, read_row, refused
from zonerelay.outbox.rows.table import OutboxWriter
from zonerelay.process.tasks import Alarm
from zonerelay.store.contract import StoreError
from zonerelay.store.postgres.driver import Columns
from zonerelay.store.queue.ready import ReadyMail

FAILURE_PAUSE = 1.0
BATCH = 100
"""Rows that one statement claims at most."""
MOST = 2000
SHARE = 500
FEW = 10
RESERVE = 2000


class ClaimWindow:
    """Counts the claimed rows by queue and limits them.

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

    def __contains__(self, queue: QueueName) -> bool:
        return queue in self._counts

    @property
    def queues(self) -> set[QueueName]:
        """Return the queues that have claimed rows."""
        return set(self._counts)

    def full(self) -> Collection[QueueName]:
        """Return the queues that must not claim at present."""
        share = self._share()
        self._full = {
            queue
            for queue, count in self._counts.items()
            if count >= share or (queue in self._full and count > share // 2)
        }
        return self._full

    def room(self) -> int:
        """Return how many rows to claim next. All of a batch may belong to one queue, so it is at most one
        share.
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
        """Count a row less for the queue, and return whether it is worth claiming more."""
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

    def clear(self) -> None:
        self._counts.clear()
        self._full.clear()
        self._total = 0


class OutboxClaims:
    """Claims rows and holds the claims. The writer stores the state of rows that are not admitted.
    `superseded` is called with a row that was queued again while this relay had it.
    """

    def __init__(
        self,
        keeper: OutboxKeeper,
        mailboxes: Mailboxes,
        writer: OutboxWriter,
        superseded: Callable[[Row], None],
    ) -> None:
        self.rows: dict[MessageId, Row] = {}
        self.changing: set[int] = set()
        """Rows that an operator's request changes now, claimed or not."""
        self.claimed = 0
        self._keeper = keeper
        self._mailboxes = mailboxes
        self._writer = writer
        self._superseded = superseded
        self._statements = keeper.statements
        self._around = keeper.around
        self._ready: defaultdict[QueueName, ReadyMail] = defaultdict(ReadyMail)
        self._window = ClaimWindow()
        self._turn_of_due = False
        self._in_doubt = False
        self._wanted = asyncio.Event()
        self._alarm = Alarm(asyncio.get_running_loop().time, self.look)

    # --- the claimer

    def look(self) -> None:
        """Schedule a search for rows to claim."""
        self._wanted.set()

    def doubt(self) -> None:
        """Note that a row may have been claimed whose response was lost."""
        self._in_doubt = True
        self.look()

    def due_in(self, seconds: float) -> None:
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
        return is_claimed or row in self.changing or self._writer.has(row, token)

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
            self.due_in(max(ahead[0][0], 0.0))

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
        try:
            return self._admit(columns)
        except Exception as error:  # noqa: BLE001 - one row's trouble is temporary, and no other's
            self._around.events.error("outbox.claim", error)
            self._writer.put(put_off(columns, "waits: temporary trouble in this relay"))
            return None

    def _admit(self, columns: Columns) -> QueueName | None:
        """Add the deliveries of a claimed row. Return its queue, or `None` if the row was not admitted and
        its new state was queued for writing.
        """
        try:
            mailbox = self._mailbox_of(columns)
            row = read_row(columns, self._around.settings.zone, mailbox)
            if mailbox is None and row.zone not in self._around.known_zones():
                raise BadRowError("no zone with this name is configured")
        except BadRowError as error:
            self._around.events.row_refused(columns[0], str(error))
            self._writer.put(refused(columns[0], columns[1], columns[4], str(error)))
            return None
        if mailbox is not None and (problem := mailbox.problem()):
            self._writer.put(put_off(columns, f"waits: {problem}"))
            return None
        if (before := self.rows.get(row.message_id)) is not None:
            self._superseded(before)
        self.rows[row.message_id] = row
        self._window.add(row.queue)
        deliveries = row.take_due(self._around.clock.now())
        if not deliveries:
            self.finished(row)
            self._writer.put(row.write(self._around.clock.now(), self._around.redact))
            return None
        for delivery in deliveries:
            self._ready[row.queue].add(delivery.key, delivery)
        return row.queue

    def _mailbox_of(self, columns: Columns) -> Mailbox | None:
        if columns[3] is None:
            return None
        mailbox = self._mailboxes.use(mailbox_zone(columns[3]))
        if mailbox is None:
            raise BadRowError("no mailbox has this mailbox_id")
        return mailbox

    def finished(self, row: Row) -> None:
        """Forget a row whose last attempt has ended."""
        if self.rows.pop(row.message_id, None) is None:
            return
        if self._window.remove(row.queue):
            self.look()
        if row.queue not in self._window:
            self._ready.pop(row.queue, None)

    def lose(self) -> list[DeliveryKey]:
        """Forget all claims because they were lost. Return the keys of the deliveries that were being
        attempted.
        """
        keys = [key for row in self.rows.values() for key in keys_of(row)]
        self.rows.clear()
        self._ready.clear()
        self._window.clear()
        return keys

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
        """Take deliveries as `QueueStore.claim` does. No row is new mail."""
        ready = self._ready.get(queue)
        if ready is None or since is not None or not self._keeper.may_begin:
            return []
        found = ready.take(
            limit,
            self._around.clock.now(),
            lambda each: each.domain not in skip_domains if domain is None else each.domain == domain,
        )
        return [each for each in found if self._is_ours(each.key)]

    def give_back(self, key: DeliveryKey) -> None:
        if self._is_ours(key):
            row = self.rows[key.message_id]
            self._ready[key.queue].add(key, row.delivery(key.recipient, due=True))

    def withdraw(self, key: DeliveryKey) -> None:
        """Remove a delivery, because an operator has changed it."""
        if key.queue in self._ready:
            self._ready[key.queue].remove(key)

    def _is_ours(self, key: DeliveryKey) -> bool:
        row = self.rows.get(key.message_id)
        return row is not None and key.recipient in row.out

    def tell_all(self) -> None:
        for queue in self._window.queues:
            self._around.on_news(queue)
