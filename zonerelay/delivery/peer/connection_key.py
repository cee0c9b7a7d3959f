"""What a batch demands of its connection: source, credential and next hop, with the zone's and the route's
terms.

The key is chosen once for a batch, before a connection is looked for: the source by `source/selection.py`,
the credential by `auth/logins.py`, the host by `connection/host_order.py`. An idle connection carries a batch
only when it matches.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from zonerelay.config.settings import CredentialSettings, SourceSettings, TlsMode, ZoneSettings
from zonerelay.routing.destinations.route import DestinationKey, DestinationLimits, Route, TlsDemand


@dataclass(frozen=True, slots=True)
class ConnectionKey:
    """`source` and `credential` are `None` in zones without any. `text` tells the keys of one zone apart.

    `ipv4_only`: the batch does not use the source's IPv6 for now, so a connection over IPv6 does not match.
    `host` (`name:port`): the one of several equal next hops that the batch tries first. `verify`: the message
    demands TLS and a certificate that is checked (RFC 8689), whatever the route demands.
    """

    source: SourceSettings | None = None
    credential: CredentialSettings | None = None
    ipv4_only: bool = False
    host: str = ""
    verify: bool = False
    text: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        if self.source is not None or self.credential is not None or self.host or self.verify:
            source = "" if self.source is None else self.source.name
            credential = "" if self.credential is None else self.credential.name
            family = "/4" if self.ipv4_only else ""
            verify = " verify" if self.verify else ""
            object.__setattr__(self, "text", f"{source}{family} {credential} {self.host}{verify}")

    def from_source(self, chosen: ConnectionKey) -> ConnectionKey:
        """Returns the same key with the source and family that `SourceSelection` has chosen."""
        if self is ANY_CONNECTION:
            return chosen
        return replace(self, source=chosen.source, ipv4_only=chosen.ipv4_only)


ANY_CONNECTION = ConnectionKey()

PoolKey = tuple[DestinationKey, str]


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """The demands for which a connection is opened, and that limit which mail it carries."""

    zone: ZoneSettings
    route: Route
    key: ConnectionKey = ANY_CONNECTION

    @property
    def pool_key(self) -> PoolKey:
        """Connections with equal pool keys may carry each other's mail while the settings stay."""
        return self.route.destination, self.key.text

    @property
    def limits(self) -> DestinationLimits:
        return self.route.limits_in(self.zone)

    @property
    def tls(self) -> TlsDemand:
        demand = self.route.tls_in(self.zone)
        if self.key.verify:
            return TlsDemand(TlsMode.VERIFY, dane=demand.dane, because="message")
        return demand

    def verifying(self) -> Terms:
        """Returns terms that demand a certificate that is checked: these, when they do already."""
        if self.tls.mode in (TlsMode.VERIFY, TlsMode.DANE):
            return self
        return replace(self, key=replace(self.key, verify=True))

    def ehlo_name(self, hostname: str) -> str:
        """Returns the name for EHLO: the source's, else the zone's, else the relay's."""
        source = self.key.source
        return (source.ehlo_name if source is not None else "") or self.zone.ehlo_name or hostname

    def cover(self, other: Terms) -> bool:
        """False when these terms were made under settings that no longer hold: TLS, names, source, log-in."""
        mine, theirs = self.route, other.route
        return (
            (self.zone is other.zone or self.zone == other.zone)
            and (mine is theirs or (mine.tls == theirs.tls and mine.limits == theirs.limits))
            and (self.key is other.key or self.key == other.key)
        )
