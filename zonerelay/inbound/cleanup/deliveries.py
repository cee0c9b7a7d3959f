"""Makes one delivery for each recipient of a message, in the recipient's zone. No I/O.

The policy's choice of a zone comes first, then the message's own (a zone header), then the routes'.

Mail for more than `MANY` recipients is not fresh: it is stored as if it had come due before it was accepted.
The queue alternates between fresh and due mail, so a list of a million recipients does not delay all other
mail. The same holds for senders of very many messages while the queue is long (`limits/bursts`).

Mail that the mode of a user captures goes to the zone that captures. Without such a zone it is held: it stays
in the queue until an operator releases or drops it.
"""

from __future__ import annotations

from zonerelay.inbound.limits.connections import MANY, Bursts
from zonerelay.inbound.state.transaction import Transaction
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Envelope
from zonerelay.model.queue_name import queue_of
from zonerelay.routing.zones.zones import Choice, ZoneOf, zone_notes

BY_POLICY = "policy"
BY_MODE = "mode"
OVERDUE = 1.0
"""Seconds for which such mail has been due at its acceptance. A due time of that moment is a sender's."""


def first_due(envelope: Envelope, release: float = 0.0) -> float:
    """Return the Unix time of the first attempt; 0.0 means at once, before deferred mail."""
    if release:
        return release
    return envelope.created - OVERDUE if len(envelope.recipients) > MANY else 0.0


def deliveries_of(
    envelope: Envelope,
    transaction: Transaction,
    zone_of: ZoneOf,
    bursts: Bursts | None = None,
    capture_zone: str = "",
) -> tuple[list[Delivery], tuple[str, ...]]:
    """Return the deliveries, and notes for the trace that say what chose which zone.

    The age of a message with a time of release counts from that time, for retries and reports.
    """
    born = max(envelope.created, transaction.release)
    due = first_due(envelope, transaction.release)
    if not due and bursts is not None and bursts.is_over(envelope):
        due = envelope.created - OVERDUE
    allowance = transaction.allowance
    deliveries: list[Delivery] = []
    choices: list[tuple[str, Choice]] = []
    for recipient in envelope.recipients:
        zone = transaction.zone_of(recipient.address)
        choice = Choice(zone, BY_POLICY) if zone else zone_of(recipient.address)
        captured = allowance is not None and allowance.is_captured(recipient.address)
        if captured and capture_zone:
            choice = Choice(capture_zone, BY_MODE)
        if choice.why:
            choices.append((recipient.address, choice))
        deliveries.append(
            Delivery(
                queue=queue_of(choice.zone, choice.priority or envelope.priority),
                message_id=envelope.id,
                recipient=recipient.address,
                created=born,
                next_attempt=due,
                held=captured and not capture_zone,
                notify=recipient.notify,
                orcpt=recipient.orcpt,
            )
        )
    return deliveries, zone_notes(choices) if choices else ()
