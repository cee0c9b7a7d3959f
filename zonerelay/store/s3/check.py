"""Checks an S3 spool, beside running relays: heads, their deliveries, and bodies by their sizes.

A listing names the messages; of each the head is read. What looks wrong is looked at again when the walk is
over, and after a pause: relays change the queue meanwhile, and some services show a change late.

Memory: a page of heads, and eight octets for each message that looks wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from zonerelay.config.settings import S3Settings
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.check import Contents, Examination, Fault, Tell
from zonerelay.store.common import records
from zonerelay.store.common.repairs import Report
from zonerelay.store.contract import StoreCorruptError, StoreOpenError
from zonerelay.store.s3 import records as spelled
from zonerelay.store.s3.client import Bucket, Fetched, MissingError
from zonerelay.store.s3.objects import Abilities, Objects
from zonerelay.store.s3.records import FORMAT, HEAD_GUESS, Head, Keys
from zonerelay.store.surroundings import secret_of

SETTLING = 1.0
"""Seconds until what looks wrong is looked at again."""
AT_ONCE = 256


class _Format(msgspec.Struct):
    format: int = 0


@contextlib.asynccontextmanager
async def looking(settings: S3Settings, environment: Mapping[str, str]) -> AsyncIterator[Objects]:
    """The bucket, without a lease in it. Raises StoreError."""
    bucket = Bucket(settings, secret_of("s3.secret_key", settings.secret_key, environment))
    try:
        await bucket.open()
        yield Objects(
            bucket, Keys(settings.prefix), Abilities(conditional_put=False, conditional_delete=False)
        )
    finally:
        await bucket.close()


async def check(settings: S3Settings, examination: Examination) -> Contents:
    """Raises StoreError when the service cannot be asked."""
    async with looking(settings, examination.environment) as objects:
        walk = S3Walk(objects, examination.findings.add, examination.tell)
        return await walk.walk(live=await sessions(objects))


async def sessions(objects: Objects) -> set[str]:
    """Those that own mail. Raises StoreError."""
    found = set()
    async for page in objects.bucket.pages(objects.keys.nodes):
        for listed in page:
            with contextlib.suppress(MissingError):
                lease = spelled.decode_lease((await objects.bucket.get(listed.key)).data)
                found |= {lease.session} if lease.state != "dead" else set()
    return found


@dataclass(slots=True)
class S3Message:
    """A message as it was read. `why` says what its record or its body lacks, "" when nothing."""

    id: MessageId
    line: bytes = b""
    etag: str = ""
    octets: int = 0
    head: Head | None = None
    message: Message | None = None
    why: str = ""
    deliveries: list[Delivery] = field(default_factory=list)
    unreadable: list[spelled.DeliveryRow] = field(default_factory=list)
    faults: list[tuple[Fault, str, str]] = field(default_factory=list)

    def lack(self, fault: Fault, where: str, what: str) -> None:
        self.why = self.why or what
        self.faults.append((fault, where, what))

    @property
    def is_over(self) -> bool:
        """What a removal has left, or a refusal."""
        return self.head is not None and self.head.is_over


async def see(objects: Objects, message_id: MessageId) -> S3Message | None:
    """`None` when there is no such object. Raises StoreError."""
    key = objects.keys.message(message_id)
    got = await _read(objects.bucket, key)
    if got is None:
        return None
    line, end, _ = got.data.partition(b"\n")
    seen = S3Message(message_id, line, got.etag, len(got.data))
    if not end:
        seen.lack(Fault.BAD_RECORD, key, "it has no head")
        return seen
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        if (version := msgspec.json.decode(line, type=_Format).format) > FORMAT:
            raise StoreOpenError(
                f"{key} has format {version}: a newer zonerelay has been here; take that one"
            )
    try:
        head = seen.head = spelled.decode_head(key, line)
    except StoreCorruptError as error:
        seen.lack(Fault.BAD_RECORD, key, str(error))
        return seen
    if seen.is_over:
        return seen
    for row in head.deliveries:
        try:
            delivery_key = spelled.key_of(message_id, row)
            seen.deliveries.append(records.decode_record(delivery_key, bytes(row.record)))
        except (StoreCorruptError, ValueError) as error:
            seen.unreadable.append(row)
            seen.faults.append((Fault.BAD_RECORD, f"{key} {row.zone} …", str(error)))
    if head.message is None or head.message.id != message_id:
        seen.lack(Fault.BAD_RECORD, key, "its metadata is missing, or another message's")
        return seen
    seen.message = head.message
    await _check_body(objects.bucket, seen, head, got.size - len(line) - 1)
    return seen


async def _read(bucket: Bucket, key: str) -> Fetched | None:
    """The head at least."""
    try:
        got = await bucket.get(key, length=HEAD_GUESS)
        return got if b"\n" in got.data or got.size == len(got.data) else await bucket.get(key)
    except MissingError:
        pass
    try:
        return await bucket.get(key)  # an object without an octet has no part of it
    except MissingError:
        return None


async def _check_body(bucket: Bucket, seen: S3Message, head: Head, behind: int) -> None:
    assert seen.message is not None
    wanted = seen.message.size
    if not head.body:
        if behind != wanted:
            seen.lack(Fault.WRONG_SIZE, f"queue/{seen.id}", f"{behind:,} octets of its body, not {wanted:,}")
        return
    try:
        size = (await bucket.get(head.body, length=1)).size
    except MissingError:
        seen.lack(Fault.CHUNK_MISSING, head.body, "its body is missing")
        return
    if size != wanted:
        seen.lack(Fault.WRONG_SIZE, head.body, f"it has {size:,} octets, not {wanted:,}")


class S3Walk:
    """One walk through the bucket. `bodies` are those without a message, by their keys."""

    def __init__(self, objects: Objects, report: Report, tell: Tell) -> None:
        self.bodies: dict[str, MessageId] = {}
        self._objects = objects
        self._report = report
        self._tell = tell
        self._promised: set[str] = set()
        """Bodies of messages that an intent is to make."""
        self._messages = self._deliveries = self._octets = 0

    async def walk(self, *, live: set[str]) -> Contents:
        """`live` are sessions whose uploads go on. Raises StoreError."""
        keys, bucket = self._objects.keys, self._objects.bucket
        suspects: array[int] = array("Q")
        async for page in bucket.pages(keys.queue):
            ids = []
            for listed in page:
                name = keys.message_of(listed.key)
                if name is None:
                    self._report(Fault.STRAY_FILE, listed.key, "no message has such a name", "")
                else:
                    ids.append(name)
            for start in range(0, len(ids), AT_ONCE):
                await self._look_at(ids[start : start + AT_ONCE], suspects)
        bodies = await self._lonely_bodies(live)
        if suspects or bodies:
            await asyncio.sleep(SETTLING)
        for number in suspects:
            again = await see(self._objects, MessageId(f"{number:016x}"))
            for fault, where, what in again.faults if again is not None else ():
                self._report(fault, where, what, again.id if again is not None else "")
        for key, message_id in bodies.items():
            if await self._is_lonely(key, message_id):
                self.bodies[key] = message_id
                self._report(Fault.CHUNKS_ALONE, key, "a body without a message", message_id)
        return Contents(self._messages, self._deliveries, self._octets)

    async def _look_at(self, ids: Sequence[MessageId], suspects: array[int]) -> None:
        for seen in await asyncio.gather(*(see(self._objects, each) for each in ids)):
            if seen is None:
                continue
            self._octets += seen.octets
            self._messages += not seen.is_over
            self._deliveries += len(seen.deliveries) + len(seen.unreadable)
            if seen.head is not None and seen.head.intent is not None:
                self._promised |= {report.body for report in seen.head.intent.reports}
            if seen.faults:
                suspects.append(int(seen.id, 16))
        self._tell(self._octets, 0)

    async def _lonely_bodies(self, live: set[str]) -> dict[str, MessageId]:
        found: dict[str, MessageId] = {}
        async for page in self._objects.bucket.pages(self._objects.keys.bodies):
            for listed in page:
                upload = self._objects.keys.upload_of(listed.key)
                if upload is None:
                    self._report(Fault.STRAY_FILE, listed.key, "no body has such a name", "")
                elif upload[1] not in live and listed.key not in self._promised:
                    found[listed.key] = upload[0]
        keys = list(found)
        for start in range(0, len(keys), AT_ONCE):
            some = keys[start : start + AT_ONCE]
            asked = await asyncio.gather(*(self._is_lonely(key, found[key]) for key in some))
            for key, is_lonely in zip(some, asked, strict=True):
                if not is_lonely:
                    del found[key]
        return found

    async def _is_lonely(self, key: str, message_id: MessageId) -> bool:
        """No head names the body; one that cannot be read may be its own."""
        seen = await see(self._objects, message_id)
        if seen is not None and (seen.head is None or seen.head.body == key):
            return False
        with contextlib.suppress(MissingError):
            await self._objects.bucket.get(key, length=1)
            return True
        return False
