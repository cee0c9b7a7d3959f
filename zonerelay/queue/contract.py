"""The contract between the queue, routing and delivery.

The queue imports neither delivery nor inbound. They implement the protocols that are declared here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zonerelay.config.settings import ZoneSettings
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.outcome import Outcome
from zonerelay.routing.destinations.route import Batch, Route, Unroutable
from zonerelay.store.contract import OwnMessage

Result = tuple[Delivery, Outcome, float | None, bool]
"""A delivery, its outcome, the time of its next attempt, and whether it is held from now on."""


class OutcomeReporter(Protocol):
    """Interface: creates the relay's own messages, such as webhook events, that report outcomes."""

    def outcomes(
        self,
        message: Message | None,
        reported: Sequence[Result],
        *,
        destination: str,
        seconds: float | None,
    ) -> list[OwnMessage]:
        """Return the messages to store in the same write as these outcomes. Never raises."""


class Courier(Protocol):
    """Interface: delivers a batch to one of the hosts of its route."""

    async def deliver(self, batch: Batch) -> Sequence[Outcome]:
        """Deliver a batch and return one outcome per delivery, in order. If all outcomes have the scope HOST,
        no host of the route answered.

        Only CancelledError and ClaimLostError are raised, and only while no peer has replied for a recipient.
        Any unexpected error becomes a deferral.
        """


class Router(Protocol):
    """Interface: finds the hosts for a domain."""

    async def route(self, zone: ZoneSettings, domain: str) -> Route | Unroutable:
        """Return the hosts for a domain, from a cache while the entry is fresh. Only CancelledError is
        raised.

        In a zone with a `next_hop` all domains have the same route; the scheduler then passes `""`.
        """
