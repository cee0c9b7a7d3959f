"""In which order the hosts of a route are tried: by preference, and what is dead after everything else.

Equal ones are shuffled (RFC 5321 5.1); in a zone that shares its mail between next hops each batch has one of
the equal ones to begin with, and idle connections to it alone (`ConnectionKey.host`).
"""

from __future__ import annotations

import random as random_module
from collections.abc import Iterator
from itertools import groupby

from zonerelay.delivery.connection.dead_hosts import Health
from zonerelay.delivery.peer.connection_key import Terms
from zonerelay.delivery.peer.sockets import HostTrouble, display_address
from zonerelay.model.clock import Clock
from zonerelay.routing.destinations.nexthop import MxHost, Route


class HostOrder:
    """One per worker."""

    def __init__(self, clock: Clock, random: random_module.Random) -> None:
        self._random = random
        self._health = Health(clock)

    def first_of(self, route: Route) -> str:
        """One of the most preferred hosts that are not known to be dead, for `ConnectionKey.host`."""
        most = route.hosts[0].preference if route.hosts else 0
        best = [_name(host) for host in route.hosts if host.preference == most]
        if self._health:
            best = [name for name in best if not self._health.looks_down(name)] or best
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
        """Whether to try it last. To be asked right before it is tried: see `Health.is_down`."""
        return bool(self._health) and self._health.is_down(display_address(ip, host.port))

    def talked(self, host: MxHost, ip: str) -> None:
        """It was connected to, and answered like a mail server."""
        if self._health:
            for key in _keys(host, ip):
                self._health.talked(key)

    def troubled(self, host: MxHost, ip: str, trouble: HostTrouble) -> None:
        if trouble.down:
            for key in _keys(host, ip):
                self._health.failed(key)
        elif trouble.asked:
            self.talked(host, ip)


def _name(host: MxHost) -> str:
    return display_address(host.name, host.port)


def _keys(host: MxHost, ip: str) -> set[str]:
    return {display_address(ip, host.port), _name(host)}
