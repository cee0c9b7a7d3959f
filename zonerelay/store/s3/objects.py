"""Writes messages as objects, whole, and reads them by head or whole.

Where the service has conditions, a write succeeds only if the object is still the one with the given
`etag`. A caller whose write fails with ConflictError reads the object again and decides anew.

A service that does not know a condition may ignore it, and one that knows it may get it wrong: Ceph's RGW
18.2 refuses writes whose If-Match is right, and such a message could never be settled. So `probe` counts a
condition as known only when the service carries out what it allows and refuses what it does not.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from zonerelay.model.message_id import MessageId
from zonerelay.store.contract import StoreCorruptError, StoreError, StoreOpenError
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


async def probe(bucket: Bucket, keys: Keys, name: str, *, shared: bool) -> Abilities:
    """Tries what the queue needs. `name` is unique to this relay. Raises StoreError for a bucket that cannot
    be written, read, listed and emptied, and StoreOpenError when the queue is `shared` and a condition does
    not work: a write that it allows must succeed, and one that it does not allow must be refused.
    """
    key = keys.probes + name
    await bucket.put(key, b"1")
    if await _read(bucket, key) != b"1":
        raise StoreOpenError("[s3] the service does not give back what was written")
    await bucket.delete(key)
    await bucket.abort_upload(key, await bucket.start_upload(key))
    await bucket.uploads(key)
    if not shared:
        # One relay alone decides what is written; a condition could only stand in its way.
        return Abilities(conditional_put=False, conditional_delete=False)
    try:
        etag = await _try_writes(bucket, key)
        deletes = await _try_delete(bucket, key, etag)
        await bucket.delete(key)
        await _refused(bucket, key, "If-Match where no object is", match=etag)
    finally:
        with contextlib.suppress(StoreError):
            await bucket.delete(key)
    return Abilities(conditional_put=True, conditional_delete=deletes)


async def _try_writes(bucket: Bucket, key: str) -> str:
    """Returns the ETag of what is written at last."""
    first = await _allowed(bucket, key, "If-None-Match: * where no object is", b"1", new=True)
    await _refused(bucket, key, "If-None-Match: * where an object is", new=True)
    await _refused(bucket, key, "an If-Match that is wrong", match=_WRONG)
    second = await _allowed(bucket, key, "an If-Match that is right", b"2", match=first)
    await _refused(bucket, key, "the If-Match of an earlier version", match=first)
    got = await bucket.get(key)
    third = await _allowed(bucket, key, "an If-Match that is right", b"3", match=got.etag)
    if await _read(bucket, key) != b"3":
        raise StoreOpenError("[s3] the service does not give back what was written")
    async for page in bucket.pages(key):
        # A listing may lag behind, but must name an object as the answers do.
        if not {each.etag for each in page if each.key == key} <= {first, second, third}:
            raise _unfit("lists objects with other ETags than it answers")
    return third


async def _allowed(
    bucket: Bucket, key: str, what: str, data: bytes, *, match: str = "", new: bool = False
) -> str:
    try:
        return await bucket.put(key, data, match=match, new=new)
    except (ConflictError, MissingError, RefusedError, UnsureError) as error:
        raise _unfit(f"refuses a PUT with {what} ({error})") from error


async def _refused(bucket: Bucket, key: str, what: str, *, match: str = "", new: bool = False) -> None:
    try:
        await bucket.put(key, b"?", match=match, new=new)
    except (ConflictError, MissingError):
        return
    except (RefusedError, UnsureError) as error:
        raise _unfit(f"does not know a PUT with {what} ({error})") from error
    raise _unfit(f"carries out a PUT with {what}")


def _unfit(what: str) -> StoreOpenError:
    return StoreOpenError(
        f"[s3] the service {what}: its conditional writes cannot be relied on, so relays cannot share a queue"
        " on it; with shared = false one relay alone can use it"
    )


async def _try_delete(bucket: Bucket, key: str, etag: str) -> bool:
    """Whether the service removes an object whose ETag is right, and no other. It may be gone afterwards."""
    try:
        await bucket.delete(key, match=_WRONG)
    except ConflictError:
        pass
    except (RefusedError, UnsureError, MissingError):
        return False
    if await _read(bucket, key) != b"3":
        return False
    try:
        await bucket.delete(key, match=etag)
    except (ConflictError, RefusedError, UnsureError, MissingError):
        return False
    return not await _read(bucket, key)


async def _read(bucket: Bucket, key: str) -> bytes:
    try:
        return (await bucket.get(key)).data
    except MissingError:
        return b""
