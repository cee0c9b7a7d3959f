"""Plans one atomic write: it converts changes of deliveries to keys and values before any I/O.

A plan is complete before anything else depends on it, so an envelope that cannot be encoded has no effect.
The number of open deliveries decides when a message leaves with its body. It is only stored if it differs
from the number of recipients in the envelope, so a message to one recipient never needs it.
"""

from __future__ import annotations

from collections.abc import Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.common import records
from zonerelay.store.leveldb.engine import Op
from zonerelay.store.leveldb.in_flight import NOTHING, InFlight, OpenMessage, ReadResult

_RECORD_SIZE = 200
"""The approximate size of a delivery record and its keys, for the size of a batch."""

Transition = tuple[Delivery | None, Delivery | None]
"""The old and new state of a delivery. Old is None if it is new, and new is None if it leaves."""


class WritePlan:
    """The changes of one write. Use it once: add changes, then `seal` it, which registers them with
    `InFlight`.
    """

    def __init__(self, in_flight: InFlight, found: ReadResult = NOTHING) -> None:
        self._in_flight = in_flight
        self._found = found
        self._closed: dict[MessageId, int] = {}
        self._counts: dict[OpenMessage, int] = {}
        self._learned: dict[MessageId, OpenMessage] = {}
        self.ops: list[Op] = []
        self.size = 0
        self.removes_message = False
        self.states: dict[DeliveryKey, Delivery | None] = {}
        self.transitions: dict[DeliveryKey, Transition] = {}
        self.messages: dict[MessageId, OpenMessage] = {}

    def add_message(self, message: Message, deliveries: Sequence[Delivery]) -> None:
        """Add a new message and its deliveries, at most one for each recipient. Raises ValueError.

        The caller adds its chunks before.
        """
        envelope = message.envelope
        message_id = envelope.id
        metadata = records.encode_message(message)
        exists_key, metadata_key = records.message_keys(message_id)
        self.ops += ((exists_key, b"%d" % envelope.created), (metadata_key, metadata))
        count = 0
        for delivery in deliveries:
            key = delivery.key
            if key not in self.transitions:
                self._write(key, None, delivery)
                count += 1
        if count > len(envelope.recipients):
            # The count of a message to one recipient is never read, so it would leave with the first of two
            # deliveries.
            raise ValueError(f"{count} deliveries to {len(envelope.recipients)} recipients")
        entry = self._learned[message_id] = self.messages[message_id] = OpenMessage(message, count)
        if count != len(envelope.recipients):
            self._store_count(message_id, entry, count)
        self._counts[entry] = count
        self.size += len(metadata) + _RECORD_SIZE * count

    def current(self, key: DeliveryKey) -> Delivery | None:
        """Return the delivery's state in this plan, or `None` if it does not exist."""
        before = self.transitions.get(key)
        return before[1] if before is not None else self._in_flight.state(key, self._found)

    def change(self, key: DeliveryKey, new: Delivery | None) -> None:
        """Set a delivery's new state, perhaps in another queue, or remove it with `None`. Does nothing if the
        delivery does not exist.
        """
        old = self.current(key)
        if old is None:
            return
        if new is not None and new.key != key:
            self._write(key, old, None)
            self._write(new.key, None, new)
        else:
            self._write(key, old, new)
        if new is None:
            self._closed[key.message_id] = self._closed.get(key.message_id, 0) + 1
        self.size += _RECORD_SIZE

    def seal(self) -> None:
        """Complete the operations and register them as in flight. The caller must submit them at once."""
        for message_id, closed in self._closed.items():
            self._close(message_id, closed)
        self._in_flight.submitted(self.states, self._counts)
        for message_id, entry in self._learned.items():
            self._in_flight.remember(message_id, entry)

    def _write(self, key: DeliveryKey, old: Delivery | None, new: Delivery | None) -> None:
        if (old is not None and old.next_attempt) or (new is not None and new.next_attempt):
            self._write_index(key, records.due_time(old), records.due_time(new))
        value = None if new is None else records.encode_delivery(new)
        self.ops.append((records.delivery_key(key), value))
        before = self.transitions.get(key)
        self.transitions[key] = (old if before is None else before[0], new)
        self.states[key] = new

    def _write_index(self, key: DeliveryKey, was_due: float, due: float) -> None:
        if was_due != due:
            if was_due:
                self.ops.append((records.deferred_key(key, was_due), None))
            if due:
                self.ops.append((records.deferred_key(key, due), b""))

    def _close(self, message_id: MessageId, closed: int) -> None:
        entry = self._in_flight.message(message_id)
        if entry is None:
            entry = self._found.messages.get(message_id)
            if entry is None:
                return
            self._learned[message_id] = entry
        message = entry.message
        if message is None:
            return
        self.messages[message_id] = entry
        left = self._counts[entry] = max(0, entry.open - closed)
        if left:
            self._store_count(message_id, entry, left)
        else:
            self._remove_message(message_id, entry, message.chunks)

    def _store_count(self, message_id: MessageId, entry: OpenMessage, count: int) -> None:
        self.ops.append((records.open_count_key(message_id), b"%d" % count))
        entry.count_stored = True

    def _remove_message(self, message_id: MessageId, entry: OpenMessage, chunks: int) -> None:
        self.removes_message = True
        for key in records.message_keys(message_id, chunks):
            self.ops.append((key, None))
        if entry.count_stored:
            self.ops.append((records.open_count_key(message_id), None))
