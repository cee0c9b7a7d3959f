"""The `[[destination]]` tables: limits and TLS settings that replace those of the zone for some destinations.

The first entry whose conditions all hold applies, as with routes. `domain` is the recipient's domain (unknown
if the zone has a next hop), `mx` holds if every host of the route matches, and `zone` is the zone of the
mail. A condition that is not given holds.

Everything is prepared when the settings are loaded, and the cost of a look-up grows neither with the number
of entries nor with their patterns (`routing/zones/rule_index`). A look-up never raises.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from zonerelay.config.settings import DestinationSettings, TlsMode, ZoneSettings
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.routing.destinations.route import DestinationLimits, MxHost, Route, TlsDemand, Unroutable
from zonerelay.routing.mta_sts import CachedPolicy, PolicyLookup, StsMode
from zonerelay.routing.zones.address_patterns import AddressPatterns, AddressTable
from zonerelay.routing.zones.rule_index import RuleIndex, TextIndex
from zonerelay.telemetry.events.events import StsEvents


class DestinationEntry:
    """A compiled [[destination]] table. `number` counts from 0, as in the paths of configuration problems."""

    __slots__ = ("_domains", "_hosts", "_zones", "number", "settings")

    def __init__(self, number: int, settings: DestinationSettings) -> None:
        self.number = number
        self.settings = settings
        self._zones = frozenset(settings.zone)
        self._domains = AddressPatterns(settings.domain) if settings.domain else None
        self._hosts = AddressPatterns(settings.mx) if settings.mx else None

    def holds(self, zone: str, domain: str, hosts: Sequence[MxHost]) -> bool:
        """Return whether all conditions hold for the mail."""
        if self._zones and zone not in self._zones:
            return False
        if self._domains is not None and not (domain and self._domains.match(f"@{domain}")):
            return False
        return self._hosts is None or all(self._hosts.match(f"@{_name(host)}") for host in hosts)

    @property
    def name(self) -> str:
        return f"destination[{self.number}]"

    @property
    def has_tls(self) -> bool:
        """Whether the entry determines TLS. Then neither the zone nor the domain's policy matters."""
        return self.settings.tls is not None

    @property
    def changes_nothing(self) -> bool:
        """Whether the entry only keeps its mail from later entries."""
        return not self.has_tls and self.limits(ZoneSettings()) is None

    def tls(self, *, secure: bool) -> TlsDemand:
        """Return the TLS demand of the entry. `secure` means that DNSSEC validates the hosts' names."""
        mode = self.settings.tls
        assert mode is not None, "the entry has_tls"
        return TlsDemand(
            mode,
            dane=secure and mode is TlsMode.DANE,
            names=self.settings.tls_names,
            certificates=self.settings.tls_certificates,
            because="destination",
        )

    def limits(self, zone: ZoneSettings) -> DestinationLimits | None:
        """Return the entry's limits, completed by the zone's, or None if the entry has none."""
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
    """Finds the [[destination]] table that applies to mail. Raises ValueError with a message if a pattern is
    not a domain. It is immutable; a reload creates another table.
    """

    def __init__(self, destinations: Sequence[DestinationSettings] = ()) -> None:
        self._entries = tuple(DestinationEntry(at, each) for at, each in enumerate(destinations))
        self._index = RuleIndex(
            {"zone": TextIndex(), "domain": AddressTable(), "mx": AddressTable()}, destinations
        )

    def find(self, zone: str, domain: str, hosts: Sequence[MxHost]) -> DestinationEntry | None:
        """Return the entry for the mail, or None. `domain` is `""` in a zone with a next hop."""
        if hosts:  # all of them match, so the first one does
            asked = {"zone": zone, "domain": domain and f"@{domain}", "mx": f"@{_name(hosts[0])}"}
            candidates = self._index.find(asked)
        else:
            candidates = range(len(self._entries))
        found = (self._entries[at] for at in candidates)
        return next((entry for entry in found if entry.holds(zone, domain, hosts)), None)


