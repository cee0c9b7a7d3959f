"""Implements the store interface on rows that applications have inserted.

Unlike `settle` of a spool, `settle` of the outbox passes outcomes to a writer that retries until they are
stored. So the SMTP side never waits for a database that it does not use. A row stays claimed until its
outcome is stored, so no other relay sends it. If a relay dies, these rows are in doubt, as after a crash
within an SMTP transaction.

A row that proves to be invalid when its message is composed is failed at once.

`Composer` composes messages from rows and keeps them while they are being sent. A small message is composed
immediately and kept in memory; the least recently used one is dropped first. A large one is composed in a
thread and kept in an unnamed file. A row is read only after `room` has granted it memory: at most one row
larger than `_SIDE_BY_SIDE` bytes is in memory.

`build_outbox` builds the outbox of a worker: its keys, the access to its database, and the name of the relay
in it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import tempfile
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import groupby, takewhile
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias, Unpack

import msgspec

from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.config.settings import OutboxSettings, SpoolSettings
from zonerelay.message.compose.compose import compose_pieces
from zonerelay.message.compose.mime import Base64Error
from zonerelay.message.header.headers import parse_header
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId, row_id, row_of
from zonerelay.model.outcome import Outcome, Verdict
from zonerelay.model.queue_name import QueueName
from zonerelay.model.reply import Reply
from zonerelay.outbox.database.passwords import PasswordError, read_key
from zonerelay.outbox.database.sql import INLINE
from zonerelay.outbox.drafts import BadRowError, RowContent, draft_of
from zonerelay.outbox.keeper import OutboxContext, OutboxKeeper
from zonerelay.outbox.rows.claims import OutboxClaims, OutboxReader, OutboxWriter
from zonerelay.outbox.rows.mailboxes import LoginHost, Mailboxes, ZoneHost
from zonerelay.outbox.rows.row import FAILED, PROCESSING, QUEUED, Row, RowWrite, keys_of, refused
from zonerelay.process.tasks import Tasks
from zonerelay.process.threads import BODIES
from zonerelay.store.context import secret_of
from zonerelay.store.contract import (
    CHUNK_SIZE,
    ChangeOne,
    ClaimFilter,
    ClaimLostError,
    Finish,
    MessageNotFoundError,
    MessageSettledError,
    Postpone,
    StoreError,
    StoreOpenError,
)
from zonerelay.store.postgres.driver import DatabaseAccess, load_driver
from zonerelay.telemetry.metrics.instruments import Readings

MEMORY = 8 * 1024 * 1024
FILES = 64
_LARGE = 4 * INLINE
_SIDE_BY_SIDE = 1024 * 1024
_FEW = 4

File: TypeAlias = "tempfile.SpooledTemporaryFile[bytes]"


class ComposedMessage(msgspec.Struct, eq=False):
    """A message composed from a row. A small one is in `data`, a large one in `file`."""

    message: Message
    data: bytes
    file: File | None = None


class Composer:
    """Composes messages from rows of the outbox. `max_size` is the largest size of a message, in bytes."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._kept: OrderedDict[MessageId, ComposedMessage] = OrderedDict()
        self._octets = 0
        self._files = 0
        self._few = asyncio.Semaphore(_FEW)
        self._one = asyncio.Lock()

    def room(self, size: int) -> AbstractAsyncContextManager[None]:
        """Return a lock for a row of `size` bytes. Hold it while the row is read and composed."""
        return self._few if size <= _SIDE_BY_SIDE else self._one

    def known(self, message_id: MessageId) -> ComposedMessage | None:
        found = self._kept.get(message_id)
        if found is not None:
            self._kept.move_to_end(message_id)
        return found

    async def make(self, row: Row, content: RowContent) -> ComposedMessage:
        """Compose the message of a row. Raises BadRowError, or StoreError if there is no space for a large
        one.
        """
        if _length(content) <= INLINE:
            made = self._compose(row, content)
        else:
            made = await BODIES.run(self._compose, row, content)
        self._keep(row.message_id, made)
        return made

    def forget(self, message_id: MessageId) -> None:
        made = self._kept.pop(message_id, None)
        if made is not None:
            self._octets -= len(made.data)
            self._files -= made.file is not None

    def clear(self) -> None:
        self._kept.clear()
        self._octets = self._files = 0

    def _keep(self, message_id: MessageId, made: ComposedMessage) -> None:
        self.forget(message_id)
        self._kept[message_id] = made
        self._octets += len(made.data)
        self._files += made.file is not None
        while self._octets > MEMORY or self._files > FILES:
            self.forget(next(iter(self._kept)))

    def _compose(self, row: Row, content: RowContent) -> ComposedMessage:
        # In memory until the message is large. The last reader closes it.
        file: File = tempfile.SpooledTemporaryFile(_LARGE, prefix="zonerelay-outbox-")  # noqa: SIM115
        size, data = 0, b""
        try:
            for piece in compose_pieces(draft_of(row.id, row.created, row.people, content)):
                size += len(piece)
                if size > self._max_size:
                    raise BadRowError(f"the message exceeds max_message_size ({self._max_size} bytes)")
                file.write(piece)
            file.seek(0)
            header = b"".join(takewhile(lambda line: line != b"\r\n", file))
            if size <= _LARGE:
                file.seek(0)
                data = file.read()
                file.close()
        except (Base64Error, BadRowError) as error:
            file.close()
            raise BadRowError(str(error)) from None
        except OSError as error:
            file.close()
            raise StoreError(
                f"a large message of the outbox cannot be written to a file: {error.strerror}"
            ) from error
        message = Message(
            envelope=row.envelope(),
            size=size,
            chunks=-(-size // CHUNK_SIZE),
            headers=parse_header(header).fields,
            trace=("protocol=outbox", f"row={row.id}"),
        )
        return ComposedMessage(message, data, None if data else file)


async def read(made: ComposedMessage) -> AsyncGenerator[bytes, None]:
    if made.file is None:
        for start in range(0, len(made.data), CHUNK_SIZE):
            yield made.data[start : start + CHUNK_SIZE]
        return
    for start in range(0, made.message.size, CHUNK_SIZE):
        yield await BODIES.run(os.pread, made.file.fileno(), CHUNK_SIZE, start)


def _length(content: RowContent) -> int:
    texts = (content.text, content.html, content.headers, content.attachments, content.subject)
    return sum(len(text) for text in texts if text)


CLOSE_TIMEOUT = 5.0
DROPPED = Outcome(Verdict.BOUNCED, Reply(554, "7.0", "dropped by the operator"), local=True, counts=False)


class OutboxStore:
    """Implements the store interface on the outbox."""

    def __init__(self, keeper: OutboxKeeper, mailboxes: Mailboxes) -> None:
        self.keeper = keeper
        self._around = keeper.around
        self.reader = OutboxReader(keeper)
        self._mailboxes = mailboxes
        self._writer = OutboxWriter(keeper, self._stored)
        claims = self.claims = OutboxClaims(keeper, mailboxes, self._writer, self._lose)
        self._tasks = Tasks()
        self._composer = Composer(keeper.around.settings.max_message_size)
        self._lost: set[DeliveryKey] = set()
        self._handed: set[DeliveryKey] = set()
        self._stalled: set[MessageId] = set()
        self._waiters: dict[tuple[int, str], asyncio.Future[None]] = {}
        keeper.paused = self._paused
        keeper.resumed = self._resumed
        keeper.heard = claims.look
        keeper.regained = claims.tell_all
        self._around.events.metrics.outbox.attach(self._figures)

    async def start(self, zones: ZoneHost, logins: LoginHost) -> None:
        """Connect and start to claim rows. The scheduler must run. Raises StoreOpenError if the tables cannot
        be used.
        """
        self._mailboxes.attach(zones, logins)
        await self.keeper.start()
        self._tasks.start(self.claims.run())
        self._tasks.start(self.reader.run())

    async def close(self) -> None:
        """Write the known outcomes, and release the other rows."""
        await self._tasks.cancel()
        await self._writer.close(CLOSE_TIMEOUT if self.keeper.usable else 0.0)
        await self.keeper.close()
        self._composer.clear()

    def problems(self) -> tuple[str, ...]:
        problem = self.keeper.problem
        own = (f"the outbox cannot be used: {problem}",) if problem else ()
        return (*own, *self._mailboxes.problems())

    def _figures(self) -> Mapping[str, Readings]:
        rows = self.reader.rows
        return {
            "zonerelay_outbox_rows": [((each,), rows.get(each, 0)) for each in (QUEUED, PROCESSING, FAILED)],
            "zonerelay_outbox_claims_total": [((), self.claims.claimed)],
            "zonerelay_outbox_reaped_total": [((), self.keeper.reaped)],
            "zonerelay_outbox_lag_seconds": [((), self.reader.lag)],
            "zonerelay_outbox_up": [((), float(self.keeper.usable))],
        }

    # --- claims

    def claim(self, queue: QueueName, limit: int, **only: Unpack[ClaimFilter]) -> list[Delivery]:
        handed = []
        for delivery in self.claims.take(queue, limit, **only):
            self._handed.add(delivery.key)
            if delivery.key in self._lost:
                # An attempt of an earlier claim has not ended. It counts again, because another attempt would
                # be a duplicate.
                self._lost.discard(delivery.key)
            else:
                handed.append(delivery)
        return handed

    def release(self, keys: Collection[DeliveryKey]) -> None:
        for key in keys:
            self._handed.discard(key)
            if key in self._lost:
                self._forget_lost(key)
            else:
                self.claims.give_back(key)

    def _forget_lost(self, key: DeliveryKey) -> None:
        self._lost.discard(key)
        if key.message_id in self.claims.rows:
            self._around.on_news(key.queue)

    # --- settling

    def settle(self, changes: Sequence[Finish | Postpone]) -> None:
        """Record the outcomes and queue their writes."""
        now = self._around.clock.now()
        touched: dict[MessageId, Row] = {}
        for change in changes:
            key = change.delivery.key
            self._handed.discard(key)
            row = self.claims.rows.get(key.message_id)
            if key in self._lost:
                self._forget_lost(key)
            elif row is not None and key.recipient in row.out:
                if isinstance(change, Postpone) and self._was_stalled(row, change.delivery):
                    self.claims.give_back(key)
                    if self.keeper.may_begin:
                        self._around.on_news(key.queue)
                    continue
                if isinstance(change, Finish):
                    row.finish(change.delivery, change.failure, now, self._around.redact)
                else:
                    row.postpone(change.delivery, self._around.redact)
                touched[row.message_id] = row
        if self._stalled:
            self._stalled.difference_update([change.delivery.message_id for change in changes])
        for row in touched.values():
            self._store(row, now)

    def _was_stalled(self, row: Row, delivery: Delivery) -> bool:
        """Return whether no attempt was made because the lease had lapsed. The delivery need not wait
        then.
        """
        attempts = row.state(delivery.recipient).attempts
        return row.message_id in self._stalled and delivery.attempts == attempts and not delivery.held

    def _store(self, row: Row, now: float) -> RowWrite:
        write = row.write(now, self._around.redact)
        self._writer.put(write)
        return write

    def _stored(self, write: RowWrite, kept: bool) -> None:
        """Process a completed write. `kept` is false if another relay has the row."""
        waiter = self._waiters.pop((write.id, write.token), None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        row = self.claims.rows.get(row_id(write.id))
        if row is not None and row.token == write.token:
            if not kept:
                self._lose(row)
            elif write.status != PROCESSING:
                self._forget(row)
                if write.status == QUEUED:
                    self.claims.due_in(write.delay or 0.0)
        if kept and write.status != PROCESSING:
            self._around.events.metrics.outbox_finished.add((write.status,))

    def _forget(self, row: Row) -> None:
        self._composer.forget(row.message_id)
        self._stalled.discard(row.message_id)
        self.claims.finished(row)

    def _lose(self, row: Row) -> None:
        """Forget a row that another relay has claimed or that was changed manually."""
        keys = list(keys_of(row))
        self._forget(row)
        lost = [key for key in keys if key in self._handed]
        self._lost.update(lost)
        if lost:
            self._around.on_lost(lost)

    # --- failures

    def _paused(self) -> None:
        """Start no new attempts. The claims stay with this relay until the lease ends."""
        if self._handed:
            self._around.on_lost(list(self._handed))

    def _resumed(self, kept: bool) -> None:
        if kept:
            self._writer.go_on()
            self.claims.doubt()
            self.claims.tell_all()
            return
        self._lost.update(self._handed)
        self._handed.clear()
        self._writer.forget()
        lost = self.claims.lose()
        self._composer.clear()
        self._stalled.clear()
        if lost:
            self._around.on_lost(lost)

    # --- reading

    async def read_message(self, message_id: MessageId) -> Message:
        return (await self._composed(message_id)).message

    async def read_body(self, message_id: MessageId) -> AsyncGenerator[bytes, None]:
        composed = await self._composed(message_id)
        async for piece in read(composed):
            self.check_claim(message_id)
            yield piece

    def check_claim(self, message_id: MessageId) -> None:
        """Raise ClaimLostError if the claim was lost, as `QueueStore` does."""
        lapsed = message_id in self.claims.rows and not self.keeper.holds_lease
        if lapsed or self._is_lost(message_id):
            raise ClaimLostError(f"message {message_id}: its claim has expired")

    async def _composed(self, message_id: MessageId) -> ComposedMessage:
        row = self.claims.rows.get(message_id)
        if row is None:
            if self._is_lost(message_id):
                raise MessageSettledError(f"message {message_id}: its claim has expired")
            return await self._for_operators(message_id)
        composed = self._composer.known(message_id)
        self.check_claim(message_id)
        try:
            return composed or await self._made(row)
        except MessageNotFoundError as error:
            self._lose(row)
            raise MessageSettledError(f"message {message_id}: row {row.id} was deleted") from error
        except StoreError:
            if not self.keeper.may_begin:
                self._stalled.add(message_id)
            raise
        except BadRowError as error:
            self._refuse(row, str(error))
            raise MessageSettledError(f"message {message_id}: row {row.id} is invalid: {error}") from error

    def _is_lost(self, message_id: MessageId) -> bool:
        return any(key.message_id == message_id for key in self._lost)

    async def _made(self, row: Row) -> ComposedMessage:
        if row.content is not None:
            return await self._composer.make(row, row.content)
        async with self._composer.room(await self.reader.size(row.id)):
            return await self._composer.make(row, await self.reader.content(row.id))

    async def _for_operators(self, message_id: MessageId) -> ComposedMessage:
        try:
            row = await self.reader.row(row_of(message_id))
            if row is None:
                raise MessageNotFoundError(f"message {message_id} does not exist")
            return await self._made(row)
        except BadRowError as error:
            raise MessageNotFoundError(f"message {message_id}: {error}") from error
        finally:
            self._composer.forget(message_id)

    def _refuse(self, row: Row, problem: str) -> None:
        for key in keys_of(row):
            self._handed.discard(key)
            self.claims.withdraw(key)
        row.out.clear()
        self._around.events.row_refused(row.id, problem)
        self._writer.put(refused(row.id, row.token, row.attempts, problem))

    async def deliveries_of(self, message_id: MessageId, *, own: bool = False) -> list[Delivery]:
        try:
            row = self.claims.rows.get(message_id) or await self.reader.row(row_of(message_id))
        except BadRowError:
            return []
        return [] if row is None else sorted(row.open(), key=lambda each: each.recipient)

    # --- operators

    async def update(self, keys: Collection[DeliveryKey], change: ChangeOne) -> dict[DeliveryKey, Delivery]:
        existed: dict[DeliveryKey, Delivery] = {}
        by_message = attrgetter("message_id")
        for message_id, some in groupby(sorted(keys, key=by_message), key=by_message):
            number = row_of(message_id)
            self.claims.changing.add(number)
            try:
                row = self.claims.rows.get(message_id) or await self.reader.lock(number, self.keeper.session)
                if row is not None:
                    existed |= self._change(row, list(some), change)
                    await self._written(self._store(row, self._around.clock.now()))
            except BadRowError:
                # The next claim writes the error into the row.
                self.claims.doubt()
            finally:
                self.claims.changing.discard(number)
        # A row that is due again is back in the table.
        self.claims.look()
        return existed

    def _change(
        self, row: Row, keys: Sequence[DeliveryKey], change: ChangeOne
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

    async def _written(self, write: RowWrite) -> None:
        waiter = self._waiters.setdefault((write.id, write.token), asyncio.get_running_loop().create_future())
        await asyncio.shield(waiter)


NAME_FILE = "outbox-{:02d}.name"


def build_outbox(
    spool: SpoolSettings, index: int, environment: Mapping[str, str], around: OutboxContext
) -> OutboxStore:
    """Return the outbox of worker `index`. Raises StoreOpenError if a secret cannot be read."""
    load_driver()
    outbox = around.settings
    name = _locked_name(spool.path.parent / NAME_FILE.format(index))
    mailboxes = Mailboxes(read_keys(outbox, environment), around.clock.monotonic)
    return OutboxStore(OutboxKeeper(access_of(outbox, environment), name, around), mailboxes)


def _locked_name(path: Path) -> str:
    """Return a name of this relay that survives restarts and is unique among running relays.

    The name is in a file next to the spool, which stays open and locked until the process ends. A relay that
    finds it locked uses a name for this run only.
    """
    name = secrets.token_hex(16)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return name  # then the claims of an earlier run are taken over when its lease has ended
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return name
    if known := os.read(file, 64).decode("ascii", "replace").strip():
        return known
    os.write(file, f"{name}\n".encode())
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
            raise StoreOpenError(f"outbox.keys[{at}]: {error}") from error
    return keys
