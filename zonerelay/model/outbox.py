"""The names of outbox mail: ids that no spool ever gives, and a zone for each mailbox in use.

Ids of a spool begin with milliseconds and reach a first digit of `f` in the year 2515.
"""

from __future__ import annotations

from zonerelay.model.message_id import LENGTH, MessageId

PROTOCOL = "outbox"
"""`Origin.protocol` of messages that were rows."""

MAX_ROW = 2**60 - 1

_MARK = "f"
_MAILBOX = "mailbox/"
MAILBOXES = "mailbox"
"""What metrics call all mailboxes together."""


def message_id_of(row: int) -> MessageId:
    return MessageId(f"{_MARK}{row:0{LENGTH - 1}x}")


def row_of(message_id: MessageId) -> int:
    return int(message_id[1:], 16)


def is_outbox(message_id: MessageId) -> bool:
    return message_id.startswith(_MARK)


def mailbox_zone(mailbox: int) -> str:
    """A name that no configuration can give."""
    return f"{_MAILBOX}{mailbox}"


def is_mailbox_zone(zone: str) -> bool:
    return zone.startswith(_MAILBOX)


def zone_label(zone: str) -> str:
    """For metrics: mailboxes are as many as applications make."""
    return MAILBOXES if zone.startswith(_MAILBOX) else zone
