"""The contract between the queue, routing and delivery.

The queue imports neither delivery nor inbound: they satisfy the protocols that are declared here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from zonerelay.config.settings import ZoneSettings
from zonerelay.model.outcome import Outcome
from zonerelay.routing.destinations.batch import Batch
from zonerelay.routing.destinations.route import Route, Unroutable

NotifyZone = Callable[[str], None]
"""`notify(zone)`: there may be something to claim. Cheap, synchronous, never raises."""


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
