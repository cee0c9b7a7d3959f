"""The `[[destination]]` tables: other limits and other TLS for some destinations.

The first entry whose conditions all hold applies, as with routes. `domain` is the recipient's (unknown where
the zone has a next hop), `mx` holds when every host of the route matches, `zone` is the mail's zone. A
condition that is not given holds.

Everything is prepared when the settings are loaded, so the cost of an entry does not grow with its patterns.
A look-up never raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zonerelay.config.settings import DestinationSettings, DestinationTls, TlsMode, ZoneSettings
from zonerelay.routing.destinations.route import DestinationLimits, MxHost, TlsDemand
from zonerelay.routing.zones.address_patterns import AddressPatterns


@dataclass(frozen=True, slots=True)
class DestinationEntry:
    """One table. `number` counts from 0, as in the paths of configuration problems."""

    number: int
    settings: DestinationSettings

    @property
    def name(self) -> str:
        return f"destination[{self.number}]"

    @property
    def has_tls(self) -> bool:
        """True when the entry says what TLS has to be: then neither the zone nor the domain's policy
        matters.
        """
        return self.settings.tls is not DestinationTls.ZONE

    @property
    def changes_nothing(self) -> bool:
        """True when the entry only keeps its mail from later entries."""
        return not self.has_tls and self.limits(ZoneSettings()) is None

    def tls(self, *, secure: bool) -> TlsDemand:
        """Returns the entry's demand. `secure`: DNSSEC vouches for the hosts' names."""
        mode = TlsMode(self.settings.tls)
        return TlsDemand(
            mode,
            dane=secure and mode is TlsMode.DANE,
            names=self.settings.tls_names,
            certificates=self.settings.tls_certificates,
            because="destination",
        )

    def limits(self, zone: ZoneSettings) -> DestinationLimits | None:
        """Returns the entry's limits, completed by the zone's; `None` when the entry has none."""
        own = self.settings
        numbers = (own.max_connections, own.max_recipients_per_transaction, own.max_messages_per_connection)
        if not any(numbers) and own.max_rate is None:
            return None
        return DestinationLimits(
            own.max_connections or zone.max_connections_per_destination,
            own.max_recipients_per_transaction or zone.max_recipients_per_transaction,
            own.max_messages_per_connection or zone.max_messages_per_connection,
            own.max_rate or zone.max_rate_per_destination,
        )


class DestinationTable:
    """Raises ValueError in words when a pattern is no domain. Immutable: a reload makes another table."""

    def __init__(self, destinations: Sequence[DestinationSettings] = ()) -> None:
        self._rules = tuple(_Rule(DestinationEntry(at, each)) for at, each in enumerate(destinations))

    def find(self, zone: str, domain: str, hosts: Sequence[MxHost]) -> DestinationEntry | None:
        """Returns the entry for the mail, `None` without one. `domain` is `""` in a zone with a next hop."""
        for rule in self._rules:
            if rule.holds(zone, domain, hosts):
                return rule.entry
        return None


class _Rule:
    __slots__ = ("_domains", "_hosts", "_zones", "entry")

    def __init__(self, entry: DestinationEntry) -> None:
        self.entry = entry
        settings = entry.settings
        self._zones = frozenset(settings.zone)
        self._domains = AddressPatterns(settings.domain) if settings.domain else None
        self._hosts = AddressPatterns(settings.mx) if settings.mx else None

    def holds(self, zone: str, domain: str, hosts: Sequence[MxHost]) -> bool:
        if self._zones and zone not in self._zones:
            return False
        if self._domains is not None and not (domain and self._domains.match(f"@{domain}")):
            return False
        return self._hosts is None or all(self._hosts.match(f"@{_name(host)}") for host in hosts)


def _name(host: MxHost) -> str:
    """Returns the host in the form of a domain: an address goes in brackets."""
    if not host.literal:
        return host.name
    return f"[IPv6:{host.name}]" if ":" in host.name else f"[{host.name}]"
