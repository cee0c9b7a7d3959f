"""Reading messages and bodies from a bucket. Changes nothing.

What is claimed here and known by heart asks nobody, as long as the lease lasts; afterwards somebody else
may be sending it, so reading it fails and no attempt is begun, nor one continued. A large body is read in
windows, so that a slow receiver keeps no answer of the service open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.common.body_chunks import split
from zonerelay.store.contract import CHUNK_SIZE, MessageNotFoundError, StoreCorruptError, StoreError
from zonerelay.store.s3.client import MissingError, UnsureError
from zonerelay.store.s3.nodes import Nodes
from zonerelay.store.s3.objects import Objects, Version
from zonerelay.store.s3.states import OwnMessages

WINDOW = 16 * CHUNK_SIZE
PATIENCE = 4
"""How often a window is asked for in the middle of a body."""
PAUSE = 0.5


class S3Reader:
    """One per store."""

    def __init__(
        self, objects: Objects, mine: OwnMessages, nodes: Nodes, check_open: Callable[[], None]
    ) -> None:
        self._objects = objects
        self._mine = mine
        self._nodes = nodes
        self._check_open = check_open

    async def read_message(self, message_id: MessageId) -> Message:
        self._check(message_id)
        stored = self._mine.get(message_id)
        if stored is not None and stored.etag and stored.message is not None and stored.deliveries:
            return stored.message
        version = await self._objects.find(message_id)
        self._check(message_id)
        return _message(message_id, version)

    async def read_body(self, message_id: MessageId) -> AsyncIterator[bytes]:
        self._check(message_id)
        stored = self._mine.get(message_id)
        if stored is not None and stored.etag and stored.message is not None and stored.deliveries:
            known = self._mine.bodies.get(message_id, stored.message.chunks)
            if known is not None:
                for chunk in known:
                    self._check(message_id)
                    yield chunk
                return
        version = await self._objects.find(message_id)
        message = _message(message_id, version)
        assert version is not None
        if version.head.body:
            async for chunk in self._windows(message, version.head.body):
                yield chunk
            return
        for chunk in await self._behind_head(message, version):
            self._check(message_id)
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
                self._check(message.id)
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

    def _check(self, message_id: MessageId) -> None:
        """Another relay may be sending what we had claimed: nothing more of it may leave here."""
        self._check_open()
        claims = self._mine.claims
        if claims.is_lost(message_id) or (not self._nodes.holds_lease and claims.is_handed_out(message_id)):
            raise StoreError(f"message {message_id}: the lease on it was lost")


def _message(message_id: MessageId, version: Version | None) -> Message:
    if version is None or not version.head.deliveries:
        raise MessageNotFoundError(f"no message {message_id}")
    if version.head.message is None:
        raise StoreCorruptError(f"message {message_id}: its metadata is missing")
    return version.head.message
