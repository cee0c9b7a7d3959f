"""What a peer takes in one transaction and on one connection (LIMITS, RFC 9422).

MAILMAX is `Session.max_transactions`. RCPTDOMAINMAX counts the domains of all recipients that were named on a
connection (RFC 9422 4.3), whether they were accepted or not.

A host that announces no RCPTDOMAINMAX is sent one domain in a transaction, unless the zone says that domains
mix: of several, Google takes the first and answers 451 4.3.0 for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from zonerelay.config.settings import ZoneSettings
from zonerelay.delivery.connection.session import Session
from zonerelay.model.delivery import Delivery


def within_limits(
    session: Session, zone: ZoneSettings, deliveries: Sequence[Delivery], wanted: list[int]
) -> list[int]:
    """Who of `wanted` may be asked in the next transaction; nobody when this connection is no use to them."""
    limits = session.capabilities.limits
    most = limits.rcptdomainmax
    if not mixes(zone, most):
        wanted = _of_one_domain(session.domains, deliveries, wanted, most)
    elif most is not None:
        wanted = _of_few_domains(session.domains, deliveries, wanted, most)
    return wanted if limits.rcptmax is None else wanted[: limits.rcptmax]


def mixes(zone: ZoneSettings, rcptdomainmax: int | None) -> bool:
    """Recipients in several domains may share a transaction, at a host that announces this limit or none."""
    return zone.mixes_domains or (zone.mix_domains is None and rcptdomainmax is not None)


def _of_few_domains(
    domains: set[str], deliveries: Sequence[Delivery], wanted: list[int], most: int
) -> list[int]:
    """Those whose domain is among the connection's; first come, first served while there is room for more."""
    return [index for index in wanted if _has_room(domains, deliveries[index].domain, most)]


def _of_one_domain(
    domains: set[str], deliveries: Sequence[Delivery], wanted: list[int], most: int | None
) -> list[int]:
    """Those in the first domain that the connection has room for."""
    if len(wanted) == 1 and most is None:  # as nearly always
        return wanted
    for index in wanted:
        domain = deliveries[index].domain
        if most is None or _has_room(domains, domain, most):
            return [each for each in wanted if deliveries[each].domain == domain]
    return []


def _has_room(domains: set[str], domain: str, most: int) -> bool:
    """The domain is one of the connection's, if need be from now on."""
    if len(domains) < most:
        domains.add(domain)
    return domain in domains
