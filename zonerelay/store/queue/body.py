"""Writes the body of one message in chunks, and caches the bodies of new messages.

Up to `GROUP_CHUNKS` chunks wait in memory. A message that ends before that is one atomic synced batch. A
longer one is stored in groups while it arrives. Each group is a synced batch, because a 250 promises that the
whole message is durable. One group is written while the next one fills; `write` waits if both are full. The
more large uploads there are, the smaller are their groups, so the total is bounded.

Chunks of an uncommitted message are never read. `abort` removes them in the background, and the store removes
those that a crash has left. After a failed write the message can no longer be committed.

`BodyCache` keeps the bodies that were just stored, so that delivering new mail reads no disk. It receives
chunks as they are written, also while a large body is still arriving. It holds at most `CAPACITY` bytes and
drops the oldest message first. It does not keep a body larger than `LARGEST`, which would push out all the
others.
"""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self, Unpack

from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Envelope, Message, MessageId
from zonerelay.store import contract
from zonerelay.store.contract import CHUNK_SIZE, BodyFacts, IdempotencyKey, OwnMessage, StoreError

CAPACITY = 24 * 1024 * 1024
LARGEST = 4 * 1024 * 1024


class BodyCache:
    """Caches the bodies of new messages, which are delivered soon. Others are read from the store."""

    def __init__(self) -> None:
        self._size = 0
        self._bodies: OrderedDict[MessageId, tuple[bytes, ...]] = OrderedDict()

    def put(self, message_id: MessageId, body: bytes) -> None:
        """Add a body of at most one chunk. An empty one has no chunks."""
        self.extend(message_id, 1, (body,) if body else ())

    def extend(self, message_id: MessageId, first: int, chunks: Sequence[bytes]) -> None:
        """Add part of a large body: its chunks from number `first` on, counted from 1."""
        size = sum(map(len, chunks))
        body = tuple(chunks)
        before = self._bodies.get(message_id)
        if first > 1:
            if before is None:
                return  # the beginning was dropped
            body = (*before, *chunks)
            if sum(map(len, body)) > LARGEST:
                self.drop(message_id)
                return
        elif before is not None:
            self.drop(message_id)
        if size > LARGEST:
            return
        self._bodies[message_id] = body
        self._size += size
        if self._size > CAPACITY:
            self._evict()

    def get(self, message_id: MessageId, count: int) -> Sequence[bytes] | None:
        """Return the cached body of a message, which has `count` chunks, or None if it is not complete in the
        cache.
        """
        body = self._bodies.get(message_id)
        return body if body is not None and len(body) == count else None

    def drop(self, message_id: MessageId) -> None:
        body = self._bodies.pop(message_id, None)
        if body is not None:
            self._size -= sum(map(len, body))

    def clear(self) -> None:
        self._bodies.clear()
        self._size = 0

    def _evict(self) -> None:
        # Drop the oldest one. In a queue this long it is attempted much later, or it waits for a retry.
        while self._size > CAPACITY:
            self.drop(next(iter(self._bodies)))


# The following functions check what a store is about to write, so that a caller's mistake cannot damage a
# queue.


def check_deliveries(message_id: MessageId, deliveries: Sequence[Delivery]) -> None:
    """Raise StoreError if a message has no deliveries, or deliveries of another message. A message without
    deliveries would never leave, and a delivery of another message would remove that message's body.
    """
    if not deliveries:
        raise StoreError(f"message {message_id} has no delivery")
    for delivery in deliveries:
        if delivery.message_id != message_id:
            raise StoreError(f"message {message_id} was given a delivery of message {delivery.message_id}")


def check_own_message(change: OwnMessage) -> None:
    """Raise StoreError if the size or the number of chunks in a message's record does not match its body. The
    chunks are removed by that number.
    """
    message = change.message
    check_deliveries(message.id, change.deliveries)
    if message.size != len(change.body) or message.chunks != len(split(change.body)):
        raise StoreError(f"the record of message {message.id} does not describe its body")


def split(body: bytes) -> list[bytes]:
    """Split a body into chunks. An empty body has none."""
    return [body[start : start + CHUNK_SIZE] for start in range(0, len(body), CHUNK_SIZE)]


GROUP_CHUNKS = 8
"""The number of chunks in one synced batch of a large body (512 KiB)."""
UPLOAD_MEMORY = 64 * 1024 * 1024
"""The memory, in bytes, that all large uploads together may use before their groups shrink."""


class NewMessage(NamedTuple):
    """A message to commit, with its deliveries and the last chunks of its body. `companions` are messages of
    the relay that are stored in the same write.
    """

    message: Message
    deliveries: Sequence[Delivery]
    chunks: Sequence[bytes]
    companions: Sequence[OwnMessage] = ()
    once: IdempotencyKey | None = None


