"""The contract between the queue, routing and delivery.

The queue imports neither delivery nor inbound: they satisfy the protocols that are declared here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from zonerelay.config.settings import ZoneSettings
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.outcome import Outcome
from zonerelay.model.queue_name import QueueName
from zonerelay.routing.destinations.route import Batch, Route, Unroutable
from zonerelay.store.contract import Submit

NotifyQueue = Callable[[QueueName], None]
"""`notify(queue)`: there may be something to claim. Cheap, synchronous, never raises."""


Told = tuple[Delivery, Outcome, float | None, bool]
"""A delivery, its outcome, the time of the next attempt, and whether it is held from here on."""


class Teller(Protocol):
    """Makes messages of our own that tell others of outcomes."""

    def outcomes(
        self, message: Message | None, told: Sequence[Told], *, destination: str, seconds: float | None
    ) -> list[Submit]:
        """Returns what belongs into the write that holds these outcomes. Raises nothing."""

    def notify(self) -> None:
        """That write is done."""


class Courier(Protocol):
    """Carries one batch to one of the route's hosts."""

    async def deliver(self, batch: Batch) -> Sequence[Outcome]:
        """Returns one outcome per delivery, in order. Outcomes of scope HOST mean that no host of the route
        answered.

        Raises CancelledError and ClaimLostError alone, both only while no peer has answered for a recipient:
        unknown trouble is a deferral.
        """


class Router(Protocol):
    """Finds the hosts for a domain."""

    async def route(self, zone: ZoneSettings, domain: str) -> Route | Unroutable:
        """Returns the hosts for a domain, from a cache while it is fresh. Raises nothing but CancelledError.

        A zone with a `next_hop` has one route for every domain; the scheduler then passes `""`.
        """
