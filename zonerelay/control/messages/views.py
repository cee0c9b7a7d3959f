"""From the relay's values to what an operator sees. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from zonerelay.control.messages.answers import DeliveryRow, MessageDetail
from zonerelay.model.delivery import Delivery, DeliveryState
from zonerelay.model.envelope import Message


def delivery_row(delivery: Delivery, message: Message | None, state: DeliveryState) -> DeliveryRow:
    """`message` is `None` when it could not be read: sender and size are then unknown."""
    last = delivery.last
    return DeliveryRow(
        message_id=delivery.message_id,
        zone=delivery.zone,
        priority=delivery.priority.value,
        sender=None if message is None else message.envelope.sender,
        recipient=delivery.recipient,
        domain=delivery.domain,
        state=state.value,
        created=delivery.created,
        attempts=delivery.attempts,
        next_attempt=delivery.next_attempt,
        size=None if message is None else message.size,
        reply="" if last is None else str(last.reply),
        host="" if last is None else last.host,
        peer="" if last is None else last.peer,
        last_attempt=None if last is None else last.at,
        in_doubt=last is not None and last.in_doubt,
    )


def message_detail(message: Message, rows: Iterable[DeliveryRow]) -> MessageDetail:
    envelope = message.envelope
    origin = envelope.origin
    return MessageDetail(
        message_id=message.id,
        created=envelope.created,
        sender=envelope.sender,
        size=message.size,
        chunks=message.chunks,
        body=envelope.body.value,
        smtputf8=envelope.smtputf8,
        envid=envelope.envid,
        client=origin.client_address,
        helo=origin.helo,
        protocol=origin.protocol,
        listener=origin.listener,
        user=origin.user,
        tls=origin.tls,
        recipients_accepted=len(envelope.recipients),
        headers=message.headers,
        deliveries=tuple(rows),
    )
