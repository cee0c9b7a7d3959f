"""The queue that each delivery of a `queue reroute` goes to. Pure.

Targets are zones of the configuration, so a next hop comes with its own TLS, log-in and sources: no log-in is
offered to another next hop than its own. TLS is not weakened: mail of a zone that demands more of it than the
target stays, unless the routes themselves choose the target. A row of the outbox stays in its zone.
"""

from __future__ import annotations

from collections import Counter

from zonerelay.config.endpoints import parse_next_hop, split_next_hops
from zonerelay.config.settings import TlsMode
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import is_row
from zonerelay.model.queue_name import QueueName, queue_of
from zonerelay.routing.zones.zones import DEFAULT_ZONE, Zones

_DEMAND = {TlsMode.NONE: 0, TlsMode.OPPORTUNISTIC: 1, TlsMode.REQUIRED: 2, TlsMode.VERIFY: 3, TlsMode.DANE: 3}


class RerouteError(Exception):
    """There is no such target. The text is for an operator."""


class Rerouting:
    """One act's. `left` counts, by reason, the deliveries that stay where they are."""

    def __init__(
        self, zones: Zones, *, to_zone: str = "", next_hop: str = "", ask_again: bool = False
    ) -> None:
        """Raises RerouteError."""
        if sum(map(bool, (to_zone, next_hop, ask_again))) != 1:
            raise RerouteError("reroute to where? Give one of a zone, a next hop, or that the routes choose")
        self._zones = zones
        self.needs_messages = ask_again
        self.left: Counter[str] = Counter()
        self.to_zone = _zone_of(zones, next_hop) if next_hop else to_zone
        if not ask_again and self.to_zone not in (*zones.names, DEFAULT_ZONE):
            named = ", ".join(zones.names) or DEFAULT_ZONE
            raise RerouteError(f"the configuration has no zone {to_zone}; it has {named}")

    @property
    def aim(self) -> str:
        return f"zone {self.to_zone}" if self.to_zone else "the zones that the routes choose"

    @property
    def note(self) -> str:
        """In words: the aim, and why some stay."""
        left = [f"{count:,} stay where they are: {why}" for why, count in self.left.most_common()]
        return "; ".join((f"to {self.aim}", *left))

    def target(self, delivery: Delivery, message: Message | None) -> QueueName:
        if is_row(delivery.message_id):
            return self._stays(delivery, "rows of the outbox")
        if not self.needs_messages:
            target, own = self._zones.get(self.to_zone), self._zones.get(delivery.zone)
            if delivery.zone in self._zones.names and _DEMAND[own.tls] > _DEMAND[target.tls]:
                why = f"zone {own.name} has tls = {own.tls.value}, {self.to_zone} only {target.tls.value}"
                return self._stays(delivery, why)
            return queue_of(self.to_zone, delivery.priority)
        if message is None:
            return self._stays(delivery, "their messages cannot be read")
        zone_of = self._zones.choose(message.envelope, headers=message.headers, size=message.size)
        choice = zone_of(delivery.recipient)
        return queue_of(choice.zone, choice.priority or message.envelope.priority)

    def _stays(self, delivery: Delivery, why: str) -> QueueName:
        self.left[why] += 1
        return delivery.queue


def _zone_of(zones: Zones, next_hop: str) -> str:
    """The one zone that has this next hop."""
    try:
        wanted = parse_next_hop(next_hop)
    except ValueError as error:
        raise RerouteError(str(error)) from error
    found = []
    for name in zones.names:
        hops = split_next_hops(zones.get(name).next_hop)
        # Several in a list are alternatives: mail would go to another one when the first does not answer.
        if len(hops) == 1 and parse_next_hop(hops[0]) == wanted:
            found.append(name)
    if len(found) > 1:
        raise RerouteError(f"the zones {', '.join(found)} have the next hop {next_hop}: choose with --zone")
    if not found:
        raise RerouteError(
            f'no zone has next_hop = "{next_hop}": add a [[zone]] with it, which says what TLS and log-in it'
            " needs, reload, and try again"
        )
    return found[0]
