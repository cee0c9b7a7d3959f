"""Handing out deliveries of a bucket's queue: marks in the memory of the relay that owns them.

A state that is not in memory is read before it is handed out, in the turn of its message's changes, so that
what is read is not older than what is being written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.store.common.claiming import IndexClaims
from zonerelay.store.contract import StoreError
from zonerelay.store.s3.keeper import S3Keeper
from zonerelay.store.s3.states import OwnMessage, OwnMessages
from zonerelay.store.s3.work import MessageJob, OpenDeliveries
from zonerelay.store.s3.writer import ObjectWriter


class S3Claims(IndexClaims[OwnMessage]):
    """The claims of one relay."""

    def __init__(self, mine: OwnMessages, writer: ObjectWriter, keeper: S3Keeper) -> None:
        super().__init__(lambda: mine.index, keeper.check_usable)
        self._known = mine
        self._writer = writer

    async def _hold(self, ids: Collection[MessageId]) -> dict[MessageId, OwnMessage]:
        mine, epoch = self._known, self._known.epoch
        held = {message_id: mine.use(message_id) for message_id in ids}
        try:
            unknown = [stored.id for stored in held.values() if not stored.etag]
            if unknown:
                await asyncio.gather(
                    *(self._writer.submit(each, MessageJob((), _nothing)) for each in unknown)
                )
            if epoch != mine.epoch:
                raise StoreError("the lease on the queue was lost meanwhile")
        except BaseException:
            self._drop(held.values())
            raise
        return held

    def _drop(self, held: Iterable[OwnMessage]) -> None:
        for stored in held:
            self._known.drop(stored)

    def _show(self, key: DeliveryKey, delivery: Delivery | None) -> None:
        self._known.show(key, delivery)

    def _handed_out(self, found: Collection[Delivery]) -> None:
        self._known.claims.hand_out(found)

    def release(self, keys: Collection[DeliveryKey]) -> None:
        for key in keys:
            self._known.claims.drop(key)
        super().release(keys)


def _nothing(_: OpenDeliveries) -> dict[DeliveryKey, Delivery | None]:
    """Nothing changes: the message is only read, if it has to be."""
    return {}
