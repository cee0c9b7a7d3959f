"""The pool of connections between transactions: decides which stay idle and which are closed.

- The connection that became idle last is reused first, so that few connections stay in use and the others
  time out.
- A connection carries only mail of its own destination and connection key: the same TLS demand, source and
  login.
- An idle connection never prevents a new one from opening. When a limit is reached, the connection that has
  been idle longest is closed: at the same site if the site is full, otherwise in the zone. In the zone,
  connections that were used once go first, so that many hosts with one message each do not close the
  connections of other mail. Connections that expect `more` mail at once go last. One connection is closed for
  each waiter, not one at every check. If the host itself refuses one more connection, all idle ones to it are
  closed. If other workers wait for shared limits, connections that have been idle for `IN_THE_WAY` are
  closed, and a connection that another worker is to have is closed after its transaction.
- Free capacity in a zone goes to the batch that has waited longest.
- One alarm closes idle connections on time.
- A connection ends with QUIT, limited by `quit_timeout`. A connection on which the peer has sent unexpected
  bytes is not used again.

The scheduler starts no more batches than the limits allow. A batch beyond the limits waits here.

A *slot* is the right to have one connection. It is taken before connecting and released when the socket is
closed, so connecting, active, idle and closing connections all count. Destinations at the same hosts share a
site. A destination's limit counts the connections of all destinations at the site whose limit is no larger:
destinations with equal limits share the limit, a destination never exceeds its own, and all together never
exceed the largest. If several workers share the limits, an allowance determines this worker's share
(`limits/worker.py`). It is checked in addition, and is notified of every connection.
"""

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import islice

import msgspec

from zonerelay.delivery.connection.session import OutgoingSession, Slot
from zonerelay.delivery.peer import PoolKey, Terms
from zonerelay.limits.worker import ZoneAllowance
from zonerelay.model.delivery import queue_of
from zonerelay.process.tasks import Alarm
from zonerelay.routing.destinations.route import DestinationKey, Route, SiteKey

NOTICE_TIME = 0.3
"""Seconds that a host is given to notice closed connections."""

PATIENCE = 0.5
"""Seconds that a connection has to close before another one is closed as well."""

IN_THE_WAY = 0.3
"""Seconds for which a connection is idle before it is closed for another worker. Most connections are used
again sooner.
"""
LOOKED_AT = 100
"""The number of idle connections of which one is closed to make room for another."""

# Idle connections, in the order in which they became idle.
_Idle = dict[Slot, OutgoingSession]


AllowanceOf = Callable[[str], ZoneAllowance]
"""Returns this worker's allowance of a zone's limits, by the zone's name."""


class _DestinationSlots(msgspec.Struct):
    """The number of connections of one destination, and its limit at the last check."""

    limit: int = 0
    open: int = 0


