"""Defines a delivery: the durable state of one recipient of one message, from acceptance to final outcome.

Deliveries are small and change often; the message they belong to is large and never changes.
Whether a delivery is being attempted right now is not part of it: that is the scheduler's
knowledge, and a crash must forget it.

The module also defines the names of the queues. A zone has a queue for each priority, so every store has
urgent mail apart, oldest first. A mailbox of the outbox and a webhook have one queue each. What operators
drop from a queue of mail is in a bin for a while. The names of zones and webhooks have neither `;` nor `/` in
them.
"""

import enum
import functools
from typing import NamedTuple

import msgspec
from msgspec import structs

from zonerelay.model.envelope import Mailbox, MessageId, Notify, Priority, domain_of
from zonerelay.model.reply import Attempt


class QueueKind(enum.StrEnum):
    """The kind of a queue: mail of a zone, mail of an outbox mailbox, webhook events, or dropped mail."""

    MAIL = "mail"
    MAILBOX = "mailbox"
    WEBHOOK = "webhook"
    BIN = "bin"


class QueueName(NamedTuple):
    """The name of a queue, and its parts. `text` is the name in stores, exports and commands; names are
    ordered like their texts. `zone` is the name of the zone that serves the queue, and of the webhook whose
    events it holds.
    """

    text: str
    kind: QueueKind
    zone: str
    priority: Priority

    @property
    def is_mail(self) -> bool:
        return self.kind in (QueueKind.MAIL, QueueKind.MAILBOX)

    @property
    def label(self) -> str:
        """The zone as a metric label, which is the same for all mailboxes, because applications may create
        any number of them.
        """
        return QueueKind.MAILBOX.value if self.kind is QueueKind.MAILBOX else self.zone

    def __str__(self) -> str:
        return self.text


@functools.lru_cache(maxsize=1024)
def parse_queue(text: str) -> QueueName:
    """Parse the text of a queue name. An unknown priority, from a newer release, is read as normal."""
    zone, _, named = text.partition(";")
    priority = _PRIORITIES.get(named, Priority.NORMAL)
    word, slash, name = zone.partition("/")
    kind = _KINDS.get(word, QueueKind.MAIL) if slash else QueueKind.MAIL
    return QueueName(text, kind, zone if kind in (QueueKind.MAIL, QueueKind.MAILBOX) else name, priority)


@functools.lru_cache(maxsize=1024)
def queue_of(zone: str, priority: Priority = Priority.NORMAL) -> QueueName:
    """Return the queue of a zone for mail of this priority."""
    return parse_queue(zone if priority is Priority.NORMAL else f"{zone};{priority.value}")


def queues_of(zone: str) -> tuple[QueueName, ...]:
    """Return the queues of a zone, one per priority, the most urgent first."""
    return tuple(queue_of(zone, each) for each in Priority)


def webhook_queue(webhook: str) -> QueueName:
    return parse_queue(f"{QueueKind.WEBHOOK}/{webhook}")


def bin_of(queue: QueueName) -> QueueName:
    """Return the name of the queue for deliveries that were dropped from this queue."""
    return parse_queue(f"{QueueKind.BIN}/{queue.text}")


def mailbox_zone(mailbox: int) -> str:
    """Return the name of the zone that sends the mail of an outbox mailbox, by the number of its row."""
    return f"{QueueKind.MAILBOX}/{mailbox}"


MAILBOXES = QueueName(QueueKind.MAILBOX.value, QueueKind.MAILBOX, QueueKind.MAILBOX.value, Priority.NORMAL)
"""All mailboxes together, in counts."""

_PRIORITIES = {each.value: each for each in Priority}
_KINDS = {each.value: each for each in (QueueKind.MAILBOX, QueueKind.WEBHOOK, QueueKind.BIN)}


