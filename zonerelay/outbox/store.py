"""Implements the store of a relay with an outbox: messages in the spool and outbox rows form one queue.
Zones, rates, connections and operators' commands do not distinguish them.

A message's id shows which of the two holds it. New mail and bounces go to the spool. A write to the spool
never waits for the outbox's database, and a failure of that database affects the outbox alone.

Unlike `settle` of the spool, `settle` of rows passes outcomes to a writer that retries until they are stored.
So the SMTP side never waits for a database that it does not use. A row stays claimed until its outcome is
stored, so no other relay sends it. If a relay dies, these rows are in doubt, as after a crash within an SMTP
transaction.

A row that proves to be invalid when its message is composed is failed at once.

`build_outbox` builds the store of a worker: its keys, the access to the database, and the name of the relay
in it.
"""

import contextlib
import secrets
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Unpack

from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.config.settings import OutboxSettings, SpoolSettings
from zonerelay.model.delivery import MAILBOXES, Delivery, DeliveryKey, QueueKind, QueueName
from zonerelay.model.envelope import Message, MessageId, is_row, row_of
from zonerelay.model.reply import Outcome, Reply, Verdict
from zonerelay.outbox.composer import ComposedMessage, Composer
from zonerelay.outbox.database.passwords import PasswordError, read_key
from zonerelay.outbox.drafts import BadRowError
from zonerelay.outbox.keeper import OutboxContext, OutboxKeeper
from zonerelay.outbox.rows.claims import OutboxClaims, OutboxReader
from zonerelay.outbox.rows.mailboxes import LoginHost, Mailboxes, ZoneHost
from zonerelay.outbox.rows.row import FAILED, PROCESSING, QUEUED, Row
from zonerelay.process.tasks import Tasks
from zonerelay.store import contract
from zonerelay.store.context import secret_of
from zonerelay.store.keys.partition import SeenFile
from zonerelay.store.postgres.driver import DatabaseAccess, load_driver
from zonerelay.telemetry.metrics.instruments import Figures

CLOSE_TIMEOUT = 5.0
DROPPED = Outcome(Verdict.BOUNCED, Reply(554, "7.0", "dropped by the operator"), local=True, counts=False)