class ConnectionPool:
    """The connection pool of one `SmtpCourier`. Belongs to one event loop. `shared` returns the allowances if
    other workers share the limits.
    """

    def __init__(self, *, quit_timeout: float, shared: AllowanceOf | None = None) -> None:
        self._quit_timeout = quit_timeout
        self._shared = shared
        self._open_in: Counter[str] = Counter()
        self._at_site: dict[SiteKey, dict[DestinationKey, _DestinationSlots]] = {}
        self._idle_of: dict[PoolKey, _Idle] = {}
        self._idle_in: defaultdict[str, _Idle] = defaultdict(dict)  # zones are few and stay
        self._closing: defaultdict[str, dict[Slot, float]] = defaultdict(dict)
        """The time since when each slot is closing."""
        self._changed = asyncio.Event()
        # Waiters for capacity in a zone, in order. Otherwise a later one would take what was freed for an
        # earlier one.
        self._lines: dict[str, dict[object, None]] = {}
        self._next_sweep = Alarm(lambda: asyncio.get_running_loop().time(), self._sweep)
        self._closed = False

    def open_connections(self, label: str) -> int:
        """Return the number of connections in all zones that have this label in metrics."""
        return sum(count for name, count in self._open_in.items() if queue_of(name).label == label)

    def open_at(self, terms: Terms) -> int:
        """Return the number of connections to the route's hosts, excluding those that are being closed."""
        site = terms.route.site
        closing = sum(slot.site == site for slot in self._closing[terms.zone.name])
        return sum(line.open for line in self._at_site.get(site, {}).values()) - closing

    async def next_idle(self, terms: Terms, timeout: float) -> OutgoingSession | None:
        """Wait until a connection is idle and return it, or return None when no connection to the hosts is
        open. Idle connections on other terms (another source address) are closed, because they count towards
        the host's limit.
        """
        try:
            async with asyncio.timeout(timeout):
                while (session := self.take(terms)) is None:
                    self._evict_at(terms.route)
                    if not self.open_at(terms):
                        break
                    await self._changed.wait()
        except TimeoutError:
            return None
        return session

    async def acquire(self, terms: Terms) -> OutgoingSession | Slot:
        """Return an idle connection, or a `Slot`, which is the right to open one. Wait while there is
        neither.
        """
        place = object()
        try:
            while (session := self.take(terms)) is None:
                if self._has_room(terms, place):
                    return self._slot(terms)
                await self._changed.wait()
            return session
        finally:
            self._leave_line(terms.zone.name, place)

    async def reserve(self, terms: Terms) -> Slot:
        """Wait until the limits allow another connection, and return the right to open it."""
        place = object()
        try:
            while not self._has_room(terms, place):
                await self._changed.wait()
            return self._slot(terms)
        finally:
            self._leave_line(terms.zone.name, place)

    def give_back(self, session: OutgoingSession, *, more: bool = False) -> None:
        """Return a connection to the pool after a transaction, or close it. `more` is true if the next
        transaction follows at once.

        Every command on the connection must have received its reply.
        """
        if not session.protocol.usable:
            session.protocol.abort()
        elif (
            self._closed
            or session.transactions >= session.max_transactions
            or not self._may_keep(session.slot)
        ):
            self._quit(session)
        else:
            self._keep(session, session.terms.zone.connection_idle_timeout, more=more)

    def abort(self, session: OutgoingSession) -> None:
        """Close a connection immediately, even if a command on it still waits for its reply."""
        if not session.slot.released:
            self._closing[session.slot.zone][session.slot] = asyncio.get_running_loop().time()
        session.protocol.abort()

    def relieve(self, zone: str) -> None:
        """Close idle connections of a zone whose slots other workers are waiting for."""
        if self._shared is None:
            return
        allowance = self._shared(zone)
        now = asyncio.get_running_loop().time()
        for slot, session in list(self._idle_in[zone].items()):
            since = session.idle_until - session.terms.zone.connection_idle_timeout
            if not self._may_keep(slot) or (
                since + IN_THE_WAY <= now and allowance.is_contended(slot.site, slot.line)
            ):
                self._dismiss(session)

    def close_idle(self) -> None:
        for idle in list(self._idle_in.values()):
            for session in list(idle.values()):
                self._dismiss(session)

    async def clear(self, route: Route) -> bool:
        """Close the idle connections to the route's hosts and wait until their sockets are closed. Return
        false if there were none.
        """
        there = self._idle_at(route)
        for session in there:
            self._dismiss(session)
        while not all(session.slot.released for session in there):
            await self._changed.wait()
        if there:
            await asyncio.sleep(NOTICE_TIME)
        return bool(there)

    async def close(self) -> None:
        """Close all idle connections and wait until they, and connections that were already closing, are
        closed. Active connections are closed when they are given back.
        """
        self._closed = True
        self.close_idle()
        closing = [slot for slots in self._closing.values() for slot in slots]
        self._next_sweep.cancel()
        with contextlib.suppress(TimeoutError):  # a stop must not depend on what ends a connection
            async with asyncio.timeout(2 * self._quit_timeout):
                while not all(slot.released for slot in closing):
                    await self._changed.wait()

    # Idle connections.

    def take(self, terms: Terms) -> OutgoingSession | None:
        """Remove an idle connection that fits these terms from the pool and return it, or return None."""
        pool_key = terms.pool_key
        while waiting := self._idle_of.get(pool_key):
            slot, session = waiting.popitem()
            if not waiting:
                del self._idle_of[pool_key]  # destinations come and go by the million
            del self._idle_in[slot.zone][slot]
            protocol = session.protocol
            protocol.idle = False
            if not protocol.usable:
                protocol.abort()
            elif session.suits(terms):
                return session
            else:  # it was opened under settings that have changed: TLS, names, source
                self._quit(session)
        return None

    def _keep(self, session: OutgoingSession, timeout: float, *, more: bool) -> None:
        slot = session.slot
        session.protocol.idle = True
        session.idle_until = asyncio.get_running_loop().time() + timeout
        waiting = self._idle_of.get(session.pool_key)
        if waiting is None:
            self._idle_of[session.pool_key] = {slot: session}
        else:
            waiting[slot] = session
        self._idle_in[slot.zone][slot] = session
        session.expects_more = more
        self._next_sweep.set(session.idle_until)
        self.wake()

    def _forget(self, session: OutgoingSession) -> None:
        slot = session.slot
        del self._idle_in[slot.zone][slot]
        waiting = self._idle_of[session.pool_key]
        del waiting[slot]
        if not waiting:
            del self._idle_of[session.pool_key]

    def _dismiss(self, session: OutgoingSession) -> None:
        self._forget(session)
        self._quit(session)

    def _quit(self, session: OutgoingSession) -> None:
        self._closing[session.slot.zone][session.slot] = asyncio.get_running_loop().time()
        session.protocol.quit(self._quit_timeout)

    def _sweep(self) -> None:
        """Close connections that have been idle too long. Within a zone the first is always the oldest."""
        now = asyncio.get_running_loop().time()
        for idle in list(self._idle_in.values()):
            for session in list(idle.values()):
                if session.idle_until > now:
                    self._next_sweep.set(session.idle_until)
                    break
                self._dismiss(session)

    # Limits.

    def _has_room(self, terms: Terms, place: object) -> bool:
        """Return whether a connection may be opened now. If not, try to close an idle connection.

        `place` is the caller's place in the zone's queue. The caller enters the queue when the zone is full
        and leaves it while another limit is reached, because it would only block others.
        """
        zone = terms.zone
        if self._site_is_full(terms):
            self._leave_line(zone.name, place)
            self._evict_at(terms.route)
            return False
        line = self._lines.get(zone.name)
        ahead = 0 if line is None else _ahead(line, place)
        # Free capacity belongs to the earlier waiters.
        lacking = self._open_in[zone.name] + ahead + 1 - zone.max_connections
        if lacking > 0:
            self._lines.setdefault(zone.name, {})[place] = None
            since = asyncio.get_running_loop().time() - PATIENCE
            if lacking > sum(began > since for began in self._closing[zone.name].values()):
                self._make_room(zone.name)
            return False
        if not self._is_allowed(terms):
            self._leave_line(zone.name, place)
            self._evict_at(terms.route)
            return False
        return True

    def _site_is_full(self, terms: Terms) -> bool:
        lines = self._at_site.get(terms.route.site)
        if lines is None:
            return False
        limit = terms.limits.max_connections
        own = lines.get(terms.route.destination)
        if own is not None:
            own.limit = limit
            if own.open >= limit:
                return True
            if len(lines) == 1:
                return False
        limits = {limit, *(line.limit for line in lines.values() if line.limit >= limit)}
        return any(sum(line.open for line in lines.values() if line.limit <= most) >= most for most in limits)

    def _is_allowed(self, terms: Terms) -> bool:
        """Return whether the limits that the workers share allow this worker another connection. A refusal
        records a request.
        """
        if self._shared is None:
            return True
        route, zone = terms.route, terms.zone
        return self._shared(zone.name).may_connect(
            route.site, route.destination, terms.limits.max_connections, zone.max_connections
        )

    def _may_keep(self, slot: Slot) -> bool:
        """Return false if a connection must be closed after its transaction because another worker needs its
        slot.
        """
        return self._shared is None or self._shared(slot.zone).may_keep(slot.site, slot.line)

    def _slot(self, terms: Terms) -> Slot:
        route = terms.route
        if self._shared is not None:
            self._shared(terms.zone.name).connected(route.site, route.destination)
        self._open_in[terms.zone.name] += 1
        line = self._at_site.setdefault(route.site, {}).setdefault(route.destination, _DestinationSlots())
        line.open += 1
        line.limit = terms.limits.max_connections
        return Slot(terms.zone.name, route.site, route.destination, self._on_release)

    def _leave_line(self, zone: str, place: object) -> None:
        line = self._lines.get(zone)
        if line is not None and line.pop(place, self) is None:
            if line:
                self.wake()
            else:
                del self._lines[zone]

    def _make_room(self, zone: str) -> None:
        if idle := self._idle_in.get(zone):
            longest = islice(idle.values(), LOOKED_AT)  # those that have been idle longest
            self._dismiss(min(longest, key=lambda each: (each.expects_more, each.transactions > 1)))

    def _evict_at(self, route: Route) -> None:
        """Close an idle connection to the route's hosts, preferably one of the same destination."""
        if there := self._idle_at(route):
            own = (session for session in there if session.slot.line == route.destination)
            self._dismiss(next(own, there[0]))

    def _idle_at(self, route: Route) -> list[OutgoingSession]:
        return [session for slot, session in self._idle_in[route.zone].items() if slot.site == route.site]

    def _on_release(self, slot: Slot) -> None:
        self._open_in[slot.zone] -= 1
        if not self._open_in[slot.zone]:
            del self._open_in[slot.zone]
        if self._shared is not None:
            self._shared(slot.zone).disconnected(slot.site, slot.line)
        lines = self._at_site[slot.site]
        lines[slot.line].open -= 1
        if not lines[slot.line].open:
            del lines[slot.line]
            if not lines:
                del self._at_site[slot.site]  # destinations come and go by the million
        session = self._idle_in[slot.zone].get(slot)
        if session is not None:
            self._forget(session)
        self._closing[slot.zone].pop(slot, None)
        self.wake()

    def wake(self) -> None:
        """Wake all tasks that wait for a connection, because this or another worker may have released one."""
        self._changed.set()
        self._changed.clear()


def _ahead(line: dict[object, None], place: object) -> int:
    """Return the number of waiting tasks before this place in the queue, or of all if it is not in it."""
    return next((number for number, each in enumerate(line) if each is place), len(line))
