"""Finds the hosts that accept a domain's mail, according to RFC 5321 5.1, RFC 7505 or the zone's next hop.

Mail bounces only if the domain's own DNS is definite: MX, A and AAAA all say that the domain does not exist
(550 5.1.2), it accepts no mail (null MX, 556 5.1.10), it has neither MX nor address (550 5.1.2), its mail
ends here and the relay does not accept it (554 5.4.6), or the text is not a domain. Any other failure is a
deferral: a name server that fails or is silent, or MX records that lead nowhere at present. A failure of a
configured next hop never bounces mail, because it may be a typing mistake of the operator.

A zone with several next hops has one route over all of them, in the order in which they are written or
sharing evenly. A next hop that cannot be found is skipped as long as another one can be found, and looked up
again soon.

Private addresses are refused later, at the address of the connection (`addresses.is_private`).

[[destination]] tables: limits and TLS settings that replace those of the zone for some destinations. The
first entry whose conditions all hold applies, as with routes. `domain` is the recipient's domain (unknown if
the zone has a next hop), `mx` holds if every host of the route matches, and `zone` is the zone of the mail. A
condition that is not given holds. Everything is prepared when the settings are loaded, and the cost of a
look-up grows neither with the number of entries nor with their patterns (`routing/zones/route_rules`). A
look-up never raises. TLS demand, limits and the hosts that remain are the terms of a route (`on_terms`).
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from random import Random

import msgspec
from msgspec import structs

from zonerelay.config.endpoints import NextHop, NextHopKind, is_address, parse_next_hop, split_next_hops
from zonerelay.config.settings import DestinationSettings, TlsMode, ZoneSettings
from zonerelay.model.clock import Clock
from zonerelay.model.reply import NO_NAMES, Outcome, Reply, Scope, Verdict
from zonerelay.routing.addresses import OwnAddresses, ascii_domain, is_literal
from zonerelay.routing.destinations.route import DestinationLimits, MxHost, Route, TlsDemand, Unroutable
from zonerelay.routing.dns.answers import DnsAnswer, DnsStatus, MxRecord
from zonerelay.routing.dns.resolver import FAILURE_TTL, Resolver
from zonerelay.routing.mta_sts import CachedPolicy, PolicyLookup, StsMode, StsPolicies
from zonerelay.routing.zones.address_patterns import AddressPatterns, AddressTable
from zonerelay.routing.zones.route_rules import RuleIndex, TextIndex
from zonerelay.smtp.server.paths import literal_address
from zonerelay.telemetry.events.events import Events


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
        """Return whether mail to these hosts meets all conditions of the [[destination]] table."""
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
        """Whether the table sets a TLS mode, which replaces that of the zone and the domain's MTA-STS
        policy.
        """
        return self.settings.tls is not None

    def tls(self, *, secure: bool) -> TlsDemand:
        """Return the TLS requirements of the table. `secure` means that DNSSEC validates the hosts' names."""
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
        """Return the limits of the [[destination]] table, completed by those of the zone, or None if it has
        none.
        """
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
    """The [[destination]] tables of the configuration, and an index that finds the one for a destination.
    Raises ValueError with a message if a pattern is not a domain. It is immutable; a reload creates another
    table.
    """

    def __init__(self, destinations: Sequence[DestinationSettings] = ()) -> None:
        self._entries = tuple(DestinationEntry(at, each) for at, each in enumerate(destinations))
        self._index = RuleIndex(
            {"zone": TextIndex(), "domain": AddressTable(), "mx": AddressTable()}, destinations
        )

    def find(self, zone: str, domain: str, hosts: Sequence[MxHost]) -> DestinationEntry | None:
        """Return the first [[destination]] table that matches the mail, or None. `domain` is `""` in a zone
        with a next hop.
        """
        if hosts:  # all of them match, so the first one does
            asked = {"zone": zone, "domain": domain and f"@{domain}", "mx": f"@{_name(hosts[0])}"}
            candidates = self._index.find(asked)
        else:
            candidates = range(len(self._entries))
        found = (self._entries[at] for at in candidates)
        return next((entry for entry in found if entry.holds(zone, domain, hosts)), None)


