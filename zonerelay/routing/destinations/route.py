"""Value types for the result of routing: the hosts, and the limits and TLS requirements of connections.

`Route` is the result for one zone and one domain. Its `site` is the zone and the set of hosts. Limits on
connections and rates count by site, so that domains at one provider share them. Its `destination` has its own
mail queue, suspension and idle connections. It is the site, together with what distinguishes mail for one
domain from mail for another at the same hosts (another TLS demand, other limits).

There are thousands of these values. Those that contain only strings and numbers are in no reference cycle, so
the garbage collector need not inspect them (`gc=False`).
"""

from collections.abc import Awaitable, Callable
from typing import NewType

import msgspec
from msgspec.structs import force_setattr

from zonerelay.config.settings import TlsMode, ZoneSettings
from zonerelay.config.units import Rate
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.reply import Outcome

DestinationKey = NewType("DestinationKey", str)
SiteKey = NewType("SiteKey", str)


class TlsDemand(msgspec.Struct, frozen=True):
    """The TLS requirements of a route.

    `dane` means that the MX records were secure, so DANE applies to hosts with TLSA records (RFC 7672) under
    any `mode`. `names` and `certificates` (SHA-256, lower-case hex) replace the host's name in VERIFY.
    `because` is for display and metrics: "zone", "destination", "mta-sts" or "message".
    """

    mode: TlsMode = TlsMode.OPPORTUNISTIC
    dane: bool = False
    names: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()
    because: str = "zone"


class DestinationLimits(msgspec.Struct, frozen=True, gc=False):
    """The connection and rate limits of a destination. `max_rate` counts transactions."""

    max_connections: int
    max_recipients_per_transaction: int
    max_messages_per_connection: int
    max_rate: Rate | None = None

    @classmethod
    def of_zone(cls, zone: ZoneSettings) -> "DestinationLimits":
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
    """The hosts to which mail is sent, sorted by preference (equal ones are shuffled per attempt, RFC 5321
    5.1).

    `name` is for display: the MX domain or the next hop as configured. `expires` is Unix time. If `tls` or
    `limits` is None, the zone's apply. `terms` is a label that distinguishes this destination from others at
    the same hosts ("mta-sts", "destination[2]"), or `""` for the zone's own terms. `secure` means that DNSSEC
    validates the hosts' names.
    """

    zone: str
    name: str
    hosts: tuple[MxHost, ...]
    expires: float
    tls: TlsDemand | None = None
    limits: DestinationLimits | None = None
    terms: str = ""
    secure: bool = False
    site: SiteKey = SiteKey("")
    destination: DestinationKey = DestinationKey("")
    """`site` and `destination` are derived from the other fields."""

    def __post_init__(self) -> None:
        hosts = ",".join(sorted(f"{host.name}:{host.port}" for host in self.hosts))
        # Both are stored, because every message needs them.
        site = f"{self.zone} {hosts}"
        force_setattr(self, "site", SiteKey(site))
        line = f"{site} {self.terms}" if self.terms else site
        force_setattr(self, "destination", DestinationKey(line))

    def limits_in(self, zone: ZoneSettings) -> DestinationLimits:
        return self.limits or DestinationLimits.of_zone(zone)

    def tls_in(self, zone: ZoneSettings) -> TlsDemand:
        return self.tls or TlsDemand(zone.tls)


class Unroutable(msgspec.Struct, frozen=True):
    """The result of routing if no host can be tried. `outcome` has the reason (bounced only if RFC 5321 and
    RFC 7505 require it).

    `expires` is Unix time. Until then, the result may be reused for other mail to the domain.
    """

    zone: str
    name: str
    outcome: Outcome
    expires: float


# A batch, which the queue passes to a courier.


class Batch(msgspec.Struct, eq=False):
    """Deliveries of one message to one destination in one transaction.

    The courier awaits `take_turn` before each transaction. False means that the wait for a turn of the rate
    would be too long; ClaimLostError, that the mail must not be sent now. `rcptdomainmax` is the number of
    domains on a connection for which the peer accepts recipients (RFC 9422); the courier sets it to the limit
    that the latest peer announces. `more` means that another batch for the same destination is likely to
    follow immediately. `most_connections` is how many connections the hosts accept at a time; the courier
    sets it if they have refused one more.
    """

    zone: ZoneSettings
    route: Route
    message: Message
    deliveries: tuple[Delivery, ...]
    take_turn: Callable[[], Awaitable[bool]] | None = None
    rcptdomainmax: int | None = None
    more: bool = False
    most_connections: int | None = None
