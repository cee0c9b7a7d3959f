"""Messages as objects: written whole, read by head or by body.

Where the service has conditions, a write succeeds only if the object is still the one with the given
`etag`. A caller whose write fails with ConflictError reads the object again and decides anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from zonerelay.model.message_id import MessageId
from zonerelay.store.contract import StoreCorruptError
from zonerelay.store.s3 import records as spelled
from zonerelay.store.s3.client import Bucket, MissingError
from zonerelay.store.s3.records import Head, Keys


@dataclass(frozen=True, slots=True)
class Abilities:
    """What conditions the service has: none, on writing, or on writing and removing."""

    conditional_put: bool
    conditional_delete: bool


@dataclass(frozen=True, slots=True)
class Version:
    """A message as it was read or written. `tail` is the body behind the head, `None` when it was not asked
    for; `starts` is where it begins and `size` how long head and body are.
    """

    head: Head
    etag: str
    starts: int
    size: int
    tail: bytes | None


class Objects:
    """One per store."""

    def __init__(self, bucket: Bucket, keys: Keys, abilities: Abilities) -> None:
        self.bucket = bucket
        self.keys = keys
        self.abilities = abilities

    async def create(self, message_id: MessageId, head: Head, tail: bytes) -> Version:
        """Raises ConflictError when there is one of that id already."""
        line = spelled.encode_head(head)
        key = self.keys.message(message_id)
        etag = await self.bucket.put(key, line + tail, new=self.abilities.conditional_put)
        return Version(head, etag, len(line), len(line) + len(tail), tail)

    async def replace(self, message_id: MessageId, head: Head, tail: bytes, *, etag: str) -> Version:
        """Raises ConflictError, or MissingError."""
        line = spelled.encode_head(head)
        match = etag if self.abilities.conditional_put else ""
        written = await self.bucket.put(self.keys.message(message_id), line + tail, match=match)
        return Version(head, written, len(line), len(line) + len(tail), tail)

    async def remove(self, message_id: MessageId, head: Head, *, etag: str) -> None:
        """Not the body that it names. Raises ConflictError, or MissingError."""
        key = self.keys.message(message_id)
        if self.abilities.conditional_delete:
            await self.bucket.delete(key, match=etag)
        else:
            if self.abilities.conditional_put:
                over = Head(format=spelled.FORMAT, owner=head.owner, rev=head.rev + 1)
                await self.bucket.put(key, spelled.encode_head(over), match=etag)
            await self.bucket.delete(key)

    async def read_head(self, message_id: MessageId) -> Version:
        """Raises MissingError or StoreCorruptError."""
        key = self.keys.message(message_id)
        got = await self.bucket.get(key, length=spelled.HEAD_GUESS)
        end = got.data.find(b"\n") + 1
        if not end and got.size > len(got.data):
            got = await self.bucket.get(key)
            end = got.data.find(b"\n") + 1
        if not end:
            raise StoreCorruptError(f"{key} has no head")
        head = spelled.decode_head(key, got.data[:end])
        tail = got.data[end:] if len(got.data) == got.size else None
        return Version(head, got.etag, end, got.size, tail)

    async def read_whole(self, message_id: MessageId) -> Version:
        """With the body behind the head. Raises MissingError or StoreCorruptError."""
        key = self.keys.message(message_id)
        got = await self.bucket.get(key)
        end = got.data.find(b"\n") + 1
        if not end:
            raise StoreCorruptError(f"{key} has no head")
        return Version(spelled.decode_head(key, got.data[:end]), got.etag, end, got.size, got.data[end:])

    async def find(self, message_id: MessageId) -> Version | None:
        """Its head, `None` when there is no such message."""
        try:
            found = await self.read_head(message_id)
        except MissingError:
            return None
        return None if found.head.is_over else found
