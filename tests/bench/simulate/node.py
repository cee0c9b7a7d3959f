"""One relay of a simulation: the real scheduler, settler and retry policy, wired as the worker wires them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.bench.simulate.couriers import SimCourier, SimRouter, divided
from tests.bench.simulate.figures import Figures
from tests.bench.simulate.store import IndexedStore
from tests.bench.simulate.world import World
from zonerelay.config.models import BounceSettings, RetrySettings, ZoneSettings
from zonerelay.config.units import Rate
from zonerelay.inbound.deliveries import first_due
from zonerelay.model.address import Mailbox
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Envelope, Message, Recipient
from zonerelay.model.message_id import MessageIdSource
from zonerelay.queue import retry as retries
from zonerelay.queue.scheduler import Scheduler
from zonerelay.queue.settle import Settler
from zonerelay.routing.nexthop import Limits
from zonerelay.routing.zones import Choice, ZoneOf
from zonerelay.telemetry.events import Events
from zonerelay.telemetry.metrics import Metrics
from zonerelay.telemetry.redact import Redactor

ZONE = "default"
TEXT = b"From: a@example.org\r\nSubject: hello\r\n\r\nThe body.\r\n"
_ALWAYS = Choice(ZONE, "")


def zone_of_node(zone: ZoneSettings, nodes: int) -> ZoneSettings:
    """A node's part of a zone whose limits are totals."""
    limits = divided(Limits.of_zone(zone), nodes)
    rate = zone.max_rate
    return replace(
        zone,
        max_connections=max(1, zone.max_connections // nodes),
        max_connections_per_destination=limits.max_connections,
        max_rate_per_destination=limits.max_rate,
        max_rate=None if rate is None else Rate(max(1, rate.count // nodes), rate.seconds),
    )


class Node:
    """`accept`, until everything has left; `stop` once."""

    def __init__(
        self,
        number: int,
        *,
        nodes: int,
        zone: ZoneSettings,
        retry: RetrySettings,
        bounce: BounceSettings,
        world: World,
        figures: Figures,
        clock: Clock,
    ) -> None:
        self.zone = zone_of_node(zone, nodes)
        self.clock = clock
        self.store = IndexedStore(figures.left)
        self.ids = MessageIdSource(clock, number)
        events = Events(figures, Metrics(), Redactor(b"k" * 32, enabled=False), clock)
        random = Random(world.random.getrandbits(64))
        usual = Limits.of_zone(zone)
        totals = {kind.name: kind.limits or usual for kind in world.kinds.values()}
        self.courier = SimCourier(world, clock, figures, totals=totals)
        self.settler = Settler(
            store=self.store,
            ids=self.ids,
            choose_zone=_choose_zone,
            retry=retries.build(retry, bounce, [self.zone], random=random, events=events),
            zones=[self.zone],
            bounce=bounce,
            hostname="relay.example.org",
            notify=self._notify,
            events=events,
            clock=clock,
        )
        self.scheduler = Scheduler(
            zones=[self.zone],
            store=self.store,
            router=SimRouter(world, clock, nodes),
            courier=self.courier,
            settler=self.settler,
            retry_settings=retry,
            events=events,
            clock=clock,
            random=random,
        )

    def _notify(self, zone: str) -> None:
        # The settler is built first, as in the worker.
        self.scheduler.notify(zone)

    def accept(self, sender: str, recipients: list[str], *, due: float = 0.0) -> None:
        """A message is durable; `due`: it was deferred until then by somebody else."""
        now = self.clock.now()
        identity = self.ids.next()
        addresses = [Mailbox(recipient) for recipient in recipients]
        envelope = Envelope(
            id=identity,
            sender=Mailbox(sender),
            recipients=tuple(Recipient(address=address) for address in addresses),
            created=now,
        )
        message = Message(envelope=envelope, size=len(TEXT), chunks=1)
        first = first_due(envelope, due)
        deliveries = [
            Delivery(queue=ZONE, message_id=identity, recipient=address, created=now, next_attempt=first)
            for address in addresses
        ]
        self.store.add(message, [TEXT], deliveries)
        self.scheduler.notify(ZONE, due)

    async def stop(self) -> None:
        await self.scheduler.stop(0.0)
        await self.settler.close()
        await self.courier.close()


def _choose_zone(envelope: Envelope, /, *, headers: object, size: int) -> ZoneOf:
    del envelope, headers, size
    return lambda recipient: _ALWAYS