def _name(host: MxHost) -> str:
    """Return the host in the form of a domain, with an address in brackets."""
    if not host.literal:
        return host.name
    return f"[IPv6:{host.name}]" if ":" in host.name else f"[{host.name}]"


# The terms of a route: TLS demand, limits, and the hosts that remain.
#
# TLS is decided in this order:
#
# 1. An entry of [[destination]] with its own `tls` decides alone. It replaces the demands of the zone, of
# DANE and of MTA-STS, so that an operator can explicitly work around a peer's mistake.
# 2. The zone decides. In addition, DANE applies if DNSSEC validates the hosts' names (RFC 7672), and the
# domain's MTA-STS policy in mode enforce (RFC 8461 5): it requires a certificate that is valid for the host,
# and only hosts that the policy names. Neither weakens the zone's demand.
#
# `Route.terms` names what differs from the zone, so that such mail is a separate destination. Nothing here
# does I/O. A host outside a policy is reported.

_VERIFYING = (TlsMode.VERIFY, TlsMode.DANE)
MTA_STS = "mta-sts"
_MAX_NAMED = 3  # hosts in a text


def on_terms(
    zone: ZoneSettings, route: Route, entry: DestinationEntry | None, *, enforced: bool = False
) -> Route:
    """Return the route with its terms. `enforced` means that the hosts have passed the domain's MTA-STS
    policy.
    """
    words = [entry.name] if entry is not None and not entry.changes_nothing else []
    if entry is not None and entry.has_tls:
        demand = entry.tls(secure=route.secure)
    else:
        demand = _of_zone(zone, secure=route.secure, enforced=enforced)
        if demand.because == MTA_STS:
            words.append(MTA_STS)
    if demand.dane:  # in one line with the mail of an insecure domain, the last look-up would decide for both
        words.append("dane")
    tls = None if demand == TlsDemand(zone.tls) else demand
    limits = None if entry is None else entry.limits(zone)
    if tls is None and limits is None:
        return route
    return structs.replace(route, tls=tls, limits=limits, terms=" ".join(words))


def by_policy(
    zone: ZoneSettings,
    route: Route,
    entry: DestinationEntry | None,
    found: PolicyLookup,
    events: StsEvents,
) -> Route | Unroutable:
    """Return the route with the TLS requirements of the domain's policy."""
    route = structs.replace(route, expires=min(route.expires, found.expires))
    held = found.held
    if held is None or held.mode is StsMode.NONE:
        return on_terms(zone, route, entry)
    hosts = tuple(host for host in route.hosts if held.allows(host.name))
    others = [host for host in route.hosts if host not in hosts]
    if others:
        events.mismatch(held.domain, [host.name for host in others], mode=held.mode.value)
    if held.mode is StsMode.TESTING:
        return on_terms(zone, route, entry)
    if not hosts:
        return Unroutable(zone.name, route.name, _not_allowed(held, others), route.expires)
    return on_terms(zone, structs.replace(route, hosts=hosts), entry, enforced=True)


def _of_zone(zone: ZoneSettings, *, secure: bool, enforced: bool) -> TlsDemand:
    by_sts = enforced and zone.tls not in _VERIFYING
    mode = TlsMode.VERIFY if by_sts else zone.tls
    dane = secure and (mode is TlsMode.DANE or (zone.dane and mode is not TlsMode.NONE))
    return TlsDemand(mode, dane=dane, because=MTA_STS if by_sts else "zone")


def _not_allowed(held: CachedPolicy, hosts: Sequence[MxHost]) -> Outcome:
    names = ", ".join(host.name for host in hosts[:_MAX_NAMED])
    more = f" and {len(hosts) - _MAX_NAMED} more" if len(hosts) > _MAX_NAMED else ""
    text = (
        f"the MTA-STS policy {held.id} of {held.domain} does not include any of its MX hosts: {names}{more}"
    )
    return Outcome(Verdict.DEFERRED, Reply(451, "7.5", text), scope=Scope.DOMAIN, local=True)
