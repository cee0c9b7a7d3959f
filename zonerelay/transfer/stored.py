"""One message of a source with its open deliveries: the unit of every transfer. No I/O."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec

from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.queue_name import queue_of

NO_QUEUE = queue_of("")
"""The queue of a delivery that the routes of this relay are to choose."""


class TransferError(Exception):
    """A source or a target cannot be used; the text is for the operator."""


class StoredMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A stored message with its open deliveries. `key` identifies the message in its source permanently, so
    that a second import recognizes it.

    `body` starts from the first byte at each call. A message of another system (`is_ours` false) has no size,
    headers and properties yet: they are determined from the body, which may have any line ends.
    """

    key: str
    message: Message
    deliveries: tuple[Delivery, ...]
    body: Callable[[], AsyncIterator[bytes]]
    weight: int = 0
    """Octets that it has in memory."""
    is_ours: bool = True


class UnusableMessage(msgspec.Struct, frozen=True):
    """A message that cannot be imported. It stays in its source."""

    name: str
    why: str


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Interface: a source of messages. Its two sizes are upper limits, for the check of free space and the
    progress bar.
    """

    messages: int
    octets: int
    read: Callable[[], AsyncIterator[StoredMessage | UnusableMessage]]