def _name(host: MxHost) -> str:
    """Return the name of a host for pattern matching; an IP address is in brackets."""
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
    """Return the route with the TLS requirements and limits of the zone and of the [[destination]] table.
    `enforced` means that the hosts have passed the domain's MTA-STS policy.
    """
    limits = None if entry is None else entry.limits(zone)
    # An entry without either only keeps its mail from later entries.
    words = [entry.name] if entry is not None and (entry.has_tls or limits is not None) else []
    if entry is not None and entry.has_tls:
        demand = entry.tls(secure=route.secure)
    else:
        demand = _of_zone(zone, secure=route.secure, enforced=enforced)
        if demand.because == MTA_STS:
            words.append(MTA_STS)
    if demand.dane:  # in one line with the mail of an insecure domain, the last look-up would decide for both
        words.append("dane")
    tls = None if demand == TlsDemand(zone.tls) else demand
    if tls is None and limits is None:
        return route
    return structs.replace(route, tls=tls, limits=limits, terms=" ".join(words))


def by_policy(
    zone: ZoneSettings, route: Route, entry: DestinationEntry | None, found: PolicyLookup, events: Events
) -> Route | Unroutable:
    """Return the route after applying the domain's MTA-STS policy to its hosts and TLS requirements."""
    route = structs.replace(route, expires=min(route.expires, found.expires))
    held = found.held
    if held is None or held.mode is StsMode.NONE:
        return on_terms(zone, route, entry)
    hosts = tuple(host for host in route.hosts if held.allows(host.name))
    others = [host for host in route.hosts if host not in hosts]
    if others:
        events.sts_mismatch(held.domain, [host.name for host in others], mode=held.mode.value)
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


STATIC_TTL = 3600.0
"""Seconds for which a route without a DNS answer may be reused."""

_log = logging.getLogger(__name__)


class ExaminedRoute(msgspec.Struct, frozen=True):
    """A route, with the [[destination]] table and the MTA-STS policy that determined its limits and TLS."""

    answer: Route | Unroutable
    entry: DestinationEntry | None = None
    sts: PolicyLookup | None = None


