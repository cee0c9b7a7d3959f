"""Takes mail into a bucket: bodies while they arrive, then the message.

A small body is one request together with its message. A larger one is an object of its own, stored before
the message. A body that outgrows a part is uploaded in parts while it arrives. A part has at least 5 MiB,
so that many octets of each upload are in memory; `UPLOADS` of them go on at a time, and further ones wait.

A commit whose answer was lost is in doubt: its client has heard 451, so the message is refused when the
service is reachable again (`refusals`). The next walk through the bucket removes what a crash leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.contract import StoreError
from zonerelay.store.s3 import records as spelled
from zonerelay.store.s3.client import ConflictError, UnsureError
from zonerelay.store.s3.objects import Objects, Version
from zonerelay.store.s3.own_messages import OwnMessages
from zonerelay.store.s3.records import INLINE_LIMIT, Head
from zonerelay.store.s3.refusals import Refusals

PART = 5 * 1024 * 1024
"""The smallest part that the services take."""
UPLOADS = 16
"""Large bodies that are taken at the same time."""


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
        refusals: Refusals,
        *,
        session: Callable[[], str],
        check: Callable[[], None],
        owner: Callable[[], str],
        offered: Callable[[MessageId], None],
        throw_away: Callable[[str], None],
        clock: Clock,
        observe: Callable[[float], None],
    ) -> None:
        """`check` raises StoreError when no mail may be taken now, or what was taken may be lost. `owner` is
        whose the next message will be, "" to leave it to others, of which `offered` is told. `throw_away`
        removes a body that no message names.
        """
        self.uploads = 0
        self.check_writable = check
        self._objects = objects
        self._bucket = objects.bucket
        self._mine = mine
        self._refusals = refusals
        self._throw_away = throw_away
        self._session = session
        self._owner = owner
        self._offered = offered
        self._clock = clock
        self._observe = observe
        self._slots = asyncio.Semaphore(UPLOADS)
        self._open: dict[MessageId, _Upload] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- bodies

    def submit_chunks(
        self, message_id: MessageId, first: int, chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        upload = self._open.get(message_id)
        if upload is None:
            upload = self._open[message_id] = _Upload(self._objects.keys.body(message_id, self._session()))
        self._mine.bodies.extend(message_id, first, chunks)
        return self._start(self._take(upload, list(chunks)))

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
            self._start(self._abort(upload))

    async def _abort(self, upload: _Upload) -> None:
        async with upload.lock:
            upload.is_over = True
            upload.waiting = []
            self._free(upload)
            if upload.id:
                # Should it fail, it is found as what a crash leaves.
                await self._bucket.abort_upload(upload.key, upload.id)

    def _free(self, upload: _Upload) -> None:
        if upload.has_slot:
            upload.has_slot = False
            self._slots.release()

    # --- messages

    def submit_message(
        self, message: Message, deliveries: Sequence[Delivery], chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        upload = self._open.pop(message.id, None)
        if upload is None and message.size > INLINE_LIMIT:
            upload = _Upload(self._objects.keys.body(message.id, self._session()))
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
        return self._start(self._commit(message, head, list(chunks), upload))

    async def _commit(
        self, message: Message, head: Head, chunks: list[bytes], upload: _Upload | None
    ) -> None:
        session, started = self._session(), self._clock.monotonic()
        version: Version | None = None
        is_sent = False
        try:
            if upload is not None:
                await self._finish_body(upload, chunks)
            is_sent = True
            version = await self._create(message.id, head, b"" if upload is not None else b"".join(chunks))
            if session != self._session():
                raise UnsureError("the lease of this relay has ended meanwhile")
            self.check_writable()
        except StoreError as error:
            self._mine.bodies.drop(message.id)
            if is_sent and (version is not None or isinstance(error, UnsureError)):
                self._refusals.note(message.id, session)
            elif upload is not None:
                self._give_up(upload)
            raise
        finally:
            if upload is not None:
                self._free(upload)
        self._observe(self._clock.monotonic() - started)
        if head.owner == session:
            self._mine.take_in(message.id, version)
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
        """Nothing names it."""
        if upload.id:
            self._start(self._abort(upload))
        else:
            self._throw_away(upload.key)

    # --- inside

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Future[None]:
        """Carries the work out to its end, also when its caller leaves."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a caller that waits has seen it

    async def close(self) -> None:
        """Let commits end; what is only half here goes."""
        for upload in list(self._open.values()):
            self._start(self._abort(upload))
        self._open.clear()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