class DeliveryState(enum.StrEnum):
    """The durable state of a delivery: ready, deferred or held."""

    READY = "ready"
    ACTIVE = "active"
    DEFERRED = "deferred"
    HELD = "held"
    SUSPENDED = "suspended"
    """An order of an operator keeps it where it is."""
    DROPPED = "dropped"
    """It is in the bin."""


class DeliveryKey(NamedTuple):
    """The key of a delivery in every store. The same recipient twice in one message is one delivery."""

    queue: QueueName
    message_id: MessageId
    recipient: Mailbox


class Delivery(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The durable state of one recipient of one message. `created` and `next_attempt` are Unix times in
    seconds; `next_attempt` 0.0 means immediately.

    Ages are measured from `created`: the acceptance, or the release time that the client requested with
    FUTURERELEASE (RFC 4865), which is also `next_attempt` until then.

    `attempts` counts finished attempts that contacted a peer. `last` is the most recent attempt or
    postponement, or `None` before the first one. `warned` is set once a delay warning for this recipient has
    been stored. `act` is the id of the operator's change, or of the suspension or hold rule, that changed the
    delivery last, so that an undo affects only what the change has changed; a deferral clears it. `unknown`
    are fields (JSON) that a newer version has written into the record: an older version keeps them, because
    versions may be mixed during an upgrade.
    """

    queue: QueueName
    message_id: MessageId
    recipient: Mailbox
    created: float
    attempts: int = 0
    next_attempt: float = 0.0
    held: bool = False
    warned: bool = False
    notify: Notify = Notify.UNSET
    orcpt: str = ""
    last: Attempt | None = None
    act: str = ""
    unknown: bytes = b""

    @property
    def key(self) -> DeliveryKey:
        return DeliveryKey(self.queue, self.message_id, self.recipient)

    @property
    def zone(self) -> str:
        return self.queue.zone

    @property
    def priority(self) -> Priority:
        return self.queue.priority

    @property
    def domain(self) -> str:
        return domain_of(self.recipient)

    def is_due(self, now: float) -> bool:
        return not self.held and self.next_attempt <= now

    def state(self, now: float) -> DeliveryState:
        """Return the state of the delivery: dropped, held, deferred or ready. The scheduler knows which
        deliveries are active, and the orders which are suspended.
        """
        if self.queue.kind is QueueKind.BIN:
            return DeliveryState.DROPPED
        if self.held:
            return DeliveryState.HELD
        return DeliveryState.READY if self.next_attempt <= now else DeliveryState.DEFERRED

    def deferred(self, until: float, attempt: Attempt, *, counts: bool = True) -> "Delivery":
        """Return the delivery after a deferral; `counts` is false if the attempt did not contact a peer."""
        return structs.replace(
            self, attempts=self.attempts + (1 if counts else 0), next_attempt=until, last=attempt, act=""
        )

    def corrected_at(self, now: float) -> "Delivery":
        """Return the delivery with its due time corrected after the clock was set back to `now`.

        An attempt in the future shows that the clock was ahead when it was made: the next one waits, from now
        on, for as long as it was to wait then. Mail without an attempt that was due before it was accepted is
        due now. A due time that a sender or an operator (`act`) chose stays.
        """
        last = self.last
        if last is None:
            return structs.replace(self, next_attempt=now) if now < self.next_attempt < self.created else self
        if last.at <= now or self.next_attempt <= last.at or self.act:
            return self
        return structs.replace(
            self, next_attempt=now + self.next_attempt - last.at, last=structs.replace(last, at=now)
        )

    def released_at(self, now: float) -> float:
        """Return the due time after a hold ends: the release time that the sender requested, or now.

        It is never 0.0, which is the due time of new mail: a claim reads that in the order of the message
        ids, so new mail would wait until the claims have stepped over everything that was accepted after the
        released delivery. Mail that is due now shares the turns of deferred mail.
        """
        is_held_back = self.last is None and self.next_attempt == self.created
        return self.created if is_held_back and self.created > now else now
