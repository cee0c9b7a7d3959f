"""Combines spool and outbox into one store, so that zones, rates, connections and operators' commands see one
queue.

A message's id shows which of the two holds it. New mail and bounces go to the spool. A write to the spool
never waits for the outbox's database, and a failure of that database affects the outbox alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Collection, Sequence
from typing import Unpack

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Envelope, Message
from zonerelay.model.message_id import MessageId, is_row
from zonerelay.model.queue_name import MAILBOXES, QueueKind, QueueName
from zonerelay.outbox.store import OutboxStore
from zonerelay.store.contract import (
    Change,
    ChangeOne,
    ClaimFilter,
    Finish,
    KeptKeys,
    MessageNotFoundError,
    MessageWriter,
    OwnMessage,
    Postpone,
    QueueCounts,
    Store,
    StoreCorruptError,
    Unhealthy,
    Wanted,
    everybody,
)


class JoinedStore:
    """Combines the queue store and the outbox store, and closes both. `counts` is set for the one worker that
    counts the rows.
    """

    def __init__(self, spool: Store, outbox: OutboxStore, *, counts: bool) -> None:
        self._counts_rows = counts
        self._spool = spool
        self._outbox = outbox
        # Rows that were claimed by calls that still wait for the spool.
        self._waiting: list[dict[DeliveryKey, Delivery]] = []

    @property
    def node(self) -> int:
        return self._spool.node

    def problems(self) -> Sequence[str]:
        return (*self._spool.problems(), *self._outbox.problems())

    # --- only the spool has new mail and assigns ids; the outbox's table has metrics of its own

    def unhealthy(self) -> Unhealthy | None:
        return self._spool.unhealthy()

    async def usable(self) -> bool:
        return await self._spool.usable()

    async def probe(self) -> None:
        await self._spool.probe()

    def begin(self, envelope: Envelope) -> MessageWriter:
        return self._spool.begin(envelope)

    def last_message_id(self) -> MessageId | None:
        return self._spool.last_message_id()

    def waiting(self, queue: QueueName) -> int:
        return self._spool.waiting(queue)

    def is_counted(self) -> bool:
        return self._spool.is_counted()

    async def queues(self) -> set[QueueName]:
        return await self._spool.queues()

    async def left_over(self) -> str:
        return await self._spool.left_over()

    async def kept_keys(self, cursor: str = "") -> tuple[KeptKeys, str]:
        return await self._spool.kept_keys(cursor)

    async def keep_keys(self, keys: KeptKeys) -> None:
        await self._spool.keep_keys(keys)

    # --- claims

    async def claim(
        self, queue: QueueName, limit: int, *, now: float, **only: Unpack[ClaimFilter]
    ) -> list[Delivery]:
        """Claim half of the limit from each store while both have enough. New mail is in the spool alone.
        Rows do not wait for it, because they have half of every other claim.
        """
        if queue.kind is QueueKind.MAILBOX:
            return self._outbox.claim(queue, limit, **only)
        found = self._outbox.claim(queue, max(limit // 2, 1), **only)
        if len(found) < limit:
            claim = self._spool.claim(queue, limit - len(found), now=now, **only)
            found = await self._beside(found, claim)
        if len(found) < limit:
            found += self._outbox.claim(queue, limit - len(found), **only)
        return found

    async def _beside(self, rows: list[Delivery], claim: Awaitable[list[Delivery]]) -> list[Delivery]:
        """Return the rows that were not released during the spool's claim, and the deliveries of that
        claim.
        """
        kept = {row.key: row for row in rows}
        self._waiting.append(kept)
        try:
            found = await claim
        except BaseException:
            self.release(list(kept))
            raise
        finally:
            self._waiting = [each for each in self._waiting if each is not kept]
        return [*kept.values(), *found]

    def release(self, keys: Collection[DeliveryKey]) -> None:
        theirs = [key for key in keys if is_row(key.message_id)]
        if theirs:
            for kept in self._waiting:
                for key in theirs:
                    kept.pop(key, None)
            self._outbox.release(theirs)
            keys = [key for key in keys if not is_row(key.message_id)]
        self._spool.release(keys)

    async def next_due(self, queue: QueueName) -> float | None:
        return None if queue.kind is QueueKind.MAILBOX else await self._spool.next_due(queue)

    # --- settling

    async def settle(self, changes: Sequence[Change], *, lazy: bool = False) -> None:
        theirs = [
            change
            for change in changes
            if isinstance(change, Finish | Postpone) and is_row(change.delivery.message_id)
        ]
        if not theirs:
            await self._spool.settle(changes, lazy=lazy)
            return
        ours = [
            change
            for change in changes
            if isinstance(change, OwnMessage) or not is_row(change.delivery.message_id)
        ]
        if ours:
            # The spool comes first: it is better to store a bounce twice than to lose it.
            await self._spool.settle(ours, lazy=lazy)
        self._outbox.settle(theirs)

    # --- reading

    async def read_message(self, message_id: MessageId) -> Message:
        return await (self._outbox if is_row(message_id) else self._spool).read_message(message_id)

    def read_body(self, message_id: MessageId) -> AsyncGenerator[bytes, None]:
        return (self._outbox if is_row(message_id) else self._spool).read_body(message_id)

    def check_claim(self, message_id: MessageId) -> None:
        (self._outbox if is_row(message_id) else self._spool).check_claim(message_id)

    async def deliveries_of(self, message_id: MessageId, *, own: bool = False) -> list[Delivery]:
        return await (self._outbox if is_row(message_id) else self._spool).deliveries_of(message_id, own=own)

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        found = await self._spool.read_messages([each for each in ids if not is_row(each)])
        for identity in filter(is_row, ids):
            with contextlib.suppress(MessageNotFoundError, StoreCorruptError):
                found[identity] = await self._outbox.read_message(identity)
        return found

    async def scan(
        self, queue: QueueName | None = None, *, wanted: Wanted = everybody, after: DeliveryKey | None = None
    ) -> AsyncGenerator[Delivery, None]:
        row = after if after is not None and is_row(after.message_id) else None
        if row is None and (queue is None or queue.kind is not QueueKind.MAILBOX):
            async for delivery in self._spool.scan(queue, wanted=wanted, after=after):
                yield delivery
        if self._outbox.keeper.usable:
            async for delivery in self._outbox.reader.scan(queue):
                if wanted(delivery.recipient) and (row is None or delivery.key[1:] > row[1:]):
                    yield delivery

    def counts(self) -> dict[QueueName, QueueCounts]:
        both = self._spool.counts()
        for queue, rows in (self._outbox.reader.counts if self._counts_rows else {}).items():
            both.setdefault(queue, QueueCounts()).add(rows)
        return both

    async def oldest(self, queue: QueueName, *, now: float) -> float | None:
        theirs = self._outbox.reader.oldest.get(queue)
        if queue == MAILBOXES:
            return theirs
        ours = await self._spool.oldest(queue, now=now)
        return min((each for each in (ours, theirs) if each is not None), default=None)

    # --- operators, and closing

    async def update(self, keys: Collection[DeliveryKey], change: ChangeOne) -> dict[DeliveryKey, Delivery]:
        theirs = [key for key in keys if is_row(key.message_id)]
        ours = [key for key in keys if not is_row(key.message_id)] if theirs else keys
        found = await self._spool.update(ours, change) if ours else {}
        return found | (await self._outbox.update(theirs, change) if theirs else {})

    async def close(self) -> None:
        try:
            await self._outbox.close()
        finally:
            await self._spool.close()
