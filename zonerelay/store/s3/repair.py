"""Repairs an S3 spool whose relays are stopped: what the check finds is put right, object by object.

A message whose head or body is not whole leaves the queue, and so does a body without a message. They are in
the salvage and the head is in the file of old records before that, durably; so a repair that is killed may
be run again. Whether a relay runs shows in its lease: one that is renewed within its time ends the repair.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from zonerelay.config.settings import S3Settings
from zonerelay.model.message_id import MessageId
from zonerelay.store.check import Repaired, Salvage, Tell
from zonerelay.store.common.repairs import Remains, SharedRepair, Troubled, recipient_in
from zonerelay.store.contract import StoreError
from zonerelay.store.s3 import records as spelled
from zonerelay.store.s3.check import S3Message, S3Walk, looking, see
from zonerelay.store.s3.client import WINDOW, MissingError
from zonerelay.store.s3.objects import Objects


async def repair(
    settings: S3Settings,
    salvage: Salvage,
    tell: Tell,
    *,
    kept: Path,
    carry_out: bool,
    environment: Mapping[str, str],
) -> Repaired:
    """`kept` is the file of old records. Raises StoreError in words, or OSError."""
    mending = SharedRepair(salvage, kept, carry_out=carry_out)
    try:
        async with looking(settings, environment) as objects:
            await _refuse_living(objects, settings.lease)
            return await _Repair(objects, mending, tell).run()
    finally:
        mending.close()


async def _refuse_living(objects: Objects, lease: float) -> None:
    """Raises StoreError when a lease is renewed. Waits for as long as one lasts, where there are any."""
    before = await _leases(objects)
    if before:
        await asyncio.sleep(lease)
        after = await _leases(objects)
        if renewed := [key for key, etag in after.items() if before.get(key) != etag]:
            raise StoreError(
                f"relays use the queue ({', '.join(renewed)} is renewed): stop them on every machine."
                " Nothing was changed"
            )


async def _leases(objects: Objects) -> dict[str, str]:
    """Versions of those that are live."""
    found: dict[str, str] = {}
    async for page in objects.bucket.pages(objects.keys.nodes):
        for listed in page:
            got = await objects.bucket.get(listed.key)
            if spelled.decode_lease(got.data).state == "live":
                found[listed.key] = got.etag
    return found


class _Repair:
    def __init__(self, objects: Objects, mending: SharedRepair, tell: Tell) -> None:
        self._objects = objects
        self._bucket = objects.bucket
        self._mending = mending
        self._tell = tell

    async def run(self) -> Repaired:
        troubled = Troubled()
        walk = S3Walk(self._objects, troubled.add, self._tell)
        contents = await walk.walk(live=set())
        for identity in troubled.ids:
            await self._mend(MessageId(identity))
        for key, message_id in walk.bodies.items():
            await self._set_aside(key, message_id)
        if self._mending.carry_out:
            left = Troubled()
            await S3Walk(self._objects, left.add, self._tell).walk(live=set())
            if left.first:
                raise StoreError(f"the repaired spool is not sound: {left.first}; repair it again")
        return self._mending.repaired(contents.deliveries)

    async def _mend(self, message_id: MessageId) -> None:
        seen = await see(self._objects, message_id)
        if seen is None or not seen.faults:
            return
        key = self._objects.keys.message(message_id)
        remains = Remains(
            message_id,
            seen.message,
            seen.why,
            tuple(seen.deliveries),
            tuple(recipient_in(row.recipient.encode("utf-8", "replace")) for row in seen.unreadable),
            pieces=lambda: self._body(seen),
            old={key: seen.line},
        )
        leaves = await self._mending.judge(remains)
        if not self._mending.carry_out:
            return
        if leaves:
            await self._bucket.delete(key)
            if seen.head is not None and seen.head.body:
                await self._bucket.delete(seen.head.body)
            return
        assert seen.head is not None
        sound = tuple(row for row in seen.head.deliveries if row not in seen.unreadable)
        head = msgspec.structs.replace(seen.head, rev=seen.head.rev + 1, deliveries=sound)
        whole = await self._objects.read_whole(message_id)
        await self._objects.replace(message_id, head, whole.tail or b"", etag=seen.etag)

    async def _set_aside(self, key: str, message_id: MessageId) -> None:
        why = "a body without a message: an upload that never ended, or its record is lost"
        await self._mending.judge(Remains(message_id, why=why, pieces=lambda: self._windows(key)))
        if self._mending.carry_out:
            await self._bucket.delete(key)

    async def _body(self, seen: S3Message) -> AsyncIterator[bytes]:
        """What is there of it."""
        if seen.head is not None and seen.head.body:
            async for piece in self._windows(seen.head.body):
                yield piece
            return
        whole = await self._bucket.get(self._objects.keys.message(seen.id))
        yield whole.data.partition(b"\n")[2] if b"\n" in whole.data else whole.data

    async def _windows(self, key: str) -> AsyncIterator[bytes]:
        at = 0
        while True:
            try:
                got = await self._bucket.get(key, at, WINDOW)
            except MissingError:
                return
            yield got.data
            at += len(got.data)
            if at >= got.size:
                return
