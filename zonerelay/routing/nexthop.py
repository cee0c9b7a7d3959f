"""Values that say where mail for a domain goes, and how a configured next hop is written.

`Route` is the answer for one zone and one domain. Its `destination` is what limits and suspension apply
to: the zone and the set of hosts, so that domains hosted by one provider are one destination.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

from zonerelay.model.outcome import Outcome

DestinationKey = NewType("DestinationKey", str)


@dataclass(frozen=True, slots=True)
class MxHost:
    """One host to try: a name to resolve, or an IP address if `literal`. Low preferences are tried first."""

    name: str
    port: int
    preference: int = 0
    literal: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """`hosts` sorted by preference (equal ones are shuffled per attempt, RFC 5321 5.1).

    `name` is for people: the MX domain or the next hop as configured. `expires` is Unix time.
    """

    zone: str
    name: str
    hosts: tuple[MxHost, ...]
    expires: float
    destination: DestinationKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        hosts = ",".join(sorted(f"{host.name}:{host.port}" for host in self.hosts))
        # Frozen, and asked for with every message.
        object.__setattr__(self, "destination", DestinationKey(f"{self.zone} {hosts}"))


@dataclass(frozen=True, slots=True)
class Unroutable:
    """No host to try: `outcome` says why (bounced only where RFC 5321 and RFC 7505 say so).

    `expires` is Unix time: how long the answer may be reused for other mail to the domain.
    """

    zone: str
    name: str
    outcome: Outcome
    expires: float


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of one host, most wanted first; `failure` says why there are none."""

    ips: tuple[str, ...]
    failure: Outcome | None = None
