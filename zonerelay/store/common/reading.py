"""Reads many messages for a list, in batches. Unreadable messages are skipped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.contract import MessageNotFoundError, StoreCorruptError


async def read_each(
    read_message: Callable[[MessageId], Awaitable[Message]], ids: Sequence[MessageId]
) -> dict[MessageId, Message]:
    """Return the messages that exist and can be read, one after the other. This suits stores with cheap
    reads.
    """
    found: dict[MessageId, Message] = {}
    for message_id in ids:
        try:
            found[message_id] = await read_message(message_id)
        except (MessageNotFoundError, StoreCorruptError):
            continue
    return found