@dataclass(eq=False, repr=False)
class MxRouter:
    """Finds the hosts to which a zone sends the mail for a domain. `hostname` is the relay's name in MX
    records.

    Without `sts` no zone looks up MTA-STS policies.
    """

    resolver: Resolver
    _: KW_ONLY
    hostname: str
    clock: Clock
    random: Random
    own_addresses: OwnAddresses = field(default_factory=OwnAddresses)
    sts: StsPolicies | None = None
    destinations: DestinationTable = field(default_factory=DestinationTable)

    def __post_init__(self) -> None:
        self._hostname = self.hostname.lower().removesuffix(".")

    async def route(self, zone: ZoneSettings, domain: str) -> Route | Unroutable:
        """Return the route to a domain: its hosts by preference, equal ones in a new random order at every
        call. Never raises.
        """
        return (await self.examine(zone, domain)).answer

    async def examine(self, zone: ZoneSettings, domain: str) -> ExaminedRoute:
        """Return the route with the reasons for its TLS requirements and limits, for `explain`. Never
        raises.
        """
        try:
            return await self._examine(zone, domain)
        except Exception:  # noqa: BLE001 - an unknown error is temporary (rule 3)
            _log.exception("unexpected error while routing")
            outcome = _deferred("3.0", "internal error while routing")
            return ExaminedRoute(self._no(zone, domain, outcome, FAILURE_TTL))

    async def _examine(self, zone: ZoneSettings, domain: str) -> ExaminedRoute:
        """Find the route, with the reasons for its TLS requirements and limits. The MTA-STS policy is looked
        up at the same time, and awaited only if it is needed.
        """
        has_policy = zone.mta_sts and not zone.next_hop and not is_literal(domain)
        sts = self.sts if has_policy else None
        asking = None if sts is None else asyncio.create_task(_policy(zone, domain, sts))
        try:
            if zone.next_hop:
                found, domain = await self._to_next_hops(zone), ""
            else:
                found = await self._to_domain(zone, domain)
            if isinstance(found, Unroutable):
                return ExaminedRoute(found)
            entry = self.destinations.find(zone.name, domain, found.hosts)
            decides = entry is not None and entry.has_tls
            policy = None if asking is None or decides else await asking
        finally:
            if asking is not None:
                asking.cancel()
        if sts is None or policy is None:
            return ExaminedRoute(on_terms(zone, found, entry), entry)
        return ExaminedRoute(by_policy(zone, found, entry, policy, sts.events), entry, policy)

    # ---- a configured next hop ---------------------------------------------------------------

    async def _to_next_hops(self, zone: ZoneSettings) -> Route | Unroutable:
        texts = split_next_hops(zone.next_hop)
        hops = [parse_next_hop(text) for text in texts]
        if len(hops) == 1:
            return await self._to_next_hop(zone, texts[0], hops[0])
        finding = (self._to_next_hop(zone, text, hop) for text, hop in zip(texts, hops, strict=True))
        return one_route(zone, await asyncio.gather(*finding), soon=self.clock.now() + FAILURE_TTL)

    async def _to_next_hop(self, zone: ZoneSettings, text: str, hop: NextHop) -> Route | Unroutable:
        port = hop.port or zone.port
        if hop.kind is not NextHopKind.MX:
            literal = hop.kind is NextHopKind.ADDRESS
            hosts = [MxHost(hop.host, port, literal=literal)]
            # The operator configured the name, so only its addresses and TLSA records need DNSSEC.
            secure = self.resolver.settings.trust_ad and not literal
            return self._yes(zone, text, hosts, STATIC_TTL, secure=secure)
        found = await self._by_mx(zone, hop.host, port)
        if isinstance(found, Unroutable) and found.outcome.verdict is Verdict.BOUNCED:
            problem = f"next hop {text}: {found.outcome.reply.text}"
            outcome = structs.replace(_deferred("3.5", problem), scope=Scope.LOCAL)
            return structs.replace(found, outcome=outcome)
        return found

    # ---- a recipient's domain ----------------------------------------------------------------

    async def _to_domain(self, zone: ZoneSettings, domain: str) -> Route | Unroutable:
        if is_literal(domain):
            ip = literal_address(domain)
            if ip is None:
                return self._no(zone, domain, _bounced(550, "1.3", "not an address literal"), STATIC_TTL)
            if self.own_addresses.includes(ip, zone.port):
                return self._no(zone, domain, _loop(domain), STATIC_TTL)
            return self._yes(zone, domain, [MxHost(ip, zone.port, literal=True)], STATIC_TTL)
        try:
            name = ascii_domain(domain)
        except ValueError as error:
            return self._no(zone, domain, _bounced(550, "1.2", str(error)), STATIC_TTL)
        return await self._by_mx(zone, name, zone.port)

    async def _by_mx(self, zone: ZoneSettings, name: str, port: int) -> Route | Unroutable:
        answer = await self.resolver.mx(name)
        ttl = answer.expires - self.clock.monotonic()
        if answer.status is DnsStatus.OK:
            return await self._from_records(zone, name, answer, port, ttl)
        if answer.status.is_definite:
            return await self._implicit(zone, name, answer, port, ttl)
        return self._no(zone, name, _deferred(NO_NAMES, f"MX of {name}: {answer.status}"), ttl)

    async def _from_records(
        self, zone: ZoneSettings, name: str, answer: DnsAnswer[MxRecord], port: int, ttl: float
    ) -> Route | Unroutable:
        if all(not record.host for record in answer.records):
            outcome = _bounced(556, "1.10", f"domain {name} does not accept mail (null MX)")
            return self._no(zone, name, outcome, ttl)
        hosts = [
            MxHost(record.host, port, record.preference)
            for record in answer.records
            if record.host and not is_address(record.host)
        ]
        if not hosts:
            text = f"every MX of {name} is an IP address, but RFC 5321 requires a host name"
            return self._no(zone, name, _deferred("4.4", text), ttl)
        before_us = await self._cut_at_own(zone, hosts)
        if not before_us:
            return self._no(zone, name, _loop(name), ttl)
        return self._yes(zone, name, before_us, ttl, secure=answer.secure)

    async def _implicit(
        self, zone: ZoneSettings, name: str, answer: DnsAnswer[MxRecord], port: int, ttl: float
    ) -> Route | Unroutable:
        """Return the route to the domain's own address, because the domain has no MX record."""
        # The hosts file may name a next hop that DNS denies, but not a recipient's domain.
        status = await self.resolver.implicit_mx(name, answer.status, local=bool(zone.next_hop))
        if status is DnsStatus.OK:
            host = MxHost(name, port)
            if await self._is_ours(host, ipv6=zone.ipv6):
                return self._no(zone, name, _loop(name), ttl)
            return self._yes(zone, name, [host], ttl, secure=answer.secure)
        if status is not answer.status:
            return self._no(zone, name, _deferred(NO_NAMES, f"address of {name}: {status}"), FAILURE_TTL)
        is_denied = answer.status is DnsStatus.NXDOMAIN
        text = (
            f"domain {name} does not exist"
            if is_denied
            else (f"domain {name} has neither an MX nor an address record")
        )
        return self._no(zone, name, _bounced(550, "1.2", text), ttl)

    # ---- ourselves in the list ---------------------------------------------------------------

    async def _cut_at_own(self, zone: ZoneSettings, hosts: Sequence[MxHost]) -> list[MxHost]:
        """Remove all hosts that are not preferred to the relay itself, to prevent loops (RFC 5321 5.1)."""
        ours = await asyncio.gather(*(self._is_ours(host, ipv6=zone.ipv6) for host in hosts))
        least = min((host.preference for host, own in zip(hosts, ours, strict=True) if own), default=None)
        return [host for host in hosts if least is None or host.preference < least]

    async def _is_ours(self, host: MxHost, *, ipv6: bool) -> bool:
        if host.name == self._hostname:
            return True
        if not self.own_addresses.has_port(host.port):
            return False
        found = await self.resolver.addresses(host.name, ipv6=ipv6)
        return any(self.own_addresses.includes(ip, host.port) for ip in found.ips)

    # ---- answers -----------------------------------------------------------------------------

    def _yes(
        self, zone: ZoneSettings, name: str, hosts: Sequence[MxHost], ttl: float, *, secure: bool = False
    ) -> Route:
        order = list(hosts)
        if len(order) > 1:
            self.random.shuffle(order)
            order.sort(key=attrgetter("preference"))
        return Route(zone.name, name, tuple(order), self.clock.now() + max(ttl, 0.0), secure=secure)

    def _no(self, zone: ZoneSettings, name: str, outcome: Outcome, ttl: float) -> Unroutable:
        return Unroutable(zone.name, name, outcome, self.clock.now() + max(ttl, 0.0))


