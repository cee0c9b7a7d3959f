"""Tracks the state of messages and deliveries while writes are in flight. No I/O.

Memory is ahead of the disk: a change is planned from the state after all earlier submissions, so concurrent
settles of one message do not wait for each other. That is correct because submissions are written in order
and fail together. After a failure `reset` discards the unconfirmed state, and the next plan reads the disk.

Claims are tracked here too. A claimed delivery is kept with its durable state, so settling it needs no read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId

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


@dataclass(slots=True, eq=False)
class OpenMessage:
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


@dataclass(slots=True)
class ReadResult:
    """The result of reading from disk. Data that does not exist is absent."""

    deliveries: dict[DeliveryKey, Delivery] = field(default_factory=dict)
    messages: dict[MessageId, OpenMessage] = field(default_factory=dict)
    asked: set[DeliveryKey] = field(default_factory=set)

    def merge(self, read: ReadResult, keys: Iterable[DeliveryKey]) -> None:
        """Add the result of reading `keys`."""
        for key in keys:
            self.asked.add(key)
            if key in read.deliveries:
                self.deliveries[key] = read.deliveries[key]
            if key.message_id in read.messages:
                self.messages[key.message_id] = read.messages[key.message_id]

    def drop(self, is_stale: Callable[[MessageId], bool]) -> None:
        """Remove the data of messages that have changed."""
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
        self._messages: dict[MessageId, OpenMessage] = {}
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
        """Return the state of a delivery that the next write will find, or `None` if it no longer exists."""
        if key in self.writing:
            return self.writing[key]
        return self.claims.get(key) or found.deliveries.get(key)

    def message(self, message_id: MessageId) -> OpenMessage | None:
        return self._messages.get(message_id)

    def remember(self, message_id: MessageId, entry: OpenMessage) -> OpenMessage:
        """Store the state of a message unless a newer one is known. Return the newer one."""
        known = self._messages.get(message_id)
        if known is not None:
            return known
        self._messages[message_id] = entry
        self._recipients += entry.weight
        if len(self._messages) > HOT_MESSAGES or self._recipients > HOT_RECIPIENTS:
            self._evict()
        return entry

    def _evict(self) -> None:
        """Drop the oldest messages if there are too many."""
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
        """Return whether the message may have changed since that moment, while a `reading` was open."""
        return since < self._oldest_moment or self._changed.get(message_id, -1) >= since

    # --- writes under way

    def submitted(self, states: dict[DeliveryKey, Delivery | None], counts: dict[OpenMessage, int]) -> None:
        """Note a submitted write with the resulting states and open counts."""
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
        """Note that a write is durable. Return false if a later write for the same delivery is pending."""
        if self._readers:
            # A read that began earlier may have seen the state that this write replaces.
            self._note_changes((key,))
        if self.writing.get(key, self) is not state:
            return False
        del self.writing[key]
        return True

    def settled(self, message_id: MessageId, entry: OpenMessage) -> bool:
        """Note that a write for the message is durable. Return true if it has removed the message."""
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
