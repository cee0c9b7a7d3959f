"""Reads selected mail out of a store, message by message, without changing the store.

Memory: eight bytes per message, a hundred messages without their bodies, and chunks of one body.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from functools import partial

import msgspec

from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import LENGTH, Message, MessageId
from zonerelay.queue.operator.filters import QueueFilter
from zonerelay.store.contract import MessageNotFoundError, QueueView, StoreError
from zonerelay.transfer.files import Target
from zonerelay.transfer.stored import StoredMessage, UnusableMessage

DESCRIPTION_SIZE = 4096
"""Bytes that the description or the records of a message take at most, as a rule."""
_PAGE = 500
_TOGETHER = 100


class ExportSelection(msgspec.Struct):
    """The selected messages of an export and their sizes."""

    ids: array[int] = msgspec.field(default_factory=lambda: array("Q"))
    octets: int = 0


async def survey(store: QueueView, wanted: QueueFilter, now: float) -> ExportSelection:
    """Find the messages that match, and their sizes. Raise StoreError if the store cannot be read."""
    found = set[int]()
    for queue in (None, *(each for each in await store.queues() if not each.is_mail)):
        async for delivery in store.scan(queue, wanted=wanted.may_match):
            if wanted.matches(delivery, now) and wanted.matches_state(delivery.state(now)):
                found.add(int(delivery.message_id, 16))
    ids = sorted(found)
    meant = ExportSelection()
    for start in range(0, len(ids), _PAGE):
        page = ids[start : start + _PAGE]
        messages = await store.read_messages([_id(number) for number in page])
        for number in page:
            message = messages.get(_id(number))
            if not wanted.needs_message or wanted.matches_sender(message):
                meant.ids.append(number)
                meant.octets += DESCRIPTION_SIZE + (0 if message is None else message.size)
    return meant


def _id(number: int) -> MessageId:
    return MessageId(f"{number:0{LENGTH}x}")


async def export(
    store: QueueView,
    meant: ExportSelection,
    wanted: QueueFilter,
    now: float,
    target: Target,
    *,
    saw: Callable[[int, UnusableMessage | None], None],
    change: Callable[[Message, Delivery], Delivery] = lambda _, delivery: delivery,
) -> None:
    """Write the messages to a target. `saw` is called with the number of deliveries written of each message,
    or with the reason why it could not be written. `change` returns a delivery as it is to be written.

    Raise OSError if the target cannot be written.
    """
    for start in range(0, len(meant.ids), _TOGETHER):
        page = [_id(number) for number in meant.ids[start : start + _TOGETHER]]
        messages = await store.read_messages(page)
        asked = (store.deliveries_of(identity) for identity in page)
        for identity, found in zip(page, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            try:
                if isinstance(found, BaseException):
                    raise found
                deliveries = tuple(
                    each
                    for each in found
                    if wanted.matches(each, now) and wanted.matches_state(each.state(now))
                )
                if deliveries:
                    # The store omits unreadable messages from a list, and reports the reason when a single
                    # one is read.
                    message = messages.get(identity) or await store.read_message(identity)
                    await target(
                        StoredMessage(
                            key=message.id,
                            message=message,
                            deliveries=tuple(change(message, each) for each in deliveries),
                            body=partial(store.read_body, message.id),
                        )
                    )
                saw(len(deliveries), None)
            except MessageNotFoundError:
                saw(0, None)
            except (StoreError, ValueError) as error:
                saw(0, UnusableMessage(identity, str(error)))
