"""Values that say where mail for a domain goes, and on which terms.

`Route` is the answer for one zone and one domain. Its `site` is the zone and the set of hosts: what limits on
connections and rates count, so that domains hosted by one provider share them. Its `destination` is the line
that mail stands in, with its suspension and its idle connections: the site, and what makes mail for one
domain another thing than mail for its neighbour at the same hosts (another TLS demand, other limits).

There are thousands. What holds words, numbers and such values only is in no reference cycle, and the garbage
collector need not look at it (`gc=False`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

import msgspec
from msgspec.structs import force_setattr

from zonerelay.config.options.units import Rate
from zonerelay.config.settings import TlsMode, ZoneSettings
from zonerelay.model.outcome import Outcome

DestinationKey = NewType("DestinationKey", str)
SiteKey = NewType("SiteKey", str)


@dataclass(frozen=True, slots=True)
class TlsDemand:
    """What a connection must be before mail is sent on it.

    `dane`: the MX records were secure, so hosts with TLSA records are held to them (RFC 7672), whatever
    `mode` says. `names` and `certificates` (SHA-256, lower-case hex) take the place of the host's name in
    VERIFY. `because` is for people and metrics: "zone", "destination" or "mta-sts".
    """

    mode: TlsMode = TlsMode.OPPORTUNISTIC
    dane: bool = False
    names: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()
    because: str = "zone"


class Limits(msgspec.Struct, frozen=True, gc=False):
    """Of one destination. `max_rate`: transactions."""

    max_connections: int
    max_recipients_per_transaction: int
    max_messages_per_connection: int
    max_rate: Rate | None = None

    @classmethod
    def of_zone(cls, zone: ZoneSettings) -> Limits:
        return cls(
            zone.max_connections_per_destination,
            zone.max_recipients_per_transaction,
            zone.max_messages_per_connection,
            zone.max_rate_per_destination,
        )


class MxHost(msgspec.Struct, frozen=True, gc=False):
    """One host to try: a name to resolve, or an IP address if `literal`. Low preferences are tried first."""

    name: str
    port: int
    preference: int = 0
    literal: bool = False


class Route(msgspec.Struct, frozen=True, gc=False):
    """`hosts` sorted by preference (equal ones are shuffled per attempt, RFC 5321 5.1).

    `name` is for people: the MX domain or the next hop as configured. `expires` is Unix time. `tls` and
    `limits`: `None` is what the zone says. `terms`: what tells this line from others at the same hosts, in a
    word for people ("mta-sts", "destination[2]"), `""` for what the zone says. `secure`: DNSSEC vouches for
    the hosts' names.
    """

    zone: str
    name: str
    hosts: tuple[MxHost, ...]
    expires: float
    tls: TlsDemand | None = None
    limits: Limits | None = None
    terms: str = ""
    secure: bool = False
    site: SiteKey = SiteKey("")
    destination: DestinationKey = DestinationKey("")
    """Both follow from the rest."""

    def __post_init__(self) -> None:
        hosts = ",".join(sorted(f"{host.name}:{host.port}" for host in self.hosts))
        # Kept, for they are asked for with every message.
        site = f"{self.zone} {hosts}"
        force_setattr(self, "site", SiteKey(site))
        line = f"{site} {self.terms}" if self.terms else site
        force_setattr(self, "destination", DestinationKey(line))

    def limits_in(self, zone: ZoneSettings) -> Limits:
        return self.limits or Limits.of_zone(zone)

    def tls_in(self, zone: ZoneSettings) -> TlsDemand:
        return self.tls or TlsDemand(zone.tls)


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
    """The addresses of one host, most wanted first; `failure` says why there are none.

    `secure`: DNSSEC vouches for all of them, and for the aliases on the way; `canonical` is where those end.
    """

    ips: tuple[str, ...]
    failure: Outcome | None = None
    secure: bool = False
    canonical: str = ""
