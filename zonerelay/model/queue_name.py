"""Defines the names of the queues.

A zone has a queue for each priority, so every store has urgent mail apart, oldest first. A mailbox of the
outbox and a webhook have one queue each. What operators drop from a queue of mail is in a bin for a while.
The names of zones and webhooks have neither `;` nor `/` in them.
"""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple


class Priority(enum.StrEnum):
    """The priority of a message."""

    HIGH = "high"
    NORMAL = "normal"
    BULK = "bulk"


class QueueKind(enum.StrEnum):
    """The kind of a queue."""

    MAIL = "mail"
    MAILBOX = "mailbox"
    WEBHOOK = "webhook"
    BIN = "bin"


class QueueName(NamedTuple):
    """The name of a queue. `text` is the name as stores, exports and people have it; names order as their
    texts do. `zone` is the name of the zone that serves the queue, and of the webhook whose events it holds.
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
        """The zone for metrics, which have one for all mailboxes: those are as many as applications make."""
        return QueueKind.MAILBOX.value if self.kind is QueueKind.MAILBOX else self.zone

    def __str__(self) -> str:
        return self.text


@functools.lru_cache(maxsize=1024)
def parse_queue(text: str) -> QueueName:
    """Read the text of a name. A newer release's priority, which this one does not know, is normal."""
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
    """Return the queues that a zone may have, the most urgent first."""
    return tuple(queue_of(zone, each) for each in Priority)


def webhook_queue(webhook: str) -> QueueName:
    return parse_queue(f"{QueueKind.WEBHOOK}/{webhook}")


def bin_of(queue: QueueName) -> QueueName:
    """Return the name of the queue that holds deliveries dropped from this queue."""
    return parse_queue(f"{QueueKind.BIN}/{queue.text}")


def mailbox_zone(mailbox: int) -> str:
    """Return the name of the zone that serves a mailbox, by the number of its row."""
    return f"{QueueKind.MAILBOX}/{mailbox}"


MAILBOXES = QueueName(QueueKind.MAILBOX.value, QueueKind.MAILBOX, QueueKind.MAILBOX.value, Priority.NORMAL)
"""All mailboxes together, in counts."""

_PRIORITIES = {each.value: each for each in Priority}
_KINDS = {each.value: each for each in (QueueKind.MAILBOX, QueueKind.WEBHOOK, QueueKind.BIN)}
