"""What a peer takes in one transaction and on one connection (LIMITS, RFC 9422).

MAILMAX is `Session.max_transactions`. RCPTDOMAINMAX counts the domains of all recipients that were named on a
connection (RFC 9422 4.3), whether they were accepted or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from zonerelay.delivery.session import Session
from zonerelay.model.delivery import Delivery


def within_limits(session: Session, deliveries: Sequence[Delivery], wanted: list[int]) -> list[int]:
    """Who of `wanted` may be asked in the next transaction; nobody when this connection is no use to them."""
    limits = session.capabilities.limits
    if limits.rcptdomainmax is not None:
        wanted = _of_few_domains(session.domains, deliveries, wanted, limits.rcptdomainmax)
    return wanted if limits.rcptmax is None else wanted[: limits.rcptmax]


def _of_few_domains(
    domains: set[str], deliveries: Sequence[Delivery], wanted: list[int], most: int
) -> list[int]:
    """Those whose domain is among the connection's; first come, first served while there is room for more."""
    chosen = []
    for index in wanted:
        domain = deliveries[index].domain
        if len(domains) < most:
            domains.add(domain)
        if domain in domains:
            chosen.append(index)
    return chosen
