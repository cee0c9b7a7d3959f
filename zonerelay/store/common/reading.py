"""Reads many messages for a list. An unreadable message does not end it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.contract import MessageNotFoundError, StoreCorruptError


async def read_each(
    read_message: Callable[[MessageId], Awaitable[Message]], ids: Sequence[MessageId]
) -> dict[MessageId, Message]:
    """Return those that exist and can be read, one after the other: for stores in which one read costs
    little.
    """
    found: dict[MessageId, Message] = {}
    for message_id in ids:
        try:
            found[message_id] = await read_message(message_id)
        except (MessageNotFoundError, StoreCorruptError):
            continue
    return found
