"""Takes mail into the Redis spool: bodies while they arrive, then the message.

A commit whose answer was lost is doubtful. The client was told 451, so the message is taken back when the
server is reachable again, unless another relay has claimed it by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.common import records
from zonerelay.store.common.write.replies import then
from zonerelay.store.contract import StoreError, StoreFullError
from zonerelay.store.redis import records as rows
from zonerelay.store.redis.claim_book import ClaimBook
from zonerelay.store.redis.connection import Argument, Reply, as_list
from zonerelay.store.redis.counts import RedisCounts
from zonerelay.store.redis.keeper import RedisKeeper

UPLOAD_KEPT = 15 * 60_000
"""Milliseconds after which the server forgets an upload that no relay goes on with."""


class RedisUploads:
    """Stores bodies and messages for `BodyWriter`."""

    def __init__(
        self,
        keeper: RedisKeeper,
        book: ClaimBook,
        figures: RedisCounts,
        *,
        clock: Clock,
        observe_commit: Callable[[float], None],
    ) -> None:
        self.uploads = 0
        self.check_writable = keeper.check_writable
        self._keeper = keeper
        self._book = book
        self._figures = figures
        self._clock = clock
        self._observe = observe_commit
        # RedisUploads under way and commits without an answer, with the token they were begun under.
        self._owners: dict[MessageId, bytes] = {}
        self.doubtful: dict[MessageId, bytes] = {}

    def submit_chunks(
        self, message_id: MessageId, first: int, chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        owner = self._owners.setdefault(message_id, self._keeper.lease.token)
        asked = self._keeper.run_body("chunks", owner, message_id, UPLOAD_KEPT, first, *chunks)
        self._book.remember_body(message_id, first, chunks)
        return then(asked, _check_upload)

    def submit_message(
        self, message: Message, deliveries: Sequence[Delivery], chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        owner = self._owners.get(message.id, self._keeper.lease.token)
        stored = message.chunks - len(chunks)
        asked = self._keeper.run(
            "commit", owner, *head(message), stored, len(chunks), *chunks, *delivery_rows(deliveries)
        )
        self._owners.pop(message.id, None)
        self._book.remember(message)
        self._book.remember_body(message.id, stored + 1, chunks)
        started = self._clock.monotonic()

        def committed(reply: Reply) -> None:
            self._observe(self._clock.monotonic() - started)
            _check_upload(as_list(reply)[0])
            self._figures.note_id(message.id)
            self._figures.take(as_list(reply)[1])

        def failed(error: StoreError) -> None:
            if isinstance(error, StoreFullError):
                self._keeper.full()
            else:
                self.doubtful[message.id] = owner

        return then(asked, committed, failed)

    def remove_chunks(self, message_id: MessageId, count: int) -> None:
        del count  # all of it is under one key
        owner = self._owners.pop(message_id, self._keeper.lease.token)
        self._book.forget_body(message_id)
        try:
            self._abort(message_id, owner)
        except StoreError:
            self.doubtful[message_id] = owner

    def _abort(self, message_id: MessageId, owner: bytes) -> asyncio.Future[None]:
        # Behind what was sent of the body.
        asked = self._keeper.run_body("abort", owner, message_id)

        def aborted(reply: Reply) -> None:
            if len(as_list(reply)) > 1:
                self._figures.take(as_list(reply)[1])

        def failed(_: StoreError) -> None:
            self.doubtful[message_id] = owner

        return then(asked, aborted, failed)

    async def keep(self) -> None:
        """Those under way are not to be forgotten. Raises StoreError."""
        if self._owners:
            arguments = [part for upload, owner in self._owners.items() for part in (owner, upload)]
            await self._keeper.run_body("keep", UPLOAD_KEPT, *arguments)

    async def take_back(self) -> None:
        """What is doubtful, now that the server is there again. Raises StoreError."""
        for message_id, owner in list(self.doubtful.items()):
            await self._abort(message_id, owner)
            del self.doubtful[message_id]


def head(message: Message) -> tuple[Argument, ...]:
    return (message.id, int(message.envelope.created), records.encode_message(message))


def delivery_rows(deliveries: Sequence[Delivery]) -> list[Argument]:
    found: list[Argument] = []
    for delivery in deliveries:
        place = rows.address(delivery.key)
        found += (place.zone, place.recipient, rows.encode(delivery))
    return found


def _check_upload(status: Reply) -> None:
    if status == b"TAKEN":
        raise StoreError("the message id is another message's")
    if status != b"OK":
        raise StoreError("the body took so long that the spool's server has given it up")
