"""From a message to one delivery for each recipient, in the zone that somebody chose for it. No I/O.

The policy's choice comes first, then the message's own (a zone header), then the routes'.
"""

from __future__ import annotations

from zonerelay.inbound.transaction import Transaction
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Envelope
from zonerelay.model.priority import queue_of
from zonerelay.routing.zone_notes import zone_notes
from zonerelay.routing.zones import Choice, ZoneOf

BY_POLICY = "policy"


def deliveries_of(
    envelope: Envelope, transaction: Transaction, zone_of: ZoneOf
) -> tuple[list[Delivery], tuple[str, ...]]:
    """And notes for the trace on who chose which zone.

    A message with a time of release is born then: retries and reports count from it.
    """
    born = max(envelope.created, transaction.release)
    deliveries: list[Delivery] = []
    choices: list[tuple[str, Choice]] = []
    for recipient in envelope.recipients:
        zone = transaction.zone_of(recipient.address)
        choice = Choice(zone, BY_POLICY) if zone else zone_of(recipient.address)
        if choice.why:
            choices.append((recipient.address, choice))
        deliveries.append(
            Delivery(
                queue=queue_of(choice.zone, choice.priority or envelope.priority),
                message_id=envelope.id,
                recipient=recipient.address,
                created=born,
                next_attempt=transaction.release,
                notify=recipient.notify,
                orcpt=recipient.orcpt,
            )
        )
    return deliveries, zone_notes(choices) if choices else ()
