"""One message of a source with what is left of its deliveries: what every transfer is made of. No I/O."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.queue_name import queue_of

NO_QUEUE = queue_of("")
"""The queue of a delivery that the routes of this relay are to choose."""


class TransferError(Exception):
    """A source or a target cannot be used at all; the text says what the operator should do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A stored message. `key` names the message in its source for good: a second import recognises it by
    that.

    `body` starts from the first byte at each call. The message of another system (`is_ours` false) has no
    size, headers and traits yet: they are taken from the body, whose line ends may be any.
    """

    key: str
    message: Message
    deliveries: tuple[Delivery, ...]
    body: Callable[[], AsyncIterator[bytes]]
    weight: int = 0
    """Octets that it has in memory."""
    is_ours: bool = True


@dataclass(frozen=True, slots=True)
class Unusable:
    """A message that cannot be taken over. It stays in its source."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source. `messages` and `octets` are what it holds at most, for the room and the progress bar."""

    messages: int
    octets: int
    read: Callable[[], AsyncIterator[Stored | Unusable]]
