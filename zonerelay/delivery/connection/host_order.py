"""Orders the hosts of a route: by preference, dead hosts last.

Equal hosts are shuffled (RFC 5321 5.1). In a zone that shares its mail between next hops each batch begins
with one of the equal hosts and uses idle connections to that host only (`ConnectionKey.host`).

    up ──connecting fails, or the greeting is bad──▶ down for 30 s ──▶ a probe ──it talks──▶ up
                                                        ▲                 │
                                                        └── twice as long, up to 10 minutes

The state is kept for each address (`ip:port`) and, for the choice between hosts before their look-up, for
each `name:port`. While the time of an address runs, and while its probe is under way, the address is tried
after all others. When its time is over, one batch tries it in its usual place. No address is ever left out:
with every address down mail is tried as if none were.

The module does no I/O. Of more than `MAX_REMEMBERED` dead hosts the ones that failed longest ago are
forgotten.
"""

from __future__ import annotations

import random as random_module
from collections import OrderedDict
from collections.abc import Iterator
from itertools import groupby

from zonerelay.delivery.peer.connection_key import Terms
from zonerelay.delivery.peer.sockets import HostTrouble, display_address
from zonerelay.model.clock import Clock
from zonerelay.routing.destinations.route import MxHost, Route

FIRST_PAUSE = 30.0
LONGEST_PAUSE = 600.0

PROBE_TIME = 60.0
"""Seconds for which a probe keeps other batches from the host, should the probe never report."""

MAX_REMEMBERED = 10_000


class _Down:
    __slots__ = ("failures", "probed", "until")

    def __init__(self) -> None:
        self.failures = 0
        self.probed = True
        self.until = 0.0


class DeadHosts:
    """One per worker. False as a condition while no host is down."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._down: OrderedDict[str, _Down] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._down)

    def is_down(self, key: str) -> bool:
        """True when other hosts go first. After the host's time the first call is its probe and returns
        false.
        """
        down = self._down.get(key)
        if down is None:
            return False
        now = self._clock.monotonic()
        if now < down.until:
            return True
        down.probed = True
        down.until = now + PROBE_TIME
        return False

    def looks_down(self, key: str) -> bool:
        """Returns the same as `is_down` without starting a probe."""
        down = self._down.get(key)
        return down is not None and self._clock.monotonic() < down.until

    def failed(self, key: str) -> None:
        """Notes a failure. Connections that fail together count as one failure, not as several doublings."""
        now = self._clock.monotonic()
        down = self._down.get(key)
        if down is None:
            down = self._down[key] = _Down()
            if len(self._down) > MAX_REMEMBERED:
                self._down.popitem(last=False)
        if down.probed or now >= down.until:
            self._down.move_to_end(key)
            down.probed = False
            down.until = now + _pause(down.failures)
            down.failures += 1

    def talked(self, key: str) -> None:
        self._down.pop(key, None)


def _pause(failures: int) -> float:
    return min(FIRST_PAUSE * 2.0 ** min(failures, 30), LONGEST_PAUSE)


class HostOrder:
    """One per worker."""

    def __init__(self, clock: Clock, random: random_module.Random) -> None:
        self._random = random
        self._dead_hosts = DeadHosts(clock)

    def first_of(self, route: Route) -> str:
        """Returns one of the most preferred hosts that are not known to be dead, for `ConnectionKey.host`."""
        most = route.hosts[0].preference if route.hosts else 0
        best = [_name(host) for host in route.hosts if host.preference == most]
        if self._dead_hosts:
            best = [name for name in best if not self._dead_hosts.looks_down(name)] or best
        return self._random.choice(best) if best else ""

    def hosts(self, terms: Terms, again: str = "") -> Iterator[MxHost]:
        """Yields the route's hosts in the order in which they are tried, the one named `again` first."""
        yield from (host for host in terms.route.hosts if again and host.name == again)
        first = terms.key.host
        for _, equal in groupby(terms.route.hosts, key=lambda host: host.preference):
            group = list(equal)
            self._random.shuffle(group)
            if first:
                group.sort(key=lambda host: _name(host) != first)
            yield from (host for host in group if host.name != again)

    def is_down(self, host: MxHost, ip: str) -> bool:
        """True when the address is tried last. Call it right before the attempt: see `DeadHosts.is_down`."""
        return bool(self._dead_hosts) and self._dead_hosts.is_down(display_address(ip, host.port))

    def talked(self, host: MxHost, ip: str) -> None:
        """Notes that the host accepted a connection and answered like a mail server."""
        if self._dead_hosts:
            for key in _keys(host, ip):
                self._dead_hosts.talked(key)

    def troubled(self, host: MxHost, ip: str, trouble: HostTrouble) -> None:
        if trouble.down:
            for key in _keys(host, ip):
                self._dead_hosts.failed(key)
        elif trouble.asked:
            self.talked(host, ip)


def _name(host: MxHost) -> str:
    return display_address(host.name, host.port)


def _keys(host: MxHost, ip: str) -> set[str]:
    return {display_address(ip, host.port), _name(host)}
