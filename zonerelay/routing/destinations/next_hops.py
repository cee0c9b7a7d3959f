"""Several next hops of one zone as one route: in the order in which they are written, or sharing evenly.

A next hop that cannot be found is left out as long as another one can, and looked up again soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from msgspec import structs

from zonerelay.config.settings import ZoneSettings
from zonerelay.model.outcome import Scope
from zonerelay.model.reply import Reply
from zonerelay.routing.destinations.nexthop import MxHost, Route, Unroutable

STEP = 65_536
"""Preferences of MX records are below that (RFC 1035 3.3.9)."""


def one_route(zone: ZoneSettings, found: Sequence[Route | Unroutable], *, soon: float) -> Route | Unroutable:
    """`found`: what each next hop leads to, in order. `soon`: until when a route with gaps may be used."""
    routes = [each for each in found if isinstance(each, Route)]
    if not routes:
        return _none(zone, [each for each in found if isinstance(each, Unroutable)])
    expires = min(route.expires for route in routes)
    if len(routes) < len(found):
        expires = min(expires, soon)
    hosts = _shared(routes) if zone.next_hop_share else _ranked(routes)
    secure = all(route.secure for route in routes)
    return Route(zone.name, zone.next_hop, hosts, expires, secure=secure)


def _ranked(routes: Iterable[Route]) -> tuple[MxHost, ...]:
    """Each next hop's hosts after all those of the one before, by their own preferences."""
    return _once(
        structs.replace(host, preference=at * STEP + host.preference)
        for at, route in enumerate(routes)
        for host in route.hosts
    )


def _shared(routes: Iterable[Route]) -> tuple[MxHost, ...]:
    """The best hosts of each next hop are equal, then the second-best, as MX records rank them."""
    ranked = []
    for route in routes:
        ranks = sorted({host.preference for host in route.hosts})
        ranked += [structs.replace(host, preference=ranks.index(host.preference)) for host in route.hosts]
    return _once(sorted(ranked, key=lambda host: host.preference))


def _once(hosts: Iterable[MxHost]) -> tuple[MxHost, ...]:
    """A host that two next hops lead to is tried where it is wanted most."""
    first: dict[tuple[str, int], MxHost] = {}
    for host in hosts:
        first.setdefault((host.name, host.port), host)
    return tuple(first.values())


def _none(zone: ZoneSettings, found: Sequence[Unroutable]) -> Unroutable:
    text = "; ".join(each.outcome.reply.text for each in found)
    reply = Reply(451, found[0].outcome.reply.detail, text)
    outcome = replace(found[0].outcome, reply=reply, scope=Scope.LOCAL)
    return Unroutable(zone.name, zone.next_hop, outcome, min(each.expires for each in found))
