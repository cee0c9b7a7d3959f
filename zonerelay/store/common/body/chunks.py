"""Checks that every store makes before it writes, so that a caller's mistake cannot damage a queue."""

from __future__ import annotations

from collections.abc import Sequence

from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageId
from zonerelay.store.contract import CHUNK_SIZE, StoreError, Submit


def check_deliveries(message_id: MessageId, deliveries: Sequence[Delivery]) -> None:
    """A message without deliveries would never leave; one with another's would take that one's body."""
    if not deliveries:
        raise StoreError(f"message {message_id} needs a delivery")
    for delivery in deliveries:
        if delivery.message_id != message_id:
            raise StoreError(f"message {message_id} was given a delivery of {delivery.message_id}")


def check_own_message(change: Submit) -> None:
    """A submitted message must describe its body: removal goes by the number of chunks."""
    message = change.message
    check_deliveries(message.id, change.deliveries)
    if message.size != len(change.body) or message.chunks != len(split(change.body)):
        raise StoreError(f"message {message.id} does not describe its body")


def split(body: bytes) -> list[bytes]:
    """A body as chunks; an empty body has none."""
    return [body[start : start + CHUNK_SIZE] for start in range(0, len(body), CHUNK_SIZE)]
