"""In which order the hosts of a route are tried: by preference, and what is dead after everything else.

Equal ones are shuffled (RFC 5321 5.1); in a zone that shares its mail between next hops each batch has one of
the equal ones to begin with, and idle connections to it alone (`ConnectionKey.host`).
"""

from __future__ import annotations

import random as random_module
from collections import OrderedDict
from collections.abc import Iterator
from itertools import groupby

from zonerelay.delivery.peer.connection_key import Terms
from zonerelay.delivery.peer.sockets import HostTrouble, display_address
from zonerelay.model.clock import Clock
from zonerelay.routing.destinations.nexthop import MxHost, Route

FIRST_PAUSE = 30.0
LONGEST_PAUSE = 600.0

PROBE_TIME = 60.0
"""How long the batch that tries a host again keeps others from it, should it never report back."""

MAX_REMEMBERED = 10_000


class _Down:
    __slots__ = ("failures", "probed", "until")

    def __init__(self) -> None:
        self.failures = 0
        self.probed = True
        self.until = 0.0


class DeadHosts:
    """One per worker. As a condition: whether anything is down at all."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._down: OrderedDict[str, _Down] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._down)

    def is_down(self, key: str) -> bool:
        """Whether to try others first. When its time is over the first to ask is its probe, and told no."""
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
        """The same for who only wants to know, and tries nothing."""
        down = self._down.get(key)
        return down is not None and self._clock.monotonic() < down.until

    def failed(self, key: str) -> None:
        """Ten connections that fail together are one failure, not ten doublings."""
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
        """One of the most preferred hosts that are not known to be dead, for `ConnectionKey.host`."""
        most = route.hosts[0].preference if route.hosts else 0
        best = [_name(host) for host in route.hosts if host.preference == most]
        if self._dead_hosts:
            best = [name for name in best if not self._dead_hosts.looks_down(name)] or best
        return self._random.choice(best) if best else ""

    def hosts(self, terms: Terms) -> Iterator[MxHost]:
        first = terms.key.host
        for _, equal in groupby(terms.route.hosts, key=lambda host: host.preference):
            group = list(equal)
            self._random.shuffle(group)
            if first:
                group.sort(key=lambda host: _name(host) != first)
            yield from group

    def is_down(self, host: MxHost, ip: str) -> bool:
        """Whether to try it last. To be asked right before it is tried: see `DeadHosts.is_down`."""
        return bool(self._dead_hosts) and self._dead_hosts.is_down(display_address(ip, host.port))

    def talked(self, host: MxHost, ip: str) -> None:
        """It was connected to, and answered like a mail server."""
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