async def _policy(zone: ZoneSettings, domain: str, sts: StsPolicies) -> PolicyLookup | None:
    try:
        name = ascii_domain(domain)
    except ValueError:  # the look-up of its MX reports the same
        return None
    return await sts.look_up(zone, name)


def _bounced(code: int, detail: str, text: str) -> Outcome:
    return Outcome(Verdict.BOUNCED, Reply(code, detail, text), scope=Scope.DOMAIN, local=True)


def _deferred(detail: str, text: str) -> Outcome:
    return Outcome(Verdict.DEFERRED, Reply(451, detail, text), scope=Scope.DOMAIN, local=True)


def _loop(name: str) -> Outcome:
    return _bounced(554, "4.6", f"mail for {name} loops back to this relay")


STEP = 65_536
"""Preferences of MX records are below this number (RFC 1035 3.3.9)."""


def one_route(zone: ZoneSettings, found: Sequence[Route | Unroutable], *, soon: float) -> Route | Unroutable:
    """Combine the routes of a zone's next hops to one route. A route with missing hops may be used until
    `soon`.
    """
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
    """Return the hosts of all next hops, those of the first next hop before those of the second, and so
    on.
    """
    return _once(
        structs.replace(host, preference=at * STEP + host.preference)
        for at, route in enumerate(routes)
        for host in route.hosts
    )


def _shared(routes: Iterable[Route]) -> tuple[MxHost, ...]:
    """Return the hosts of all next hops by rank, so that the best hosts of all next hops share the mail."""
    ranked = []
    for route in routes:
        ranks = sorted({host.preference for host in route.hosts})
        ranked += [structs.replace(host, preference=ranks.index(host.preference)) for host in route.hosts]
    return _once(sorted(ranked, key=lambda host: host.preference))


def _once(hosts: Iterable[MxHost]) -> tuple[MxHost, ...]:
    """Return the hosts without duplicates, each at its most preferred position."""
    first: dict[tuple[str, int], MxHost] = {}
    for host in hosts:
        first.setdefault((host.name, host.port), host)
    return tuple(first.values())


def _none(zone: ZoneSettings, found: Sequence[Unroutable]) -> Unroutable:
    text = "; ".join(each.outcome.reply.text for each in found)
    reply = Reply(451, found[0].outcome.reply.detail, text)
    outcome = structs.replace(found[0].outcome, reply=reply, scope=Scope.LOCAL)
    return Unroutable(zone.name, zone.next_hop, outcome, min(each.expires for each in found))
