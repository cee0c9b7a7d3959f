"""Encodes deliveries for Redis. The fields that the scripts read are plain text before the JSON."""

from __future__ import annotations

from typing import NamedTuple

from zonerelay.model.address import Mailbox
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common import records
from zonerelay.store.contract import StoreCorruptError

HELD = b"h"
AT_ONCE = b"0"


class Address(NamedTuple):
    """The zone, message and recipient of a delivery, as every script wants them."""

    zone: bytes
    message_id: bytes
    recipient: bytes

    @property
    def field(self) -> bytes:
        """The name of the field in the hash of its message."""
        return b"%b %b" % (self.zone, self.recipient)


def zone_field(queue: QueueName) -> bytes:
    """Encodes a queue as part of a key, in which colons separate fields."""
    return records.field(queue.text).replace(b":", b"%3A")


def address(key: DeliveryKey) -> Address:
    return Address(zone_field(key.queue), key.message_id.encode("ascii"), records.field(key.recipient))


def encode(delivery: Delivery) -> bytes:
    """`DUE CREATED DOMAIN JSON`. Raises StoreError."""
    return b"%b %b %b %b" % (*front(delivery), records.encode_delivery(delivery))


def front(delivery: Delivery) -> tuple[bytes, bytes, bytes]:
    """What scripts read of a delivery: `DUE`, `CREATED`, `DOMAIN`."""
    return _due(delivery), repr(delivery.created).encode("ascii"), records.field(delivery.domain)


def _due(delivery: Delivery) -> bytes:
    if delivery.held:
        return HELD
    return repr(delivery.next_attempt).encode("ascii") if delivery.next_attempt > 0 else AT_ONCE


def decode(zone: bytes, message_id: bytes, recipient: bytes, raw: bytes) -> Delivery:
    """Raises StoreCorruptError."""
    try:
        json = raw.split(b" ", 3)[3]
    except IndexError as error:
        raise StoreCorruptError(f"message {message_id!r}: unreadable delivery {raw[:100]!r}") from error
    return records.decode_delivery(b"delivery-zone %b %b %b" % (zone, message_id, recipient), json)


def decode_member(zone: bytes, member: bytes, raw: bytes) -> Delivery:
    """Decodes a member of a zone's sorted sets. Raises StoreCorruptError."""
    message_id, _, recipient = member.partition(b" ")
    return decode(zone, message_id, recipient, raw)


def parse_claim(member: bytes) -> DeliveryKey:
    """Parses a member of `claims`. Raises StoreCorruptError."""
    try:
        zone, message_id, recipient = member.split(b" ")
        text = message_id.decode("ascii")
        return DeliveryKey(records.queue_in(zone), MessageId(text), Mailbox(records.unfield(recipient)))
    except ValueError as error:
        raise StoreCorruptError(f"unreadable claim {member[:200]!r}") from error
