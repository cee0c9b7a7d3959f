"""Writes messages as objects, whole, and reads them by head or whole.

Where the service has conditions, a write succeeds only if the object is still the one with the given
`etag`. A caller whose write fails with ConflictError reads the object again and decides anew.

A service that does not know a condition may ignore it. So `probe` counts a condition as known only when the
service refuses a write or a removal that the condition does not allow, and the object stays what it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from zonerelay.model.message_id import MessageId
from zonerelay.store.contract import StoreCorruptError, StoreOpenError
from zonerelay.store.s3 import records as spelled
from zonerelay.store.s3.client import Bucket, ConflictError, Fetched, MissingError, RefusedError, UnsureError
from zonerelay.store.s3.records import Head, Keys

_WRONG = '"00000000000000000000000000000000"'


@dataclass(frozen=True, slots=True)
class Abilities:
    """What conditions the service has: none, on writing, or on writing and removing."""

    conditional_put: bool
    conditional_delete: bool


@dataclass(frozen=True, slots=True)
class Version:
    """A message as it was read or written. `tail` is the body behind the head, `None` when it was not asked
    for.
    """

    head: Head
    etag: str
    tail: bytes | None


class Objects:
    """One per store."""

    def __init__(self, bucket: Bucket, keys: Keys, abilities: Abilities) -> None:
        self.bucket = bucket
        self.keys = keys
        self.abilities = abilities

    async def create(self, message_id: MessageId, head: Head, tail: bytes) -> Version:
        """Writes a new message. Raises ConflictError when one of that id exists."""
        data = spelled.encode_head(head) + tail
        new = self.abilities.conditional_put
        return Version(head, await self.bucket.put(self.keys.message(message_id), data, new=new), tail)

    async def replace(self, message_id: MessageId, head: Head, tail: bytes, *, etag: str) -> Version:
        """Writes over the version with `etag`. Raises ConflictError or MissingError."""
        data = spelled.encode_head(head) + tail
        match = etag if self.abilities.conditional_put else ""
        return Version(head, await self.bucket.put(self.keys.message(message_id), data, match=match), tail)

    async def remove(self, message_id: MessageId, head: Head, *, etag: str) -> None:
        """Removes the message, and not the body that it names. Raises ConflictError or MissingError."""
        key = self.keys.message(message_id)
        if self.abilities.conditional_delete:
            await self.bucket.delete(key, match=etag)
        else:
            if self.abilities.conditional_put:
                over = Head(format=spelled.FORMAT, owner=head.owner, rev=head.rev + 1)
                await self.bucket.put(key, spelled.encode_head(over), match=etag)
            await self.bucket.delete(key)

    async def read_head(self, message_id: MessageId) -> Version:
        """Reads the head, with the body when it is small. Raises MissingError or StoreCorruptError."""
        key = self.keys.message(message_id)
        got = await self.bucket.get(key, length=spelled.HEAD_GUESS)
        if b"\n" not in got.data and got.size > len(got.data):
            got = await self.bucket.get(key)
        return _version(key, got)

    async def read_whole(self, message_id: MessageId) -> Version:
        """Reads the head and the body behind it. Raises MissingError or StoreCorruptError."""
        key = self.keys.message(message_id)
        return _version(key, await self.bucket.get(key))

    async def find(self, message_id: MessageId) -> Version | None:
        """Reads the head; `None` when no such message exists."""
        try:
            found = await self.read_head(message_id)
        except MissingError:
            return None
        return None if found.head.is_over else found


def _version(key: str, got: Fetched) -> Version:
    line, end, tail = got.data.partition(b"\n")
    if not end:
        raise StoreCorruptError(f"{key} has no head")
    return Version(spelled.decode_head(key, line), got.etag, tail if len(got.data) == got.size else None)


async def check_format(bucket: Bucket, keys: Keys) -> bool:
    """Whether the queue says its version. Raises StoreOpenError when this version cannot work with it."""
    try:
        said = (await bucket.get(keys.format)).data.decode("ascii", "replace")
    except MissingError:
        return False
    oldest = said.split()[-1:]
    if not (oldest and oldest[0].isdecimal() and int(oldest[0]) <= spelled.FORMAT):
        raise StoreOpenError(
            f"[s3] the object {keys.format} says {said[:20]!r}: that is not a queue that this version"
            f" understands, which knows {spelled.FORMAT}; a newer zonerelay has been here: start that one"
        )
    return True


async def probe(bucket: Bucket, keys: Keys, name: str) -> Abilities:
    """`name` is unique to this relay. Raises StoreError when the bucket cannot even be written and read."""
    key = keys.probes + name
    await bucket.put(key, b"1")
    puts = await _is_refused(bucket, key, new=True) and await _is_refused(bucket, key, match=_WRONG)
    is_kept, deletes = await _try_delete(bucket, key) if puts else (False, False)
    if not is_kept:
        await bucket.put(key, b"1")
    if await _read(bucket, key) != b"1":
        raise StoreOpenError("[s3] the service does not give back what was written")
    await bucket.delete(key)
    return Abilities(conditional_put=puts, conditional_delete=deletes)


async def _is_refused(bucket: Bucket, key: str, *, match: str = "", new: bool = False) -> bool:
    """Whether an object is left alone that a condition does not fit."""
    try:
        await bucket.put(key, b"2", match=match, new=new)
    except ConflictError:
        return True
    except (RefusedError, UnsureError):
        return False  # it says that it does not know the condition (400, 501)
    return False


async def _try_delete(bucket: Bucket, key: str) -> tuple[bool, bool]:
    """Whether the object is still there, and whether a refusal kept it."""
    try:
        await bucket.delete(key, match=_WRONG)
    except ConflictError:
        return True, await _read(bucket, key) == b"1"
    except (RefusedError, UnsureError):
        return True, False
    except MissingError:
        return False, False
    return False, False


async def _read(bucket: Bucket, key: str) -> bytes:
    try:
        return (await bucket.get(key)).data
    except MissingError:
        return b""
