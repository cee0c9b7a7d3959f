"""Walks through the bucket, and takes over mail that belongs to this relay or to no living one.

A walk lists `queue/` page by page and reads the heads that it does not know, `READS_AT_ONCE` at a time.
Memory grows with this relay's mail and not with the bucket: of other relays' mail only the owners are
remembered, so that a deferral there causes no read here. A message whose session has ended is taken over by
a conditional write. When several relays see the same session end, each takes its share first, by message
id, and the rest a while later. An intent is carried out before a delivery that it concerns is handed out;
when two relays take over such messages, one of them may repeat an attempt that was already decided.

A walk also removes what crashes leave: bodies without a message and uploads without an end. A message that
cannot be read is logged and left for the operator.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import zlib
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

import msgspec

from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.store.contract import News, StoreCorruptError
from zonerelay.store.s3.client import ConflictError, MissingError
from zonerelay.store.s3.nodes import LeaseLostError, Nodes
from zonerelay.store.s3.objects import Objects, Version
from zonerelay.store.s3.own_messages import MessageJob, OwnMessages
from zonerelay.store.s3.uploads import Refusals
from zonerelay.store.s3.writer import ObjectWriter

READS_AT_ONCE = 32
GROUP = 256
"""Messages whose heads are looked at together: of what was decided with one of them the others are part."""
MAX_OVER = 10_000
"""Sessions that are over and remembered as such."""
KNOWN_OTHERS = 100_000
"""Messages of other relays whose owners are remembered (some 20 MB); further ones every walk reads again."""

T = TypeVar("T")

_log = logging.getLogger("zonerelay.store")


class Walks:
    """One per store."""

    def __init__(
        self,
        objects: Objects,
        mine: OwnMessages,
        nodes: Nodes,
        writer: ObjectWriter,
        refusals: Refusals,
        *,
        has_room: Callable[[], bool],
        on_news: News,
    ) -> None:
        self._objects = objects
        self._mine = mine
        self._nodes = nodes
        self._writer = writer
        self._refusals = refusals
        self._has_room = has_room
        self._on_news = on_news
        self._over: set[str] = set()
        """Sessions that were looked for and are over."""
        self._others: dict[MessageId, str] = {}
        """Owners of messages that are other relays', as the last walk has found them."""
        self._at_once = asyncio.Semaphore(READS_AT_ONCE)

    async def walk(self, *, shares: bool = False) -> None:
        """Walks through the bucket. `shares` leaves other relays their part of dead relays' mail. Raises
        StoreError.
        """
        present: dict[MessageId, str] = {}
        async for page in self._objects.bucket.pages(self._objects.keys.queue):
            names = [self._objects.keys.message_of(listed.key) for listed in page]
            ids = [name for name in names if name is not None]
            live = self._nodes.live()
            unknown = [
                each for each in ids if each not in self._mine.ids and self._others.get(each) not in live
            ]
            for start in range(0, len(unknown), GROUP):
                await self.look_at(unknown[start : start + GROUP], shares=shares)
            present |= {each: self._others[each] for each in ids if each in self._others}
        self._others = present  # the rest is gone
        await self._remove_leftovers()

    async def look_at(self, ids: Sequence[MessageId], *, shares: bool = False) -> None:
        """Takes those that belong to this relay, or to no living one. Raises StoreError."""
        versions = await self._read_all(ids)
        decided = [each for each, version in versions.items() if version.head.intent is not None]
        for message_id in decided:
            # What was decided with it concerns messages with higher ids: they are seen as it leaves them.
            await self._take([(message_id, versions[message_id])], shares=shares)
            if message_id in self._mine.ids:
                await self._writer.submit(message_id, MessageJob(()))
        if decided:
            versions = await self._read_all([each for each in versions if each not in decided])
        await self._take(list(versions.items()), shares=shares)

    async def _read_all(self, ids: Sequence[MessageId]) -> dict[MessageId, Version]:
        found = await asyncio.gather(*(self._bounded(self._read(each)) for each in ids))
        versions = {each: version for each, version in zip(ids, found, strict=True) if version is not None}
        if not self._nodes.alone:
            for owner in {version.head.owner for version in versions.values()} - {""}:
                await self._is_over(owner)
        return versions

    async def _take(self, found: Sequence[tuple[MessageId, Version]], *, shares: bool) -> None:
        taken = [
            self._bounded(self._decide(message_id, version, shares=shares))
            for message_id, version in found
            if message_id not in self._mine.ids
        ]
        queues: set[QueueName] = set()
        for some in await asyncio.gather(*taken):
            queues |= some
        for queue in queues:
            self._on_news(queue)

    async def _bounded(self, work: Coroutine[object, object, T]) -> T:
        """Bounds the reads: a message that is taken over is whole in memory for a moment."""
        async with self._at_once:
            return await work

    async def _read(self, message_id: MessageId) -> Version | None:
        try:
            return await self._objects.read_head(message_id)
        except MissingError:
            return None
        except StoreCorruptError as error:
            _log.error("left for the operator: %s", error)
            return None

    async def _decide(self, message_id: MessageId, version: Version, *, shares: bool) -> set[QueueName]:
        """Takes a message over, or leaves it. Returns the zones of its deliveries when it is this relay's
        now.
        """
        head = version.head
        self._mine.note_id(message_id)
        if head.is_over:
            if not self._refusals.stands(head):
                await self._objects.bucket.delete(self._objects.keys.message(message_id))
            return set()
        if await self._refusals.came_late(message_id, version):
            return set()
        if self._nodes.alone or head.owner == self._nodes.session:
            return self._take_in(message_id, version)
        if head.owner in self._nodes.live():
            if len(self._others) < KNOWN_OTHERS or message_id in self._others:
                self._others[message_id] = sys.intern(head.owner)
            return set()
        if not self._nodes.holds_lease:
            # Another relay may have this relay's number now: `live` does not have its session.
            raise LeaseLostError("the lease of this relay has run out: mail of other relays is left alone")
        if (not head.owner and not self._has_room()) or (shares and not self._is_my_share(message_id)):
            return set()
        return await self._adopt(message_id, version)

    def _is_my_share(self, message_id: MessageId) -> bool:
        names = sorted([*(lease.session for lease in self._nodes.company()), self._nodes.session])
        return names[zlib.crc32(message_id.encode("ascii")) % len(names)] == self._nodes.session

    async def _adopt(self, message_id: MessageId, version: Version) -> set[QueueName]:
        session, epoch = self._nodes.session, self._mine.epoch
        try:
            if version.tail is None:
                etag = version.etag
                version = await self._objects.read_whole(message_id)
                if version.etag != etag:
                    return set()
            head = msgspec.structs.replace(version.head, owner=session, rev=version.head.rev + 1)
            taken = await self._objects.replace(message_id, head, version.tail or b"", etag=version.etag)
        except (ConflictError, MissingError):
            return set()  # others were faster
        return self._take_in(message_id, taken) if epoch == self._mine.epoch else set()

    def _take_in(self, message_id: MessageId, version: Version) -> set[QueueName]:
        try:
            zones = self._mine.take_in(message_id, version)
        except StoreCorruptError as error:
            _log.error("left for the operator: %s", error)
            return set()
        self._others.pop(message_id, None)
        if version.head.intent is not None:
            self._writer.unfinished.add(message_id)
        return zones

    # --- what crashes leave

    async def _remove_leftovers(self) -> None:
        """Removes bodies without a message and uploads without an end, of sessions that are over."""
        keys, bucket = self._objects.keys, self._objects.bucket
        async for page in bucket.pages(keys.bodies):
            for listed in page:
                upload = keys.upload_of(listed.key)
                if upload is not None and upload[0] not in self._mine.ids and await self._is_over(upload[1]):
                    await self._remove_body(listed.key, upload[0])
        for key, upload_id in await bucket.uploads(keys.bodies):
            upload = keys.upload_of(key)
            if upload is not None and await self._is_over(upload[1]):
                await bucket.abort_upload(key, upload_id)

    async def _is_over(self, session: str) -> bool:
        """Looks at the leases again: a session that has just begun has its lease before its first body."""
        if session in self._nodes.live():
            return False
        if session not in self._over:
            await self._nodes.look()
            if session in self._nodes.live() or not self._nodes.holds_lease:
                return False
            if len(self._over) >= MAX_OVER:
                self._over.clear()
            self._over.add(session)
        return True

    async def _remove_body(self, key: str, message_id: MessageId) -> None:
        try:
            found = await self._objects.find(message_id)
        except StoreCorruptError:
            return
        if found is None or found.head.body != key:
            await self._objects.bucket.delete(key)
