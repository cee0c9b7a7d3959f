"""Reads messages, bodies and the whole queue from a bucket, and counts the queue. Changes nothing.

A message that this relay has claimed and has in memory is read without a request, as long as the lease
lasts. Afterwards another relay may be sending it, so reading it raises StoreError: no attempt begins, and
none goes on. A large body is read in windows, so that a slow receiver keeps no answer of the service open.

A scan takes the keys at once, from the index for this relay's mail and by listing for that of other relays.
It reads the states in groups, each as it is then, so memory holds a key for each delivery but few states.

The counts cost no request: this relay's come from its index, those of other relays from their leases and are
as old as their last beat. Mail that is left to a relay with room is not counted until a relay has taken it
over.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Protocol

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId, is_message_id
from zonerelay.model.queue_name import QueueName, parse_queue
from zonerelay.store.common.body.writer import split
from zonerelay.store.common.reading import read_each
from zonerelay.store.contract import (
    KeptKeys,
    MessageNotFoundError,
    QueueCounts,
    StoreCorruptError,
    Wanted,
    everybody,
)
from zonerelay.store.s3 import records as spelled
from zonerelay.store.s3.adopt import READS_AT_ONCE
from zonerelay.store.s3.client import WINDOW, MissingError, UnsureError
from zonerelay.store.s3.nodes import Nodes
from zonerelay.store.s3.objects import Objects, Version
from zonerelay.store.s3.own_messages import OwnMessages
from zonerelay.store.s3.records import LeaseRecord

PATIENCE = 4
"""How often a window is asked for in the middle of a body."""
PAUSE = 0.5
GROUP = 200
"""Deliveries whose states are read in one go."""

_log = logging.getLogger("zonerelay.store")


class S3Access(Protocol):
    """The keeper, or a command that does not join the queue."""

    nodes: Nodes

    def check_open(self) -> None: ...

    def check_usable(self) -> None: ...


class S3Reader:
    """One per store, or per view."""

    def __init__(self, objects: Objects, mine: OwnMessages, keeper: S3Access) -> None:
        self._objects = objects
        self._mine = mine
        self._nodes = keeper.nodes
        self._keeper = keeper

    async def kept_keys(self, cursor: str = "") -> tuple[KeptKeys, str]:
        del cursor
        return [], ""  # a bucket keeps none

    async def read_message(self, message_id: MessageId) -> Message:
        self.check_claim(message_id)
        if (known := self._mine.message(message_id)) is not None:
            return known
        version = await self._objects.find(message_id)
        self.check_claim(message_id)
        return _message(message_id, version)

    async def read_body(self, message_id: MessageId) -> AsyncIterator[bytes]:
        self.check_claim(message_id)
        known = self._mine.message(message_id)
        chunks = None if known is None else self._mine.bodies.get(message_id, known.chunks)
        if chunks is None:
            version = await self._objects.find(message_id)
            message = _message(message_id, version)
            assert version is not None
            if version.head.body:
                async for chunk in self._windows(message, version.head.body):
                    yield chunk
                return
            chunks = await self._behind_head(message, version)
        for chunk in chunks:
            self.check_claim(message_id)
            yield chunk

    async def _behind_head(self, message: Message, version: Version) -> list[bytes]:
        tail = version.tail
        if tail is None:
            try:
                tail = (await self._objects.read_whole(message.id)).tail
            except MissingError as error:
                raise MessageNotFoundError(f"no message {message.id}") from error
        if tail is None or len(tail) != message.size:
            raise StoreCorruptError(f"message {message.id}: its body is cut off")
        chunks = split(tail)
        if message.id in self._mine.ids:
            self._mine.bodies.extend(message.id, 1, chunks)
        return chunks

    async def _windows(self, message: Message, key: str) -> AsyncIterator[bytes]:
        at = 0
        while at < message.size:
            data = await self._window(message, key, at)
            at += len(data)
            for chunk in split(data):
                self.check_claim(message.id)
                yield chunk

    async def _window(self, message: Message, key: str, at: int) -> bytes:
        wanted = min(WINDOW, message.size - at)
        for attempt in range(1, PATIENCE + 1):
            try:
                data = (await self._objects.bucket.get(key, at, wanted)).data
            except MissingError as error:
                if await self._objects.find(message.id) is None:
                    raise MessageNotFoundError(f"no message {message.id}") from error
                raise StoreCorruptError(f"message {message.id}: its body is missing from {at} on") from error
            except UnsureError:
                # A transaction is under way: a moment's trouble should not break it off.
                if attempt == PATIENCE or not at:
                    raise
                await asyncio.sleep(PAUSE * attempt)
                continue
            if len(data) != wanted:
                raise StoreCorruptError(f"message {message.id}: its body is cut off")
            return data
        raise AssertionError("the last attempt raises")

    def check_claim(self, message_id: MessageId) -> None:
        self._keeper.check_open()
        self._mine.claims.check(message_id, holds_lease=self._nodes.holds_lease)

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        return await read_each(self.read_message, ids)

    # --- the whole queue

    async def deliveries_of(self, message_id: MessageId) -> list[Delivery]:
        self._keeper.check_usable()
        found = await self._states([message_id])
        deliveries = [d for state in found.values() for d in state.values()]
        return sorted(deliveries, key=lambda delivery: (delivery.recipient, delivery.queue))

    async def scan(
        self, queue: QueueName | None = None, *, wanted: Wanted = everybody, after: DeliveryKey | None = None
    ) -> AsyncGenerator[Delivery, None]:
        self._keeper.check_usable()
        keys = [*self._mine.index.sorted_keys(queue)]
        foreign = await self._foreign_keys(queue)
        if foreign:
            keys = sorted({*keys, *foreign})
        if after is not None:
            keys = keys[bisect_right(keys, after) :]
        if wanted is not everybody:
            keys = [key for key in keys if wanted(key.recipient)]
        for start in range(0, len(keys), GROUP):
            some = keys[start : start + GROUP]
            found = await self._states(dict.fromkeys(key.message_id for key in some))
            for key in some:
                delivery = found.get(key.message_id, {}).get(key)
                if delivery is not None:
                    yield delivery

    async def _foreign_keys(self, queue: QueueName | None) -> list[DeliveryKey]:
        found: list[DeliveryKey] = []
        async for page in self._objects.bucket.pages(self._objects.keys.queue):
            ids = [self._objects.keys.message_of(listed.key) for listed in page]
            others = [each for each in ids if each is not None and each not in self._mine.ids]
            for state in (await self._states(others)).values():
                found += [key for key in state if (key.queue == queue if queue else key.queue.is_mail)]
        return found

    async def _states(self, ids: Iterable[MessageId]) -> dict[MessageId, dict[DeliveryKey, Delivery]]:
        """The open deliveries of these messages. Raises StoreError."""
        found: dict[MessageId, dict[DeliveryKey, Delivery]] = {}
        unknown: list[MessageId] = []
        for message_id in ids:
            stored = self._mine.get(message_id)
            if stored is not None and stored.etag:
                found[message_id] = stored.deliveries
            else:
                unknown.append(message_id)
        for start in range(0, len(unknown), READS_AT_ONCE):
            some = unknown[start : start + READS_AT_ONCE]
            read = await asyncio.gather(*map(self._read, some))
            found |= dict(zip(some, read, strict=True))
        return found

    async def _read(self, message_id: MessageId) -> dict[DeliveryKey, Delivery]:
        try:
            version = await self._objects.find(message_id)
            return {} if version is None else spelled.deliveries_of(message_id, version.head.deliveries)
        except StoreCorruptError as error:
            _log.error("left for the operator: %s", error)
            return {}

    # --- figures, without a request

    @property
    def ready(self) -> int:
        """Deliveries of this relay that have not been tried yet."""
        return sum(zone.counts.ready for zone in self._mine.index.values())

    def counts(self) -> dict[QueueName, QueueCounts]:
        found = dict(self._mine.index.counts())
        for lease in self._nodes.company():
            for name, counts in lease.counts.items():
                found.setdefault(parse_queue(name), QueueCounts()).add(QueueCounts(*counts))
        return {queue: each for queue, each in found.items() if queue.is_mail}

    async def queues(self) -> set[QueueName]:
        self._keeper.check_usable()
        return self.known_queues()

    def known_queues(self) -> set[QueueName]:
        others = {parse_queue(name) for lease in self._nodes.company() for name in lease.counts}
        return self._mine.index.queues() | others

    async def oldest(self, queue: QueueName, *, now: float) -> float | None:
        self._keeper.check_usable()
        mine = self._mine.index[queue].oldest(now)
        others = [lease.oldest[queue.text] for lease in self._nodes.company() if queue.text in lease.oldest]
        return min((when for when in (mine, *others) if when is not None and when <= now), default=None)

    def lease(self, offers: int, now: float) -> LeaseRecord:
        """The record that this relay writes into its lease."""
        index = self._mine.index
        named = {name: counts for name, counts in index.counts() if counts.total}
        oldest = {name: index[name].oldest(now) for name in named}
        return LeaseRecord(
            offers=offers,
            last_id=self._mine.last_id or "",
            counts={name.text: (c.ready, c.deferred, c.held) for name, c in named.items()},
            oldest={name.text: when for name, when in oldest.items() if when is not None},
        )

    def heard_ids(self) -> None:
        """Takes note of other relays' ids: ids never go backwards, in any relay."""
        for name in self._nodes.last_ids:
            if is_message_id(name):
                self._mine.note_id(MessageId(name))
        self._nodes.last_ids.clear()


def _message(message_id: MessageId, version: Version | None) -> Message:
    if version is None or not version.head.deliveries:
        raise MessageNotFoundError(f"no message {message_id}")
    if version.head.message is None:
        raise StoreCorruptError(f"message {message_id}: its metadata is missing")
    return version.head.message
