"""How deliveries are written in Redis: what the scripts read is plain text before the JSON."""

from __future__ import annotations

from typing import NamedTuple

from zonerelay.model.address import Mailbox
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.store.common import records
from zonerelay.store.contract import StoreCorruptError

HELD = b"h"
AT_ONCE = b"0"


class Address(NamedTuple):
    """Where a delivery stands, as every script wants it."""

    zone: bytes
    message_id: bytes
    recipient: bytes

    @property
    def field(self) -> bytes:
        """In the hash of its message."""
        return b"%b %b" % (self.zone, self.recipient)


def zone_field(zone: str) -> bytes:
    """A zone as part of a key, where colons separate."""
    return records.field(zone).replace(b":", b"%3A")


def address(key: DeliveryKey) -> Address:
    return Address(zone_field(key.queue), key.message_id.encode("ascii"), records.field(key.recipient))


def encode(delivery: Delivery) -> bytes:
    """`DUE CREATED DOMAIN JSON`. Raises StoreError."""
    return b"%b %b %b %b" % (
        _due(delivery),
        repr(delivery.created).encode("ascii"),
        records.field(delivery.domain),
        records.encode_delivery(delivery),
    )


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
    """A row of a zone's sorted sets."""
    message_id, _, recipient = member.partition(b" ")
    return decode(zone, message_id, recipient, raw)


def parse_claim(member: bytes) -> DeliveryKey:
    """A row of `claims`."""
    try:
        zone, message_id, recipient = member.split(b" ")
        text = message_id.decode("ascii")
        return DeliveryKey(records.unfield(zone), MessageId(text), Mailbox(records.unfield(recipient)))
    except ValueError as error:
        raise StoreCorruptError(f"unreadable claim {member[:200]!r}") from error
