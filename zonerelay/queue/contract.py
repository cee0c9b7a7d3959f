"""The contract between the queue, routing and delivery.

The queue imports neither delivery nor inbound: they satisfy the protocols that are declared here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from zonerelay.config.settings import ZoneSettings
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.outcome import Outcome
from zonerelay.queue.selection.turn import Turn
from zonerelay.routing.destinations.nexthop import Route, Unroutable

NotifyZone = Callable[[str], None]
"""`notify(zone)`: there may be something to claim. Cheap, synchronous, never raises."""


@dataclass(slots=True, eq=False)
class Batch:
    """Deliveries of one message that go to one destination in one transaction.

    Where there is a `turn`, it is taken before each transaction. `rcptdomainmax`: of how many domains on a
    connection the peer takes recipients (RFC 9422), where it has announced that. `more`: the next batch is
    likely to be for the same destination, and to come at once.
    """

    zone: ZoneSettings
    route: Route
    message: Message
    deliveries: tuple[Delivery, ...]
    turn: Turn | None = None
    rcptdomainmax: int | None = None
    more: bool = False


class Courier(Protocol):
    """Carries one batch to one of the route's hosts."""

    async def deliver(self, batch: Batch) -> Sequence[Outcome]:
        """Returns one outcome per delivery, in order. Raises nothing but CancelledError: unknown trouble
        is a deferral. Outcomes of scope HOST mean that no host of the route answered.
        """


class Router(Protocol):
    """Finds the hosts for a domain."""

    async def route(self, zone: ZoneSettings, domain: str) -> Route | Unroutable:
        """Returns the hosts for a domain, from a cache while it is fresh. Raises nothing but CancelledError.

        A zone with a `next_hop` has one route for every domain; the scheduler then passes `""`.
        """
