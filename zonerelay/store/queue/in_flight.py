"""Plans atomic writes, and tracks the state of messages and deliveries while they are in flight. No I/O.

Memory is ahead of the disk: a change is planned from the state after all earlier submissions, so concurrent
settles of one message do not wait for each other. That is correct because submissions are written in order
and fail together. After a failure `reset` discards the unconfirmed state, and the next plan reads the disk.

Claims are tracked here too. A claimed delivery is kept with its durable state, so settling it needs no read.

A plan converts changes of deliveries to keys and values. It is complete before anything else depends on it,
so an envelope that cannot be encoded has no effect. The number of open deliveries decides when a message
leaves with its body. It is only stored if it differs from the number of recipients in the envelope, so a
message to one recipient never needs it.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message, MessageId
from zonerelay.store import records
from zonerelay.store.contract import ChangeOne, StoreError
from zonerelay.store.keys.port import Op

HOT_MESSAGES = 4096
"""The number of messages whose metadata stays in memory after acceptance or a read."""
HOT_RECIPIENTS = 50_000
"""The largest number of recipients of all these messages, if there is more than one message. Each recipient
of an envelope uses memory.
"""
EVICTED = 4
"""The number of messages that may be dropped to add one. More than one, because the newest may be the
largest.
"""
MAX_CHANGES = 10_000
"""The number of changed messages that are tracked during reads. Beyond it all these reads are repeated."""


class OpenMessage(msgspec.Struct, eq=False):
    """A message and the number of its deliveries that remain open after all submitted writes.

    `message` is None if its metadata is missing or corrupt; then the body stays for the operator.
    `count_stored` is whether `meta open {ID}` exists.
    """

    message: Message | None
    open: int
    count_stored: bool = False
    writes: int = 0

    @property
    def weight(self) -> int:
        return 1 if self.message is None else len(self.message.envelope.recipients)


class ReadResult(msgspec.Struct):
    """Deliveries and messages that were read from disk. A key in `asked` without an entry does not exist."""

    deliveries: dict[DeliveryKey, Delivery] = msgspec.field(default_factory=dict)
    messages: dict[MessageId, OpenMessage] = msgspec.field(default_factory=dict)
    asked: set[DeliveryKey] = msgspec.field(default_factory=set)

    def merge(self, read: "ReadResult", keys: Iterable[DeliveryKey]) -> None:
        """Add the results of another read, which was made for `keys`."""
        self.asked.update(keys)
        self.deliveries |= read.deliveries
        self.messages |= read.messages

    def drop(self, is_stale: Callable[[MessageId], bool]) -> None:
        """Remove the messages that have changed since the read, and their deliveries."""
        for key in [key for key in self.asked if is_stale(key.message_id)]:
            self.asked.discard(key)
            self.deliveries.pop(key, None)
            self.messages.pop(key.message_id, None)


NOTHING = ReadResult()
"""The result if everything is in memory. It is shared and must not be modified."""


class InFlight:
    """Tracks the deliveries of a spool whose changes are being written. It is changed only on the event
    loop.
    """

    def __init__(self) -> None:
        # The durable state of claimed deliveries. None means that it must be read (after the spool failed).
        self.claims: dict[DeliveryKey, Delivery | None] = {}
        # The state after the last submitted write that is not durable yet. None means that the delivery
        # leaves.
        self.writing: dict[DeliveryKey, Delivery | None] = {}
        self._messages: OrderedDict[MessageId, OpenMessage] = OrderedDict()
        self._recipients = 0
        # The time of the last change of each message, while reads are active.
        self._readers = 0
        self._changed: dict[MessageId, int] = {}
        self.moment = 0
        """The current time for `is_stale`, a counter."""
        self._oldest_moment = 0

    def is_busy(self, key: DeliveryKey) -> bool:
        """Return whether a delivery is claimed, or part of a write that is not durable yet. It must not be
        claimed then.
        """
        return key in self.claims or key in self.writing

    def state(self, key: DeliveryKey, found: ReadResult) -> Delivery | None:
        """Return the state that the next write to a delivery will find, or `None` if the delivery no longer
        exists.
        """
        if key in self.writing:
            return self.writing[key]
        return self.claims.get(key) or found.deliveries.get(key)

    def message(self, message_id: MessageId) -> OpenMessage | None:
        return self._messages.get(message_id)

    def remember(self, message_id: MessageId, entry: OpenMessage) -> OpenMessage:
        """Keep a message's state in memory unless a newer one is there. Return the newer of the two."""
        known = self._messages.get(message_id)
        if known is not None:
            return known
        self._messages[message_id] = entry
        self._recipients += entry.weight
        if len(self._messages) > HOT_MESSAGES or self._recipients > HOT_RECIPIENTS:
            self._evict()
        return entry

    def _evict(self) -> None:
        """Forget the oldest messages without pending writes if there are too many in memory."""
        for oldest in list(islice(self._messages, EVICTED)):
            entry = self._messages.pop(oldest)
            if entry.writes or not self._messages:
                # Its count is ahead of the disk, so reading it now would restore an old state.
                self._messages[oldest] = entry
                continue
            self._recipients -= entry.weight
            if len(self._messages) <= HOT_MESSAGES and self._recipients <= HOT_RECIPIENTS:
                return

    # --- cold reads

    def unknown(self, keys: Iterable[DeliveryKey], found: ReadResult) -> list[DeliveryKey]:
        """Return the keys whose state or message is not in memory and must be read."""
        return [
            key
            for key in keys
            if key not in found.asked
            and (
                (key not in self.writing and self.claims.get(key) is None)
                or key.message_id not in self._messages
            )
        ]

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Track changes while the context is open, so that results of earlier reads can be recognized as
        stale.
        """
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                self._changed.clear()

    def is_stale(self, message_id: MessageId, since: int) -> bool:
        """Return whether the message may have changed since the moment `since` of an open `reading`."""
        return since < self._oldest_moment or self._changed.get(message_id, -1) >= since

    # --- writes under way

    def submitted(self, states: dict[DeliveryKey, Delivery | None], counts: dict[OpenMessage, int]) -> None:
        """Record a submitted write with the resulting states and open counts."""
        self.writing.update(states)
        for entry, count in counts.items():
            entry.open = count
            entry.writes += 1
        if self._readers:
            self._note_changes(states)

    def _note_changes(self, keys: Iterable[DeliveryKey]) -> None:
        for key in keys:
            self._changed[key.message_id] = self.moment
        self.moment += 1
        if len(self._changed) > MAX_CHANGES:
            self._changed.clear()
            self._oldest_moment = self.moment

    def landed(self, key: DeliveryKey, state: Delivery | None) -> bool:
        """Record that a write is durable. Return false if a later write for the same delivery is pending."""
        if self._readers:
            # A read that began earlier may have seen the state that this write replaces.
            self._note_changes((key,))
        if self.writing.get(key, self) is not state:
            return False
        del self.writing[key]
        return True

    def settled(self, message_id: MessageId, entry: OpenMessage) -> bool:
        """Record that a write for the message is durable. Return true if it has removed the message."""
        entry.writes -= 1
        if entry.open or entry.writes:
            return False
        if self._messages.pop(message_id, None) is not None:
            self._recipients -= entry.weight
        return True

    def reset(self) -> None:
        """Discard the unconfirmed state after the spool failed, so that it is read again. Claims stay with
        their owners.
        """
        self.writing.clear()
        self._messages.clear()
        self._recipients = 0
        self.claims = dict.fromkeys(self.claims)
        # Reads that began earlier are void.
        self.moment += 1
        self._oldest_moment = self.moment


# --- planning a write

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
        metadata = records.encoded(f"message {message_id}", message)
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
        """Record the new state of a delivery, which may be in another queue now, or remove the delivery with
        `None`. Does nothing if the delivery does not exist.
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
        """Complete the operations of the plan and register its changes as in flight. The caller must submit
        them at once.
        """
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


# --- operators' changes of many deliveries

UPDATE_BATCH = 256
"""The largest number of deliveries that one durable write of an operator's command changes."""


def in_batches(keys: Iterable[DeliveryKey]) -> Iterator[list[DeliveryKey]]:
    """Yield each key once, in the given order, in batches of `UPDATE_BATCH`."""
    wanted = list(dict.fromkeys(keys))
    for start in range(0, len(wanted), UPDATE_BATCH):
        yield wanted[start : start + UPDATE_BATCH]


def changed(old: Delivery, change: ChangeOne) -> Delivery | None:
    """Return the delivery's state after `change`. Raises StoreError if `change` returns another delivery."""
    new = change(old)
    if new is not None and new.key != old.key._replace(queue=new.queue):
        raise StoreError("a change must not modify the key of a delivery")
    return new
