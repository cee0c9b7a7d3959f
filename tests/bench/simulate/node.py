"""One relay of a simulation: the real scheduler, settler and retry policy, wired as the worker wires them."""

import asyncio
from collections.abc import Callable
from random import Random

from tests.bench.simulate.couriers import SimCourier, SimRouter
from tests.bench.simulate.figures import Figures
from tests.bench.simulate.store import IndexedStore
from tests.bench.simulate.world import World
from tests.support.limits import MemoryAuthority
from zonerelay.config.settings import BounceSettings, RetrySettings, ZoneSettings
from zonerelay.inbound.cleanup.intake import first_due
from zonerelay.limits.authority import LimitAnswer, LimitRequest, LimitTable
from zonerelay.limits.worker import LimitKeeper
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import Envelope, Mailbox, Message, MessageIdSource, Priority, Recipient
from zonerelay.queue.scheduler import Scheduler
from zonerelay.queue.settle import retry as retries
from zonerelay.queue.settle.bounces import DsnMaker
from zonerelay.queue.settle.settler import Settler, SettlerCallbacks
from zonerelay.queue.zone.zone import ZoneParts
from zonerelay.routing.destinations.route import DestinationLimits
from zonerelay.routing.zones.zones import ZoneChoice, ZoneOf
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.metrics import Metrics

ONE_WAY = (0.0003, 0.003)
"""Seconds, from–to: between a socket of the machine and a server beside it that syncs each write."""


class DistantAuthority:
    """A table that is asked from afar."""

    name = "the table of the simulation"
    lease = None

    def __init__(self, table: LimitTable, owner: str, random: Random) -> None:
        self._near = MemoryAuthority(table, owner)
        self._random = random

    async def start(
        self, news: Callable[[str], None], back: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        loop = asyncio.get_running_loop()

        def tell(zone: str) -> None:
            loop.call_later(self._way(), news, zone)

        await self._near.start(tell, back, gone)

    async def exchange(self, zone: str, request: LimitRequest) -> LimitAnswer:
        await asyncio.sleep(self._way())
        answer = await self._near.exchange(zone, request)
        await asyncio.sleep(self._way())
        return answer

    async def close(self) -> None:
        await self._near.close()

    def _way(self) -> float:
        least, most = ONE_WAY
        return least + (most - least) * self._random.random()


class KeeperEvents(Events):
    """What a node's keeper tells of."""

    def __init__(self, figures: Figures, clock: Clock) -> None:
        super().__init__(figures, Metrics(), Redactor(b"k" * 32, enabled=False), clock)
        self.figures = figures

    def limit_waited(self, seconds: float) -> None:
        self.figures.leases.add(seconds)

    def limits_lost(self, authority: str, reason: str) -> None:
        self.figures.fault(f"{authority} is out of reach: {reason}")


ZONE = "default"
TEXT = b"From: a@example.org\r\nSubject: hello\r\n\r\nThe body.\r\n"
_ALWAYS = ZoneChoice(ZONE, "")


class Node:
    """`start`, then `accept` until everything has left; `stop` once. One that died may start again, with the
    same store.
    """

    def __init__(
        self,
        number: int,
        *,
        zone: ZoneSettings,
        retry: RetrySettings,
        bounce: BounceSettings,
        world: World,
        figures: Figures,
        clock: Clock,
        table: LimitTable | None,
    ) -> None:
        self.zone = zone
        self.clock = clock
        self.alive = False
        self.store = IndexedStore(figures.left)
        self.ids = MessageIdSource(clock, number)
        self._number = number
        self._retry, self._bounce = retry, bounce
        self._world, self._figures = world, figures
        self._random = Random(world.random.getrandbits(64))
        self._table = table
        self._lives = 0
        self._build()

    def _build(self) -> None:
        """All that a process has in memory."""
        world, figures, clock, zone = self._world, self._figures, self.clock, self.zone
        events = Events(figures, Metrics(), Redactor(b"k" * 32, enabled=False), clock)
        self.keeper = self._keeper()
        usual = DestinationLimits.of_zone(zone)
        self.courier = SimCourier(
            world,
            clock,
            figures,
            totals={kind.name: kind.limits or usual for kind in world.kinds.values()},
            shared=None if self.keeper is None else self.keeper.zone,
        )
        self.settler = Settler(
            store=self.store,
            dsn_maker=DsnMaker(
                store=self.store,
                ids=self.ids,
                choose_zone=_choose_zone,
                hostname="relay.example.org",
                events=events,
                clock=clock,
            ),
            retry=retries.build(self._retry, self._bounce, [zone], random=self._random, events=events),
            zones=[zone],
            bounce=self._bounce,
            events=events,
            clock=clock,
            callbacks=SettlerCallbacks(postponed=lambda queue, when: self.scheduler.postponed(queue, when)),
        )
        self.scheduler = Scheduler(
            [zone],
            ZoneParts(
                store=self.store,
                route=SimRouter(world, clock).route,
                deliver=self.courier.deliver,
                settler=self.settler,
                retry=self._retry,
                events=events,
                clock=clock,
                random=self._random,
                limits=self.keeper,
            ),
        )
        self.store.on_stored = self.scheduler.stored

    def _keeper(self) -> LimitKeeper | None:
        """Alone a relay goes by the limits as they are written."""
        if self._table is None:
            return None
        self._lives += 1
        authority = DistantAuthority(self._table, f"node{self._number}.{self._lives}", self._random)
        events = KeeperEvents(self._figures, self.clock)
        return LimitKeeper(
            authority,
            self.clock,
            events,
            granted=self.granted,
            relieve=lambda zone: self.courier.relieve(zone),
        )

    async def start(self) -> None:
        self.alive = True
        if self.keeper is not None:
            await self.keeper.start()
        await self.scheduler.start()

    async def stop(self) -> None:
        """In the middle of its transactions."""
        self.alive = False
        await self.scheduler.stop(0.0)
        await self.settler.close()
        await self.courier.close()
        if self.keeper is not None:
            await self.keeper.close()

    async def start_again(self) -> None:
        self.store.forget_claims()
        self._build()
        await self.start()

    # What the keeper tells

    def granted(self, zone: str) -> None:
        self.scheduler.granted(zone)
        self.courier.granted()

    # Mail

    def accept(
        self, sender: str, recipients: list[str], *, due: float = 0.0, priority: Priority = Priority.NORMAL
    ) -> None:
        """A message is durable; `due`: it was deferred until then by somebody else."""
        now = self.clock.now()
        identity = self.ids.next()
        addresses = [Mailbox(recipient) for recipient in recipients]
        envelope = Envelope(
            id=identity,
            sender=Mailbox(sender),
            recipients=tuple(Recipient(address=address) for address in addresses),
            created=now,
            priority=priority,
        )
        message = Message(envelope=envelope, size=len(TEXT), chunks=1)
        first = first_due(envelope, due)
        queue = queue_of(ZONE, priority)
        deliveries = [
            Delivery(queue=queue, message_id=identity, recipient=address, created=now, next_attempt=first)
            for address in addresses
        ]
        self.store.add(message, [TEXT], deliveries)


def _choose_zone(envelope: Envelope, /, *, headers: object, size: int, named: str = "") -> ZoneOf:
    del envelope, headers, size
    return lambda recipient: _ALWAYS
