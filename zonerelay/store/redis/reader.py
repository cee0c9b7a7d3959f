"""Reads the Redis spool: messages, bodies, pages of the queue. Changes nothing.

A message that this relay has claimed and has in memory is read without asking the server, as long as the
lease lasts. Afterwards another relay may be sending it, so reading it raises ClaimLostError and no attempt
begins. A reader of a message or a body waits for a lost connection that comes back within the timeout.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common import records
from zonerelay.store.common.reading import read_each
from zonerelay.store.contract import (
    ClaimLostError,
    Kept,
    KeptKeys,
    MessageNotFoundError,
    StoreCorruptError,
    StoreError,
    Wanted,
    everybody,
)
from zonerelay.store.redis import records as rows
from zonerelay.store.redis.claim_book import ClaimBook
from zonerelay.store.redis.connection import Argument, Reply, as_list, pairs
from zonerelay.store.redis.lease import RedisLease

PAGE_ROWS = 200
OLDEST_LOOKS = 5000
"""Deliveries held back by their senders that are passed over in search of the oldest."""


class RedisAccess(Protocol):
    """A keeper, or the connection of a command that does not join the queue."""

    prefix: bytes
    lease: RedisLease

    def run(self, script: str, *arguments: Argument) -> asyncio.Future[Reply]: ...

    @property
    def call(self) -> Callable[..., asyncio.Future[Reply]]: ...

    @property
    def call_body(self) -> Callable[..., asyncio.Future[Reply]]: ...

    async def with_retry(self, ask: Callable[[], asyncio.Future[Reply]]) -> Reply: ...

    def check_open(self) -> None: ...


class RedisReader:
    """One per store, or per view."""

    def __init__(self, keeper: RedisAccess, book: ClaimBook) -> None:
        self._keeper = keeper
        self._book = book
        self._prefix = keeper.prefix

    # --- messages

    async def kept_keys(self, cursor: str = "") -> tuple[KeptKeys, str]:
        pattern = re.sub(rb"[*?\[\]\\^]", rb"\\\g<0>", self._prefix) + b"once:*"
        scan = self._keeper.with_retry(
            lambda: self._keeper.call("SCAN", cursor or "0", "MATCH", pattern, "COUNT", 1000)
        )
        following, names = as_list(await scan)
        page: list[tuple[str, Kept]] = []
        for name in as_list(names):
            assert isinstance(name, bytes)
            told, left = await self._keeper.call("GET", name), await self._keeper.call("PTTL", name)
            if isinstance(told, bytes) and isinstance(left, int) and left > 0:
                message_id, _, digest = told.decode("ascii", "replace").partition(" ")
                kept = Kept(MessageId(message_id), digest, time.time() + left / 1000)
                page.append((name[len(self._prefix) + 5 :].decode("ascii", "replace"), kept))
        return page, "" if following == b"0" else str(following, "ascii")  # type: ignore[arg-type]  # octets

    async def read_message(self, message_id: MessageId) -> Message:
        self.check_claim(message_id)
        known = self._book.message(message_id)
        if known is not None:
            return known
        key = self._message_key(message_id)
        reply = await self._keeper.with_retry(lambda: self._keeper.call("HMGET", key, "#", "*"))
        exists, raw = as_list(reply)
        if exists is None:
            raise MessageNotFoundError(f"no message {message_id}")
        message = records.decode_message(message_id, raw if isinstance(raw, bytes) else b"")
        self.check_claim(message_id)
        if self._book.has_message(message_id):
            self._book.remember(message)
        return message

    async def read_body(self, message_id: MessageId) -> AsyncIterator[bytes]:
        message = await self.read_message(message_id)
        known = self._book.body(message)
        if known is not None:
            for chunk in known:
                self.check_claim(message_id)
                yield chunk
            return
        key = self._message_key(message_id)
        following: asyncio.Future[Reply] | None = None
        for number in range(1, message.chunks + 1):
            raw = await self._read_chunk(key, number, following)
            if not isinstance(raw, bytes):
                await self._explain_missing(message_id, number)
                return
            if number < message.chunks:
                following = self._ask_chunk(key, number + 1)  # while this one is being sent
            self.check_claim(message_id)
            yield raw

    async def _read_chunk(self, key: bytes, number: int, asked: asyncio.Future[Reply] | None) -> Reply:
        first = [asked] if asked is not None else []

        def ask() -> asyncio.Future[Reply]:
            return first.pop() if first else self._keeper.call_body("HGET", key, number)

        return await self._keeper.with_retry(ask)

    def _ask_chunk(self, key: bytes, number: int) -> asyncio.Future[Reply] | None:
        try:
            return self._keeper.call_body("HGET", key, number)
        except StoreError:
            return None  # the read of that chunk asks again

    async def _explain_missing(self, message_id: MessageId, number: int) -> None:
        if not await self._keeper.call("HEXISTS", self._message_key(message_id), "#"):
            raise MessageNotFoundError(f"no message {message_id}")
        raise StoreCorruptError(f"message {message_id}: chunk {number} is missing")

    def check_claim(self, message_id: MessageId) -> None:
        self._keeper.check_open()
        if self._book.has_message(message_id):
            self._keeper.lease.check()
            if not self._book.is_sound(message_id, self._keeper.lease.token):
                raise ClaimLostError(f"the claim on message {message_id} was lost")

    def _message_key(self, message_id: MessageId) -> bytes:
        return b"%bmessage:%b" % (self._prefix, message_id.encode("ascii"))

    def _deliveries_key(self, message_id: MessageId) -> bytes:
        return b"%bdeliveries:%b" % (self._prefix, message_id.encode("ascii"))

    # --- deliveries

    async def read_records(self, keys: Iterable[DeliveryKey]) -> list[tuple[DeliveryKey, bytes]]:
        """Reads the records that exist, as they are stored."""
        wanted = list(keys)
        asked = [
            self._keeper.call("HGET", self._deliveries_key(key.message_id), rows.address(key).field)
            for key in wanted
        ]
        found = await asyncio.gather(*asked)
        return [(key, raw) for key, raw in zip(wanted, found, strict=True) if isinstance(raw, bytes)]

    async def deliveries_of(self, message_id: MessageId) -> list[Delivery]:
        found = as_list(await self._keeper.call("HGETALL", self._deliveries_key(message_id)))
        deliveries = []
        for place, raw in pairs(found):
            zone, _, recipient = place.partition(b" ")
            deliveries.append(rows.decode(zone, message_id.encode("ascii"), recipient, raw))
        return sorted(deliveries, key=lambda delivery: (delivery.recipient, delivery.queue))

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        return await read_each(self.read_message, ids)

    async def scan(
        self, queue: QueueName | None = None, *, wanted: Wanted = everybody, after: DeliveryKey | None = None
    ) -> AsyncIterator[Delivery]:
        names = sorted(each for each in await self.queues() if each.is_mail) if queue is None else [queue]
        starts: dict[bytes, bytes] = {}
        if after is not None:
            names = [name for name in names if name >= after.queue]
            member = b"%b %b" % (after.message_id.encode("ascii"), records.field(after.recipient))
            starts[rows.zone_field(after.queue)] = b"(" + member
        fields = [rows.zone_field(name) for name in names]
        ends = await asyncio.gather(
            *(self._keeper.call("ZRANGE", self._queue_key(field), -1, -1) for field in fields)
        )
        for field, end in zip(fields, ends, strict=True):
            for last in as_list(end):
                assert isinstance(last, bytes)
                async for delivery in self._scan_zone(field, starts.get(field, b"-"), b"[" + last):
                    if wanted(delivery.recipient):
                        yield delivery

    async def _scan_zone(self, zone: bytes, start: bytes, end: bytes) -> AsyncIterator[Delivery]:
        while True:
            page = pairs(as_list(await self._keeper.run("page", zone, start, end, PAGE_ROWS)))
            for member, raw in page:
                if raw:
                    yield rows.decode_member(zone, member, raw)
            if len(page) < PAGE_ROWS:
                return
            start = b"(" + page[-1][0]

    def _queue_key(self, zone: bytes) -> bytes:
        return b"%bqueue:%b" % (self._prefix, zone)

    # --- zones

    async def queues(self) -> set[QueueName]:
        found = as_list(await self._keeper.call("HGETALL", self._prefix + b"counts"))
        return {records.queue_in(field[2:]) for field, number in pairs(found) if int(number) > 0}

    async def next_due(self, queue: QueueName) -> float | None:
        key = b"%bretry:%b" % (self._prefix, rows.zone_field(queue))
        found = as_list(await self._keeper.call("ZRANGE", key, 0, 0, "WITHSCORES"))
        return float(found[1]) if len(found) > 1 and isinstance(found[1], bytes) else None

    async def oldest(self, queue: QueueName, *, now: float) -> float | None:
        when = repr(now).encode("ascii")
        found = await self._keeper.run("oldest", rows.zone_field(queue), when, OLDEST_LOOKS)
        return float(found) if isinstance(found, bytes) else None