class Spool(Protocol):
    """The part of a store that a body writer uses."""

    uploads: int

    def check_writable(self) -> None:
        """Raise StoreError if no new mail may be stored at present."""

    def submit_chunks(
        self, message_id: MessageId, first: int, chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        """Write and sync part of a body: the chunks from number `first` on."""

    def submit_message(self, given: NewMessage) -> asyncio.Future[None]:
        """Write the last chunks of a body and commit the message."""

    async def submit_once(
        self, once: IdempotencyKey, message_id: MessageId, submit: Callable[[], asyncio.Future[None]]
    ) -> asyncio.Future[None]:
        """Call `submit`, which writes the message with this key, unless the key was stored before. This
        method and the future raise what `commit` raises.
        """

    def remove_chunks(self, message_id: MessageId, count: int) -> None:
        """Remove the first `count` chunks of an uncommitted message in the background."""


class BodyWriter:
    """Writes the body of an arriving message to a spool in chunks."""

    def __init__(self, spool: Spool, envelope: Envelope) -> None:
        self._spool = spool
        self._envelope = envelope
        self._size = 0
        self._parts: list[bytes] = []  # less than a chunk
        self._filled = 0  # bytes in _parts
        self._chunks: list[bytes] = []  # complete chunks that are not yet submitted
        self._submitted = 0
        self._written: asyncio.Future[None] | None = None
        self._done = False

    async def write(self, chunk: bytes) -> None:
        self._check_open()
        self._size += len(chunk)
        if self._filled + len(chunk) <= CHUNK_SIZE:
            self._parts.append(chunk)
            self._filled += len(chunk)
            return
        self._cut(chunk)
        if len(self._chunks) >= self._group_size():
            await self._store_group()

    def _check_open(self) -> None:
        if self._done:
            raise StoreError("the message was already committed or aborted")

    def _cut(self, data: bytes) -> None:
        """Fill the current chunk from `data`, and split off further complete chunks. Keep the rest, at least
        one byte, for later.
        """
        view = memoryview(data)
        start = CHUNK_SIZE - self._filled
        self._chunks.append(b"".join((*self._parts, view[:start])))
        while len(data) - start > CHUNK_SIZE:
            self._chunks.append(bytes(view[start : start + CHUNK_SIZE]))
            start += CHUNK_SIZE
        self._parts = [data[start:]]
        self._filled = len(data) - start

    def _group_size(self) -> int:
        share = UPLOAD_MEMORY // (2 * CHUNK_SIZE * max(1, self._spool.uploads))
        return max(1, min(GROUP_CHUNKS, share))

    async def _store_group(self) -> None:
        await self._previous_group()
        self._spool.check_writable()
        chunks, self._chunks = self._chunks, []
        written = self._spool.submit_chunks(self._envelope.id, self._submitted + 1, chunks)
        if self._written is None:
            self._spool.uploads += 1
        self._written = written
        self._submitted += len(chunks)

    async def _previous_group(self) -> None:
        if self._written is not None:
            # If the session is cancelled here, the write of the group must go on.
            await asyncio.shield(self._written)

    async def commit(
        self,
        deliveries: Sequence[Delivery],
        *,
        companions: contract.Companions | None = None,
        once: IdempotencyKey | None = None,
        **facts: Unpack[BodyFacts],
    ) -> Message:
        self._check_open()
        if once is None or not once.asks_only:
            check_deliveries(self._envelope.id, deliveries)
        self._spool.check_writable()
        await self._previous_group()
        chunks = self._chunks
        if self._filled:
            chunks.append(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))
        message = Message(
            envelope=self._envelope, size=self._size, chunks=self._submitted + len(chunks), **facts
        )
        others = () if companions is None else companions(message)
        new = NewMessage(message, deliveries, chunks, others, once)
        submit = functools.partial(self._spool.submit_message, new)
        stored = submit() if once is None else await self._spool.submit_once(once, message.id, submit)
        # From here on the message exists or the spool has failed. Cancellation does not change that.
        self._finish()
        try:
            await stored
        except (contract.StoredBeforeError, contract.OtherContentError):
            if self._submitted:
                self._spool.remove_chunks(message.id, self._submitted)
            raise
        return message

    def _finish(self) -> None:
        self._done = True
        self._parts = []
        self._chunks = []
        if self._written is not None:
            self._spool.uploads -= 1

    async def abort(self) -> None:
        if self._done:
            return
        self._finish()
        if self._written is None:
            return
        remove = functools.partial(self._spool.remove_chunks, self._envelope.id, self._submitted)
        if self._written.done():
            remove()
        else:  # chunks that are being staged appear after their removal
            self._written.add_done_callback(lambda _: remove())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.abort()