class OutboxStore:
    """The store of a relay with an outbox, which combines the spool's store with the outbox rows.
    `counts_rows` is set for the one worker that counts the rows.
    """

    def __init__(
        self, spool: contract.Store, keeper: OutboxKeeper, mailboxes: Mailboxes, *, counts_rows: bool
    ) -> None:
        self.keeper = keeper
        self._around = keeper.around
        self._spool = spool
        self._counts_rows = counts_rows
        self._mailboxes = mailboxes
        self.reader = OutboxReader(keeper)
        self._composer = Composer(self.reader, keeper.around.settings.max_message_size)
        self.claims = OutboxClaims(keeper, mailboxes, self._composer.forget)
        self._tasks = Tasks()
        self._around.events.metrics.outbox.attach(self._figures)
        # Only the spool has new mail and assigns ids; the outbox's table has metrics of its own.
        self.unhealthy, self.usable, self.probe = spool.unhealthy, spool.usable, spool.probe
        self.begin, self.last_message_id = spool.begin, spool.last_message_id
        self.kept_keys, self.keep_keys = spool.kept_keys, spool.keep_keys
        self.waiting, self.is_counted = spool.waiting, spool.is_counted
        self.queues, self.left_over = spool.queues, spool.left_over

    @property
    def node(self) -> int:
        return self._spool.node

    async def start(self, zones: ZoneHost, logins: LoginHost) -> None:
        """Connect to the outbox's database and start to claim rows. The scheduler must run. Raises
        StoreOpenError if the tables cannot be used.
        """
        self._mailboxes.attach(zones, logins)
        await self.keeper.start()
        self._tasks.start(self.claims.run())
        self._tasks.start(self.reader.run())

    async def close(self) -> None:
        """Write the known outcomes of rows, and release the other claimed rows. Then close the spool."""
        try:
            await self._tasks.cancel()
            await self.claims.writer.close(CLOSE_TIMEOUT if self.keeper.usable else 0.0)
            await self.keeper.close()
            self._composer.clear()
        finally:
            await self._spool.close()

    def problems(self) -> Sequence[str]:
        problem = self.keeper.problem
        own = (f"the outbox cannot be used: {problem}",) if problem else ()
        return (*self._spool.problems(), *own, *self._mailboxes.problems())

    def _figures(self) -> Mapping[str, Figures]:
        rows = self.reader.rows
        return {
            "zonerelay_outbox_rows": {each: rows.get(each, 0) for each in (QUEUED, PROCESSING, FAILED)},
            "zonerelay_outbox_claims_total": self.claims.claimed,
            "zonerelay_outbox_reaped_total": self.keeper.reaped,
            "zonerelay_outbox_lag_seconds": self.reader.lag,
            "zonerelay_outbox_up": float(self.keeper.usable),
        }

    # --- claims

    async def claim(
        self, queue: QueueName, limit: int, *, now: float, **only: Unpack[contract.ClaimFilter]
    ) -> list[Delivery]:
        """Claim deliveries from both the outbox and the spool, half of the limit each if both have enough.
        The spool is asked for the whole limit, and gets back what is too much, because nothing may wait
        between the claim of a row and its return: the row could be lost then. New mail is in the spool alone.
        """
        is_mailbox = queue.kind is QueueKind.MAILBOX
        found = [] if is_mailbox else await self._spool.claim(queue, limit, now=now, **only)
        rows = self.claims.take(queue, max(limit // 2, limit - len(found), 1), **only)
        room = limit - len(rows)
        self._spool.release([each.key for each in found[room:]])
        return [*rows, *found[:room]]

    def release(self, keys: Collection[DeliveryKey]) -> None:
        self._spool.release([key for key in keys if not is_row(key.message_id)])
        for key in keys:
            if is_row(key.message_id):
                self.claims.give_back(key)

    async def next_due(self, queue: QueueName) -> float | None:
        return None if queue.kind is QueueKind.MAILBOX else await self._spool.next_due(queue)

    # --- settling

    async def settle(self, changes: Sequence[contract.Change], *, lazy: bool = False) -> None:
        """Settle deliveries of the spool, and queue the outcomes of outbox rows to be written."""
        ours: list[contract.Change] = []
        theirs: list[contract.Finish | contract.Postpone] = []
        for change in changes:
            if isinstance(change, contract.OwnMessage) or not is_row(change.delivery.message_id):
                ours.append(change)
            else:
                theirs.append(change)
        if ours:
            # The spool comes first: it is better to store a bounce twice than to lose it.
            await self._spool.settle(ours, lazy=lazy)
        now = self._around.clock.now()
        touched: dict[MessageId, Row] = {}
        for change in theirs:
            row = self.claims.settled(change.delivery.key)
            if row is None:
                continue
            if isinstance(change, contract.Finish):
                row.finish(change.delivery, change.failure, now, self._around.redact)
            else:
                row.postpone(change.delivery, self._around.redact)
            touched[row.message_id] = row
        for row in touched.values():
            self.claims.writer.put(row.write(now, self._around.redact))

    # --- reading

    async def read_message(self, message_id: MessageId) -> Message:
        if not is_row(message_id):
            return await self._spool.read_message(message_id)
        return (await self._composed(message_id)).message

    def read_body(self, message_id: MessageId) -> AsyncGenerator[bytes, None]:
        return (self._read_row if is_row(message_id) else self._spool.read_body)(message_id)

    async def _read_row(self, message_id: MessageId) -> AsyncGenerator[bytes, None]:
        composed = await self._composed(message_id)
        async for piece in composed.body():
            self.check_claim(message_id)
            yield piece

    def check_claim(self, message_id: MessageId) -> None:
        if not is_row(message_id):
            self._spool.check_claim(message_id)
        elif self.claims.is_lost(message_id):
            raise contract.ClaimLostError(f"message {message_id}: its claim has expired")

    async def _composed(self, message_id: MessageId) -> ComposedMessage:
        row = self.claims.rows.get(message_id)
        if row is None:
            if self.claims.is_lost(message_id):
                raise contract.MessageSettledError(f"message {message_id}: its claim has expired")
            return await self._for_operators(message_id)
        self.check_claim(message_id)
        try:
            return await self._composer.compose(row)
        except contract.MessageNotFoundError as error:
            self.claims.lose([row])
            raise contract.MessageSettledError(f"message {message_id}: row {row.id} was deleted") from error
        except contract.StoreError as error:
            if self.keeper.may_begin:
                raise
            raise contract.ClaimLostError(f"message {message_id}: {error}") from error
        except BadRowError as error:
            self.claims.refuse(row, str(error))
            raise contract.MessageSettledError(
                f"message {message_id}: row {row.id} is invalid: {error}"
            ) from error

    async def _for_operators(self, message_id: MessageId) -> ComposedMessage:
        try:
            row = await self.reader.row(row_of(message_id))
            if row is None:
                raise contract.MessageNotFoundError(f"message {message_id} does not exist")
            return await self._composer.compose(row)
        except BadRowError as error:
            raise contract.MessageNotFoundError(f"message {message_id}: {error}") from error
        finally:
            self._composer.forget(message_id)

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        found = await self._spool.read_messages([each for each in ids if not is_row(each)])
        for identity in filter(is_row, ids):
            with contextlib.suppress(contract.MessageNotFoundError, contract.StoreCorruptError):
                found[identity] = await self.read_message(identity)
        return found

    async def deliveries_of(self, message_id: MessageId, *, own: bool = False) -> list[Delivery]:
        if not is_row(message_id):
            return await self._spool.deliveries_of(message_id, own=own)
        try:
            row = self.claims.rows.get(message_id) or await self.reader.row(row_of(message_id))
        except BadRowError:
            return []
        return [] if row is None else row.open()

    async def scan(
        self,
        queue: QueueName | None = None,
        *,
        wanted: contract.Wanted = contract.everybody,
        after: DeliveryKey | None = None,
    ) -> AsyncGenerator[Delivery, None]:
        row = after if after is not None and is_row(after.message_id) else None
        if row is None and (queue is None or queue.kind is not QueueKind.MAILBOX):
            async for delivery in self._spool.scan(queue, wanted=wanted, after=after):
                yield delivery
        if self.keeper.usable:
            async for delivery in self.reader.scan(queue, 0 if row is None else row_of(row.message_id)):
                if wanted(delivery.recipient) and (row is None or delivery.key[1:] > row[1:]):
                    yield delivery

    def counts(self) -> dict[QueueName, contract.QueueCounts]:
        both = self._spool.counts()
        for queue, rows in (self.reader.counts if self._counts_rows else {}).items():
            both.setdefault(queue, contract.QueueCounts()).add(rows)
        return both

    async def oldest(self, queue: QueueName, *, now: float) -> float | None:
        theirs = self.reader.oldest.get(queue)
        if queue == MAILBOXES:
            return theirs
        ours = await self._spool.oldest(queue, now=now)
        return min((each for each in (ours, theirs) if each is not None), default=None)

    # --- operators

    async def update(
        self, keys: Collection[DeliveryKey], change: contract.ChangeOne
    ) -> dict[DeliveryKey, Delivery]:
        by_message = attrgetter("message_id")
        ours = [key for key in keys if not is_row(key.message_id)]
        existed = await self._spool.update(ours, change) if ours else {}
        theirs = sorted((key for key in keys if is_row(key.message_id)), key=by_message)
        for message_id, some in groupby(theirs, key=by_message):
            number = row_of(message_id)
            self.claims.changing.add(number)
            try:
                row = self.claims.rows.get(message_id) or await self.reader.lock(number, self.keeper.session)
                if row is not None:
                    existed |= self._change(row, list(some), change)
                    await self.claims.writer.store(row.write(self._around.clock.now(), self._around.redact))
            except BadRowError:
                # The next claim writes the error into the row.
                self.claims.doubt()
            finally:
                self.claims.changing.discard(number)
        if theirs:
            self.claims.look()  # a row that is due again is back in the table
        return existed

    def _change(
        self, row: Row, keys: Sequence[DeliveryKey], change: contract.ChangeOne
    ) -> dict[DeliveryKey, Delivery]:
        existed: dict[DeliveryKey, Delivery] = {}
        for key in keys:
            if row.state(key.recipient).done or key.recipient not in row.people.everybody:
                continue
            existed[key] = old = row.delivery(key.recipient)
            new = change(old)
            if new == old:
                continue
            self.claims.withdraw(key)
            if new is None:
                row.finish(old, DROPPED, self._around.clock.now(), self._around.redact)
            else:
                row.postpone(new, self._around.redact)
        return existed


NAME_FILE = "outbox-{:02d}.seen"


def build_outbox(
    spool: contract.Store,
    settings: SpoolSettings,
    index: int,
    environment: Mapping[str, str],
    around: OutboxContext,
) -> OutboxStore:
    """Return the store of worker `index` with its outbox. Raises StoreOpenError if a secret cannot be
    read.
    """
    load_driver()
    outbox = around.settings
    name = _locked_name(settings.path.parent / NAME_FILE.format(index))
    mailboxes = Mailboxes(read_keys(outbox, environment), around.clock.monotonic)
    keeper = OutboxKeeper(access_of(outbox, environment), name, around)
    return OutboxStore(spool, keeper, mailboxes, counts_rows=index == 0)


def _locked_name(path: Path) -> str:
    """Return a name for this relay that survives restarts and is unique among running relays.

    The name is in a file next to the spool, which stays open and locked until the process ends. A relay that
    finds it locked, or cannot use it, has a name for this run only: then the claims of an earlier run are
    taken over when its lease has ended.
    """
    name = secrets.token_hex(16)
    try:
        return SeenFile(path, name).seen.writer
    except contract.StoreOpenError:
        return name


def access_of(outbox: OutboxSettings, environment: Mapping[str, str]) -> DatabaseAccess:
    password = secret_of("outbox.password", outbox.password, environment)
    return DatabaseAccess(outbox.url, password, outbox.schema, "zonerelay outbox", outbox.lease)


def read_keys(outbox: OutboxSettings, environment: Mapping[str, str]) -> list[bytes]:
    """Read the keys that decrypt the passwords of mailboxes. Raises StoreOpenError."""
    keys = []
    for at, reference in enumerate(outbox.keys):
        try:
            keys.append(read_key(read_secret(reference, environment)))
        except (SecretError, PasswordError) as error:
            raise contract.StoreOpenError(f"outbox.keys[{at}]: {error}") from error
    return keys
