"""A batch: what the queue hands to a courier."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from zonerelay.config.settings import ZoneSettings
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.routing.destinations.route import Route


@dataclass(slots=True, eq=False)
class Batch:
    """Deliveries of one message that go to one destination in one transaction.

    `take_turn`: where there is a rate, the courier awaits it before each transaction; false means that the
    wait for a turn would be too long. `rcptdomainmax`: of how many domains on a connection the peer takes
    recipients (RFC 9422); the courier sets it to the limit that the latest peer announces. `more`: the next
    batch is likely to be for the same destination, and to come at once. `most_connections`: how many the
    hosts take at a time; the courier sets it when they have refused one more.
    """

    zone: ZoneSettings
    route: Route
    message: Message
    deliveries: tuple[Delivery, ...]
    take_turn: Callable[[], Awaitable[bool]] | None = None
    rcptdomainmax: int | None = None
    more: bool = False
    most_connections: int | None = None
