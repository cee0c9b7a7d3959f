"""Knows what is stored of messages and deliveries while writes are in flight. No I/O.

Memory runs ahead of the disk: a change is planned from the state that earlier submissions will have left, so
concurrent settles of one message do not wait for each other. That is sound because submissions are written in
order and fail together; after a failure `reset` drops every guess, and the next plan reads the disk.

Claims live here too: a claimed delivery is kept with its durable state, so that settling it reads nothing.
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
"""Messages whose metadata is kept in memory after acceptance or a read."""
HOT_RECIPIENTS = 50_000
"""Of these messages all together, if there is more than one: each recipient of an envelope takes memory."""
EVICTED = 4
"""Messages looked at to make room for one: more than one, because the youngest may be the largest."""
MAX_CHANGES = 10_000
"""Changed messages remembered while reads are under way; beyond that all those reads are repeated."""


@dataclass(slots=True, eq=False)
class OpenMessage:
    """A message and how many of its deliveries stay open once everything submitted is written.

    `message` is None when its metadata is missing or corrupt: the body then stays for the operator.
    `count_stored` says whether `meta open {ID}` exists.
    """

    message: Message | None
    open: int
    count_stored: bool = False
    writes: int = 0

    @property
    def weight(self) -> int:
        return 1 if self.message is None else len(self.message.envelope.recipients)


@dataclass(slots=True)
class Found:
    """What a cold read brought; what does not exist is absent."""

    deliveries: dict[DeliveryKey, Delivery] = field(default_factory=dict)
    messages: dict[MessageId, OpenMessage] = field(default_factory=dict)
    asked: set[DeliveryKey] = field(default_factory=set)

    def merge(self, read: Found, keys: Iterable[DeliveryKey]) -> None:
        """Take over what was read of `keys`."""
        for key in keys:
            self.asked.add(key)
            if key in read.deliveries:
                self.deliveries[key] = read.deliveries[key]
            if key.message_id in read.messages:
                self.messages[key.message_id] = read.messages[key.message_id]

    def drop(self, is_stale: Callable[[MessageId], bool]) -> None:
        """Forget what concerns messages that changed."""
        for key in [key for key in self.asked if is_stale(key.message_id)]:
            self.asked.discard(key)
            self.deliveries.pop(key, None)
            self.messages.pop(key.message_id, None)


NOTHING = Found()
"""The result when everything is in memory. It is shared: never write to it."""


class InFlight:
    """The deliveries in flight of a spool; changed only on the event loop."""

    def __init__(self) -> None:
        # The durable state of what is claimed; None: it has to be read (after the spool failed).
        self.claims: dict[DeliveryKey, Delivery | None] = {}
        # State after the last submitted write that is not durable yet; None: the delivery leaves.
        self.writing: dict[DeliveryKey, Delivery | None] = {}
        self._messages: dict[MessageId, OpenMessage] = {}
        self._recipients = 0
        # When messages were last changed, while reads are under way.
        self._readers = 0
        self._changed: dict[MessageId, int] = {}
        self._moment = 0
        self._oldest_moment = 0

    def is_busy(self, key: DeliveryKey) -> bool:
        """Claimed, or part of a write that is not durable yet: not to be handed out."""
        return key in self.claims or key in self.writing

    def state(self, key: DeliveryKey, found: Found) -> Delivery | None:
        """Return the delivery as the next write will meet it, `None` if it no longer exists."""
        if key in self.writing:
            return self.writing[key]
        return self.claims.get(key) or found.deliveries.get(key)

    def message(self, message_id: MessageId) -> OpenMessage | None:
        return self._messages.get(message_id)

    def remember(self, message_id: MessageId, entry: OpenMessage) -> OpenMessage:
        """Keep what is known of a message, unless newer knowledge is there; returns what counts."""
        known = self._messages.get(message_id)
        if known is not None:
            return known
        self._messages[message_id] = entry
        self._recipients += entry.weight
        if len(self._messages) > HOT_MESSAGES or self._recipients > HOT_RECIPIENTS:
            self._evict()
        return entry

    def _evict(self) -> None:
        """Make room for the youngest."""
        for oldest in list(islice(self._messages, EVICTED)):
            entry = self._messages.pop(oldest)
            if entry.writes or not self._messages:
                # Its count is ahead of the disk: a read now would bring back the past.
                self._messages[oldest] = entry
                continue
            self._recipients -= entry.weight
            if len(self._messages) <= HOT_MESSAGES and self._recipients <= HOT_RECIPIENTS:
                return

    # --- cold reads

    def unknown(self, keys: Iterable[DeliveryKey], found: Found) -> list[DeliveryKey]:
        """Return those of which the state or the message is not at hand and must be read."""
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
        """While this is open, changes are noted, so that what was read before them can be told."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                self._changed.clear()

    def moment(self) -> int:
        """Now, for `is_stale`."""
        return self._moment

    def is_stale(self, message_id: MessageId, since: int) -> bool:
        """Return whether the message may have changed since that moment, while a `reading` was open."""
        return since < self._oldest_moment or self._changed.get(message_id, -1) >= since

    # --- writes under way

    def submitted(self, states: dict[DeliveryKey, Delivery | None], counts: dict[OpenMessage, int]) -> None:
        """A write that leaves these states and open counts was handed to the committer."""
        self.writing.update(states)
        for entry, count in counts.items():
            entry.open = count
            entry.writes += 1
        if self._readers:
            self._note_changes(states)

    def _note_changes(self, keys: Iterable[DeliveryKey]) -> None:
        for key in keys:
            self._changed[key.message_id] = self._moment
        self._moment += 1
        if len(self._changed) > MAX_CHANGES:
            self._changed.clear()
            self._oldest_moment = self._moment

    def landed(self, key: DeliveryKey, state: Delivery | None) -> bool:
        """The write is durable; false when a later write for the same delivery is under way."""
        if self._readers:
            # A read that began before this may have seen the state that it replaces.
            self._note_changes((key,))
        if self.writing.get(key, self) is not state:
            return False
        del self.writing[key]
        return True

    def settled(self, message_id: MessageId, entry: OpenMessage) -> bool:
        """One write for the message is durable; true when it took the message with it."""
        entry.writes -= 1
        if entry.open or entry.writes:
            return False
        if self._messages.pop(message_id, None) is not None:
            self._recipients -= entry.weight
        return True

    def reset(self) -> None:
        """The spool failed: what is durable has to be read again. Claims stay with their owners."""
        self.writing.clear()
        self._messages.clear()
        self._recipients = 0
        self.claims = dict.fromkeys(self.claims)
        # A read that was begun before is void.
        self._moment += 1
        self._oldest_moment = self._moment
