"""Converts between the model's values and rows: which column holds what, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from zonerelay.model.address import Mailbox
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common import records
from zonerelay.store.contract import MessageNotFoundError
from zonerelay.store.postgres.driver import Columns

_LARGEST = 2**63 - 1


class RowKey(NamedTuple):
    """The primary key of a delivery."""

    zone: str
    message_id: int
    recipient: str


def number(message_id: MessageId) -> int:
    """Returns the key of a message. Raises MessageNotFoundError for an id that cannot be one."""
    try:
        found = int(message_id, 16)
    except ValueError:
        found = -1
    if not 0 <= found <= _LARGEST:
        raise MessageNotFoundError(f"no message {message_id}")
    return found


def identity(key: int) -> MessageId:
    return MessageId(f"{key:016x}")


def word(text: str) -> str:
    """Encodes a name for a column, as ASCII without spaces."""
    return records.field(text).decode("ascii")


def words(texts: Collection[str]) -> list[str]:
    return [word(text) for text in texts]


def unword(text: str) -> str:
    return records.unfield(text.encode("ascii"))


def column_of(queue: QueueName) -> str:
    return records.field(queue.text).decode("ascii")


def queue_in(column: str) -> QueueName:
    return records.queue_in(column.encode("ascii"))


def row_key(key: DeliveryKey) -> RowKey:
    return RowKey(column_of(key.queue), number(key.message_id), word(key.recipient))


def delivery_key(row: Columns) -> DeliveryKey:
    """Returns the key of a row that begins with its primary key."""
    return DeliveryKey(queue_in(row[0]), identity(row[1]), Mailbox(unword(row[2])))


def delivery_of(row: Columns) -> Delivery:
    """Decodes a row that begins with zone, message_id, recipient, next_attempt, held, record."""
    delivery = records.decode_record(delivery_key(row), bytes(row[5]))
    # The columns are what the queue goes by, and what a database administrator may have changed.
    if delivery.next_attempt != row[3] or delivery.held != row[4]:
        return replace(delivery, next_attempt=row[3], held=row[4])
    return delivery


def key_columns(keys: Sequence[DeliveryKey]) -> list[Columns]:
    """Returns the zones, message ids and recipients of the keys."""
    rows = [row_key(key) for key in keys]
    return [[row[at] for row in rows] for at in range(len(RowKey._fields))]
