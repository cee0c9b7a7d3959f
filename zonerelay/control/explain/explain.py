"""`explain`: how mail for an address would travel, asked of the very parts that would carry it.

Nothing is sent: DNS is asked as for real mail, and the source address is the zone's, or what the system's
routing table says. The same code runs inside the relay and, when none runs, in the command line.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from zonerelay.config.options.endpoints import parse_listen
from zonerelay.config.options.wording import did_you_mean, in_words
from zonerelay.config.settings import ListenerSettings, ZoneSettings
from zonerelay.control.explain.change_plans import ChangePlans
from zonerelay.control.explain.rewrite_plans import RewritePlans, Rewritten
from zonerelay.control.explain.source_plans import SourcePlans, candidates, own_addresses
from zonerelay.control.explain.terms_plans import (
    limits_in_force,
    rates_in_force,
    sts_plan,
    tls_plan,
    too_large_for,
)
from zonerelay.control.messages.answers import Explanation
from zonerelay.control.messages.plans import AddressPlan, HostPlan, RouteCheck, SourcePlan
from zonerelay.control.messages.requests import Explain
from zonerelay.control.socket.errors import ControlError
from zonerelay.delivery.peer.connection_key import Terms
from zonerelay.delivery.peer.sockets import HostTrouble
from zonerelay.delivery.tls.plan import TlsPlanner
from zonerelay.inbound.cleanup.own_headers import without
from zonerelay.inbound.state.context import dropped_headers
from zonerelay.inbound.state.zone_header import ZoneHeader
from zonerelay.message.header.headers import Header
from zonerelay.model.address import Mailbox, domain_of
from zonerelay.model.priority import Priority
from zonerelay.routing.addresses import is_private
from zonerelay.routing.destinations.mx import ExaminedRoute
from zonerelay.routing.destinations.nexthop import DestinationKey, MxHost, Route, Unroutable
from zonerelay.routing.dns.answers import TlsaRecord
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.routing.zones.route_rules import Mail
from zonerelay.routing.zones.zones import Explanation as Choice
from zonerelay.routing.zones.zones import Zones

MAX_ADDRESS = 512


class Suspended(NamedTuple):
    until: float
    reply: str


Suspensions = Callable[[DestinationKey], Suspended | None]


def nothing_is_suspended(destination: DestinationKey) -> Suspended | None:
    return None


class Examiner(Protocol):
    """What `MxRouter` does."""

    async def examine(self, zone: ZoneSettings, domain: str) -> ExaminedRoute: ...


class Explainer:
    """`hostname` is what the relay calls itself, `listeners` are those of now.

    `suspended` knows the scheduler's suspensions, `credential` as whom a zone logs in for a sender.
    """

    def __init__(
        self,
        zones: Zones,
        router: Examiner,
        resolver: Resolver,
        *,
        hostname: str,
        listeners: Callable[[], Sequence[ListenerSettings]] = tuple,
        suspended: Suspensions = nothing_is_suspended,
        sources: SourcePlans | None = None,
        rewrites: RewritePlans | None = None,
        credential: Callable[[ZoneSettings, str], str] | None = None,
        changes: ChangePlans | None = None,
        relay_running: bool = True,
    ) -> None:
        self._zones = zones
        self._router = router
        self._resolver = resolver
        self._hostname = hostname
        self._listeners = listeners
        self._suspended = suspended
        self._sources = sources
        self._rewrites = rewrites
        self._credential = credential
        self._changes = changes
        self._relay_running = relay_running

    async def explain(self, request: Explain) -> Explanation:
        """Raises ControlError when there is no address to explain."""
        listener = self._listener(request.listener)
        address, sender, rewritten = self._rewritten(request, listener)
        choice = self._choice(request, listener, address, sender)
        zone = self._zones.get(choice.zone)
        domain = domain_of(Mailbox(address))
        findings = await self._router.examine(zone, "" if zone.next_hop else domain)
        found = findings.answer
        too_large = too_large_for(zone, request.size)
        tls = tls_plan(zone, findings)
        site = found.site if isinstance(found, Route) else None
        sources = () if self._sources is None else self._sources.of(zone, site, sender)
        hosts = await self._hosts(zone, found, sources)
        suspended = self._suspended(found.destination) if isinstance(found, Route) else None
        return Explanation(
            address=_mailbox(request.address),
            sender=_sender(request.sender),
            domain=domain,
            zone=zone.name,
            rule=choice.rule,
            reason=choice.reason,
            next_hop=zone.next_hop,
            route=found.name,
            hosts=hosts,
            unroutable=too_large or (str(found.outcome.reply) if isinstance(found, Unroutable) else ""),
            verdict="bounced" if too_large else _verdict(found),
            tls=tls.mode,
            ehlo_name=", ".join(dict.fromkeys(each.ehlo_name for each in candidates(sources)))
            or zone.ehlo_name
            or self._hostname,
            limits=limits_in_force(zone, findings),
            rates=rates_in_force(zone, findings),
            suspended_until=suspended.until if suspended else None,
            suspended_reply=suspended.reply if suspended else "",
            relay_running=self._relay_running,
            routes=tuple(
                RouteCheck(
                    rule=check.rule, zone=check.zone, matches=not check.unmatched, unmatched=check.unmatched
                )
                for check in choice.checks
            ),
            sources=sources,
            credential=self._login(zone, sender),
            destination=findings.entry.name if findings.entry is not None else "",
            tls_demand=tls,
            mta_sts=sts_plan(findings.sts),
            rewritten=rewritten,
            priority=(choice.priority or _priority(request, listener)).value,
            changes=None if self._changes is None else self._changes.of(zone, sender, request.headers),
        )

    def _rewritten(self, request: Explain, listener: ListenerSettings | None) -> Rewritten:
        address, sender = _mailbox(request.address), _sender(request.sender)
        if self._rewrites is None:
            return Rewritten(address, sender, ())
        came_in_at = "" if listener is None else listener.address
        return self._rewrites.of(address, sender, listener=came_in_at, user=request.user)

    def _choice(
        self, request: Explain, listener: ListenerSettings | None, address: str, sender: str
    ) -> Choice:
        zone_header = None if listener is None else ZoneHeader.of(listener)
        fields, named = request.headers, ""
        if zone_header is not None and zone_header.trusts(request.client, request.user):
            named = zone_header.zone_in(fields)
        if listener is not None:
            fields = without(Header(fields), dropped_headers(listener)).fields
        mail = Mail(
            sender=sender,
            user=request.user,
            listener="" if listener is None else listener.address,
            client=request.client,
            certificate=request.certificate,
            priority=_priority(request, listener),
            headers=fields,
            size=request.size,
        )
        return self._zones.explain(address, mail, named=named)

    def _listener(self, text: str) -> ListenerSettings | None:
        """Raises ControlError when there is none at this address."""
        if not text:
            return None
        listeners = {each.address: each for each in self._listeners()}
        try:
            address = str(parse_listen(text))
        except ValueError as error:
            raise ControlError(f"--listener: {error}") from error
        if address not in listeners:
            near = did_you_mean(address, listeners) or f"; there is {in_words(listeners)}"
            raise ControlError(f'no listener has the address "{address}"{near}')
        return listeners[address]

    def _login(self, zone: ZoneSettings, sender: str) -> str:
        if self._credential is None or not zone.credentials:
            return ""
        return self._credential(zone, sender) or "none: no credential of the zone is for this sender"

    async def _hosts(
        self, zone: ZoneSettings, found: Route | Unroutable, sources: Sequence[SourcePlan]
    ) -> tuple[HostPlan, ...]:
        if isinstance(found, Unroutable):
            return ()
        terms = Terms(zone, found)
        return tuple(await asyncio.gather(*(self._host(terms, host, sources) for host in found.hosts)))

    async def _host(self, terms: Terms, host: MxHost, sources: Sequence[SourcePlan]) -> HostPlan:
        zone = terms.zone
        addresses = await self._resolver.addresses(host.name, ipv6=zone.ipv6)
        failure = addresses.failure
        problem = failure.reply.text if failure is not None and not addresses.ips else ""
        tlsa: tuple[TlsaRecord, ...] = ()
        try:
            tlsa = (await TlsPlanner(self._resolver).plan(terms, host, addresses)).tlsa
        except HostTrouble as trouble:
            problem = problem or trouble.reply.text
        return HostPlan(
            name=host.name,
            port=host.port,
            preference=host.preference,
            addresses=tuple(_address(zone, ip, host.port, sources) for ip in addresses.ips),
            problem=problem,
            tlsa=tuple(dict.fromkeys(f"{each.usage} {each.selector} {each.matching}" for each in tlsa)),
        )


def _verdict(found: Route | Unroutable) -> str:
    return found.outcome.verdict.value if isinstance(found, Unroutable) else ""


def _sender(text: str) -> str:
    return text.strip("<> ")


def _mailbox(text: str) -> str:
    """The address asked about; a bare domain stands for a mailbox in it."""
    address = text.strip("<> ")
    if not address or len(address) > MAX_ADDRESS or not address.isprintable():
        raise ControlError("that is no address: give one like user@example.com, or a domain")
    return address if "@" in address else f"postmaster@{address}"


def _address(zone: ZoneSettings, ip: str, port: int, sources: Sequence[SourcePlan]) -> AddressPlan:
    if is_private(ip) and not (zone.allow_private_addresses or zone.next_hop):
        return AddressPlan(
            address=ip, problem="private address, refused: the zone does not set allow_private_addresses"
        )
    if sources:
        own = own_addresses(sources, ipv6=":" in ip)
        family = "IPv6" if ":" in ip else "IPv4"
        return AddressPlan(
            address=ip, source=own, problem="" if own else f"no source has an {family} address"
        )
    try:
        return AddressPlan(address=ip, source=source_address(ip, port))
    except OSError as error:
        return AddressPlan(address=ip, problem=f"not reachable from this machine: {error.strerror or error}")


def source_address(ip: str, port: int) -> str:
    """Our address in packets to `ip`. Connecting a datagram socket sends nothing, it looks up the route."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.setblocking(False)
        probe.connect((ip, port))
        name: tuple[str, int] = probe.getsockname()
        return name[0]


def _priority(request: Explain, listener: ListenerSettings | None) -> Priority:
    if request.priority:
        return Priority(request.priority)
    return Priority.NORMAL if listener is None else listener.priority
