"""A courier and a router without a network. Connections are counted by the relay's own pool and slots.

Of delivery/courier.py this has: idle connections are used first, a closed one is replaced at no cost, a host
that does not answer is a failure of scope HOST, each transaction takes its turn at the rates. It has no
second host for a domain, no TLS, sources and log-ins: none of it decides when mail goes.
"""

import asyncio
from collections.abc import Sequence
from typing import cast

from tests.bench.simulate.figures import Figures
from tests.bench.simulate.world import NO_DNS, TAKEN, Site, World
from zonerelay.config.settings import ZoneSettings
from zonerelay.delivery.connection.pool import AllowanceOf, ConnectionPool
from zonerelay.delivery.connection.session import ClientProtocol, OutgoingSession, Slot
from zonerelay.delivery.peer import Terms
from zonerelay.model.clock import Clock
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.routing.destinations.route import Batch, DestinationLimits, MxHost, Route, Unroutable
from zonerelay.smtp.client.extensions import Capabilities
from zonerelay.smtp.client.transaction import Peer

TTL = 3600.0
NO_TURN = Outcome(Verdict.DEFERRED, Reply(451, "4.5", "no turn soon"), Scope.LOCAL, local=True, counts=False)
LOST = Outcome(Verdict.DEFERRED, Reply(451, "4.2", "connection lost"), Scope.MESSAGE, local=True)


class SimRouter:
    """Every domain has hosts, but for kinds whose name servers are dead."""

    def __init__(self, world: World, clock: Clock) -> None:
        self._world = world
        self._clock = clock

    async def route(self, zone: ZoneSettings, domain: str) -> Route | Unroutable:
        kind = self._world.kind_of(domain)
        await asyncio.sleep(kind.look_up)
        expires = self._clock.now() + TTL
        if kind.no_dns:
            return Unroutable(zone.name, domain, NO_DNS, self._clock.now() + 60.0)
        host = self._world.site_name(domain)
        limits = kind.limits
        terms = "" if limits is None else f"destination[{kind.name}]"
        return Route(zone.name, host, (MxHost(host, 25),), expires, limits=limits, terms=terms)


class _Connection:
    """What the pool needs of a protocol."""

    __slots__ = ("_delay", "_figures", "_site", "_slot", "idle", "usable")

    def __init__(self, site: Site, slot: Slot, delay: float, figures: Figures) -> None:
        self._site = site
        self._figures = figures
        self._slot = slot
        self._delay = delay
        self.usable = True
        self.idle = False

    def quit(self, timeout: float) -> None:
        """QUIT and its answer take a round trip."""
        asyncio.get_running_loop().call_later(min(self._delay, timeout), self.abort)

    def abort(self) -> None:
        if not self._slot.released:
            self._figures.closed(self._site)
            self._slot.release()


class SimCourier:
    """One node's. `totals`: the limits that hold for all nodes together; `shared`: what it may use of them,
    where there are several.
    """

    def __init__(
        self,
        world: World,
        clock: Clock,
        figures: Figures,
        *,
        totals: dict[str, DestinationLimits],
        shared: AllowanceOf | None = None,
    ) -> None:
        self._world = world
        self._clock = clock
        self._figures = figures
        self._totals = totals
        self._pool = ConnectionPool(quit_timeout=1.0, shared=shared)

    async def deliver(self, batch: Batch) -> Sequence[Outcome]:
        self._figures.begun(batch.deliveries)
        outcomes: Sequence[Outcome] = ()
        try:
            outcomes = await self._carry(batch)
        finally:
            self._figures.ended(batch.deliveries, outcomes)
        return outcomes

    def granted(self) -> None:
        self._pool.wake()

    def relieve(self, zone: str) -> None:
        self._pool.relieve(zone)

    async def close(self) -> None:
        await self._pool.close()

    async def _carry(self, batch: Batch) -> Sequence[Outcome]:
        terms = Terms(batch.zone, batch.route)
        site = self._world.site(batch.route.name)
        session = self._pool.take(terms)
        if session is not None and site.is_down(self._clock.monotonic()):
            session.protocol.abort()
            session = None
        if session is None:
            got = await self._connected(terms, site)
            if isinstance(got, Outcome):
                return [got] * len(batch.deliveries)
            session = got
        return await self._transact(batch, session, site)

    async def _connected(self, terms: Terms, site: Site) -> OutgoingSession | Outcome:
        asked = self._clock.monotonic()
        got = await self._pool.acquire(terms)
        self._figures.pool.add(self._clock.monotonic() - asked)
        if not isinstance(got, Slot):
            return got
        try:
            await asyncio.sleep(site.kind.connecting)
        except asyncio.CancelledError:
            got.release()
            raise
        trouble = site.greet(self._clock.monotonic())
        self._figures.connects += 1
        if trouble is not None:
            self._figures.failed_connects += 1
            got.release()
            return trouble
        self._figures.opened(site, self._totals[site.kind.name].max_connections, terms.zone.max_connections)
        # The pool asks a protocol for no more than this.
        protocol = cast(ClientProtocol, _Connection(site, got, site.kind.connecting / 2, self._figures))
        return OutgoingSession(protocol, Peer(site.name), Capabilities(), terms, got)

    async def _transact(self, batch: Batch, session: OutgoingSession, site: Site) -> Sequence[Outcome]:
        try:
            return await self._talk(batch, session, site)
        except asyncio.CancelledError:
            session.protocol.abort()
            raise

    async def _talk(self, batch: Batch, session: OutgoingSession, site: Site) -> Sequence[Outcome]:
        if batch.take_turn is not None and not await batch.take_turn():
            self._pool.give_back(session)
            return [NO_TURN] * len(batch.deliveries)
        rate = self._totals[site.kind.name].max_rate
        if rate is not None:
            self._figures.spoke(site, rate)
        session.transactions += 1
        self._figures.transactions += 1
        least, most = site.kind.seconds
        await asyncio.sleep(least + (most - least) * self._world.random.random())
        if site.is_down(self._clock.monotonic()):
            session.protocol.abort()
            return [LOST] * len(batch.deliveries)
        outcomes = self._answers(batch, site)
        if site.kind.silent:
            session.protocol.abort()
        else:
            self._pool.give_back(session, more=batch.more)
        return outcomes

    def _answers(self, batch: Batch, site: Site) -> list[Outcome]:
        now, tick, random = self._clock.now(), self._clock.monotonic(), self._world.random
        outcomes = [
            site.answer(delivery, tick, now - delivery.created, random) for delivery in batch.deliveries
        ]
        site.taken += outcomes.count(TAKEN)
        return outcomes
