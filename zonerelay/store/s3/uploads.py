"""Takes mail into a bucket: bodies while they arrive, then the message.

A small body is one request together with its message. A larger one is an object of its own, stored before
the message. A body that outgrows a part is uploaded in parts while it arrives. A part has at least 5 MiB,
so that many octets of each upload are in memory; `UPLOADS` of them go on at a time, and further ones wait.

A commit whose answer was lost is in doubt: its client has heard 451, so the message is refused when the
service is reachable again (`Refusals`). The next walk through the bucket removes what a crash leaves.

The service may carry out a write without an answer later, even after a restart of this relay. So a
*refusal* is written under the message's name, on the condition that no object is there. The message was
written on the same condition, so the later of the two fails. If the message came first, the refusal
replaces it. A refusal stays for `KEPT` seconds; a later walk through the bucket removes it.

A service without conditions lets a late write through. There the ids are remembered for `KEPT` seconds, not
over a restart, and the next walk through the bucket removes what has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import msgspec

from zonerelay.model.clock import Clock
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.process.tasks import Tasks
from zonerelay.store.common.body.writer import NewMessage
from zonerelay.store.contract import NotKeptError, Once, StoreCorruptError, StoreError, Submit
from zonerelay.store.s3 import records as spelled
from zonerelay.store.s3.client import ConflictError, MissingError, UnsureError
from zonerelay.store.s3.keeper import S3Keeper
from zonerelay.store.s3.objects import Objects, Version
from zonerelay.store.s3.own_messages import OwnMessages
from zonerelay.store.s3.records import INLINE_LIMIT, Head
from zonerelay.store.s3.writer import ObjectWriter
from zonerelay.store.surroundings import Surroundings

PART = 5 * 1024 * 1024
"""The smallest part that the services take."""
UPLOADS = 16
"""Large bodies that are taken at the same time."""
KEPT = 3600.0
"""Seconds after which no service carries out what it was asked."""
MOST = 10_000
"""Ids that are remembered where there are no conditions."""

_log = logging.getLogger("zonerelay.store")


class Refusals:
    """Messages that were given up: their clients have heard 451 and come again, so they are not delivered."""

    def __init__(self, objects: Objects, mine: OwnMessages, writer: ObjectWriter, clock: Clock) -> None:
        self.open: dict[MessageId, str] = {}
        """In doubt, and nothing has been done about it yet; the session that each was written under."""
        self._objects = objects
        self._mine = mine
        self._throw_away = writer.throw_away
        self._clock = clock
        self._remembered: dict[MessageId, float] = {}

    def note(self, message_id: MessageId, session: str) -> None:
        """Notes a message that may have been stored, or may be yet."""
        self.open[message_id] = session
        if not self._objects.abilities.conditional_put:
            self._remembered[message_id] = self._clock.monotonic() + KEPT
            while len(self._remembered) > MOST:
                del self._remembered[next(iter(self._remembered))]

    async def settle(self) -> None:
        """Refuses the messages in doubt, while the service is there. Raises StoreError."""
        for message_id, session in list(self.open.items()):
            try:
                if await self._refuse(message_id, session):
                    self._throw_away(self._objects.keys.body(message_id, session))
            except (ConflictError, MissingError):
                continue  # another relay was faster: the next beat looks at it again
            except StoreCorruptError as error:
                _log.error("left for the operator: %s", error)
            self.open.pop(message_id, None)

    async def _refuse(self, message_id: MessageId, session: str) -> bool:
        """Returns true when nothing is left of the message and nothing will come, false when a relay has it
        now.
        """
        if message_id in self._mine.ids:
            return False
        has_conditions = self._objects.abilities.conditional_put
        refusal = Head(format=spelled.FORMAT, owner=session, rev=1, refused=self._clock.now())
        if has_conditions:
            try:
                await self._objects.create(message_id, refusal, b"")
            except ConflictError:
                _log.info("message %s: what was given up has been stored", message_id)
            else:
                return True
        try:
            found = await self._objects.read_head(message_id)
        except MissingError:
            if has_conditions:
                raise
            return True
        if found.head.is_over:
            return True  # our own refusal, the answer to which was lost
        if found.head.owner not in (session, ""):
            return False
        if has_conditions:
            # Not removed: a client may have sent its request twice.
            await self._objects.replace(message_id, refusal, b"", etag=found.etag)
        else:
            await self._objects.remove(message_id, found.head, etag=found.etag)
        return True

    # --- what a walk through the bucket finds

    def stands(self, head: Head) -> bool:
        """Returns whether a refusal is still needed. A clock that was far off must not keep it for years."""
        return bool(head.refused) and abs(self._clock.now() - head.refused) < KEPT

    async def came_late(self, message_id: MessageId, version: Version) -> bool:
        """Returns whether the message was given up and must not be delivered. Raises StoreError."""
        if message_id in self.open:
            return True  # `settle` sees to it
        until = self._remembered.get(message_id)
        if until is None or self._clock.monotonic() > until:
            return False
        await self._objects.remove(message_id, version.head, etag=version.etag)
        return True


class _Upload:
    """A large body that is arriving. `parts` are the ETags of what is stored."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.id = ""
        self.parts: list[str] = []
        self.waiting: list[bytes] = []
        self.octets = 0
        self.lock = asyncio.Lock()
        self.has_slot = False
        self.is_over = False


class S3Uploads:
    """Stores bodies and messages for `BodyWriter`."""

    def __init__(
        self,
        objects: Objects,
        mine: OwnMessages,
        keeper: S3Keeper,
        writer: ObjectWriter,
        around: Surroundings,
        *,
        owner: Callable[[], str],
        offered: Callable[[MessageId], None],
    ) -> None:
        """`owner` returns the session that the next message belongs to, "" to leave it to other relays, of
        which `offered` is told.
        """
        self.uploads = 0
        self.check_writable = keeper.check_usable
        self.refusals = Refusals(objects, mine, writer, around.clock)
        self._objects = objects
        self._bucket = objects.bucket
        self._mine = mine
        self._nodes = keeper.nodes
        self._writer = writer
        self._throw_away = writer.throw_away
        self._owner = owner
        self._offered = offered
        self._clock = around.clock
        self._observe = around.observe_commit
        self._slots = asyncio.Semaphore(UPLOADS)
        self._open: dict[MessageId, _Upload] = {}
        self._tasks = Tasks()

    # --- bodies

    def submit_chunks(
        self, message_id: MessageId, first: int, chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        upload = self._open.get(message_id)
        if upload is None:
            upload = self._open[message_id] = self._new_upload(message_id)
        self._mine.bodies.extend(message_id, first, chunks)
        return asyncio.shield(self._tasks.start(self._take(upload, list(chunks))))

    def _new_upload(self, message_id: MessageId) -> _Upload:
        return _Upload(self._objects.keys.body(message_id, self._nodes.session))

    async def _take(self, upload: _Upload, chunks: list[bytes]) -> None:
        async with upload.lock:
            if not upload.has_slot:
                await self._slots.acquire()
                upload.has_slot = True
            if upload.is_over:
                return
            upload.waiting += chunks
            upload.octets += sum(map(len, chunks))
            if upload.octets >= PART:
                await self._store_part(upload)

    async def _store_part(self, upload: _Upload) -> None:
        if not upload.id:
            upload.id = await self._bucket.start_upload(upload.key)
        data, upload.waiting, upload.octets = b"".join(upload.waiting), [], 0
        etag = await self._bucket.put_part(upload.key, upload.id, len(upload.parts) + 1, data)
        upload.parts.append(etag)

    async def _finish_body(self, upload: _Upload, chunks: Sequence[bytes]) -> None:
        async with upload.lock:
            upload.waiting += chunks
            if not upload.id:
                await self._bucket.put(upload.key, b"".join(upload.waiting))
            else:
                if upload.waiting:
                    await self._store_part(upload)
                await self._bucket.finish_upload(upload.key, upload.id, upload.parts)
                upload.id = ""
            upload.waiting = []

    def remove_chunks(self, message_id: MessageId, count: int) -> None:
        del count  # all of it is one object
        self._mine.bodies.drop(message_id)
        upload = self._open.pop(message_id, None)
        if upload is not None:
            self._tasks.start(self._abort(upload))

    async def _abort(self, upload: _Upload) -> None:
        async with upload.lock:
            upload.is_over = True
            upload.waiting = []
            self._free(upload)
            if upload.id:
                with contextlib.suppress(StoreError):  # a walk finds it as what a crash leaves
                    await self._bucket.abort_upload(upload.key, upload.id)

    def _free(self, upload: _Upload) -> None:
        if upload.has_slot:
            upload.has_slot = False
            self._slots.release()

    # --- messages

    async def submit_once(
        self, once: Once, message_id: MessageId, submit: Callable[[], asyncio.Future[None]]
    ) -> asyncio.Future[None]:
        # The object of a message leaves with it, and a bucket has no write of two objects.
        raise NotKeptError("a queue in a bucket cannot remember idempotency keys")

    def submit_message(self, given: NewMessage) -> asyncio.Future[None]:
        message, deliveries, chunks, beside, _ = given
        upload = self._open.pop(message.id, None)
        if upload is None and message.size > INLINE_LIMIT:
            upload = self._new_upload(message.id)
        head = Head(
            format=spelled.FORMAT,
            owner=self._owner(),
            rev=1,
            message=message,
            # The same recipient twice is one delivery.
            deliveries=spelled.rows({d.key: d for d in deliveries}.values()),
            body=upload.key if upload is not None else "",
        )
        self._mine.bodies.extend(message.id, message.chunks - len(chunks) + 1, chunks)
        work = self._commit(message, head, list(chunks), upload, beside)
        return asyncio.shield(self._tasks.start(work))

    async def _commit(
        self,
        message: Message,
        head: Head,
        chunks: list[bytes],
        upload: _Upload | None,
        beside: Sequence[Submit],
    ) -> None:
        session, started = self._nodes.session, self._clock.monotonic()
        version: Version | None = None
        is_sent = False
        try:
            if upload is not None:
                await self._finish_body(upload, chunks)
            if beside:
                head = msgspec.structs.replace(head, intent=await self._writer.word_intent(beside, {}))
            is_sent = True
            version = await self._create(message.id, head, b"" if upload is not None else b"".join(chunks))
            if session != self._nodes.session:
                raise UnsureError("the lease of this relay has ended meanwhile")
            self.check_writable()
        except StoreError as error:
            self._mine.bodies.drop(message.id)
            if is_sent and (version is not None or isinstance(error, UnsureError)):
                self.refusals.note(message.id, session)
            elif upload is not None:
                self._give_up(upload)
            raise
        finally:
            if upload is not None:
                self._free(upload)
        self._observe(self._clock.monotonic() - started)
        if head.owner == session:
            self._mine.take_in(message.id, version)
            if beside:
                await self._writer.finish_new(message.id)
        else:
            self._mine.note_id(message.id)
            self._offered(message.id)

    async def _create(self, message_id: MessageId, head: Head, tail: bytes) -> Version:
        try:
            return await self._objects.create(message_id, head, tail)
        except ConflictError as error:
            found = await self._objects.find(message_id)
            same = found is not None and (found.head.owner, found.head.message) == (head.owner, head.message)
            if found is None or not same or not head.owner:
                raise StoreError("the message id is another message's") from error
            return found  # our own, the answer to which was lost on the way

    def _give_up(self, upload: _Upload) -> None:
        """Removes an upload that no message names."""
        if upload.id:
            self._tasks.start(self._abort(upload))
        else:
            self._throw_away(upload.key)

    async def close(self) -> None:
        """Waits for commits, and aborts the bodies that are half here."""
        for upload in list(self._open.values()):
            self._tasks.start(self._abort(upload))
        self._open.clear()
        await self._tasks.drain()
