"""Answers `explain`: determines the route of mail for an address with the same parts that would deliver it.

Nothing is sent. DNS is queried as for real mail, and the source address is the zone's or follows from the
system's routing table. The same code runs inside the relay and, if none runs, in the command line.

`SourcePlans` describes the sources of a zone, for `explain` and `status`. `UserLimitsPlans` describes whether
a user's limits (`config`) accept a message, and the effect of their mode; used-up quotas are in the
status. `RewritePlans` covers [[rewrite]] and the reversal of SRS. `ChangePlans` covers the header rules of a
zone, SRS and DKIM; its author is that of `--header 'From: …'`, or else the envelope sender.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from zonerelay.config.endpoints import CAPTURE, parse_listen
from zonerelay.config.problems import did_you_mean, in_words
from zonerelay.config.settings import DkimMode, ListenerSettings, ZoneSettings
from zonerelay.config.units import Rate, format_size
from zonerelay.config.user_limits import UserLimits, UserMode
from zonerelay.delivery.peer import HostFailure, Terms, display_address
from zonerelay.delivery.source import SourceSelection, SourceStatus
from zonerelay.delivery.tls.plan import TlsPlanner
from zonerelay.inbound.access.guard import UNREADABLE, Allowance
from zonerelay.inbound.state.context import dropped_headers
from zonerelay.inbound.state.rewriting import AddressKind, RewriteRules, ZoneHeader
from zonerelay.message.dkim.signature import author_domain
from zonerelay.message.header.headers import Header
from zonerelay.message.srs import Srs, SrsError
from zonerelay.model.address import Mailbox, domain_of
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId, is_message_id
from zonerelay.model.queue_name import Priority, QueueKind, queue_of
from zonerelay.model.reply import Reply
from zonerelay.operations import answers
from zonerelay.operations.errors import ControlError
from zonerelay.operations.requests import Explain
from zonerelay.queue.orders.order import Subject
from zonerelay.routing.addresses import is_private
from zonerelay.routing.destinations.mx import ExaminedRoute, MxRouter
from zonerelay.routing.destinations.route import (
    DestinationKey,
    DestinationLimits,
    MxHost,
    Route,
    SiteKey,
    TlsDemand,
    Unroutable,
)
from zonerelay.routing.dns.answers import TlsaRecord
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.routing.mta_sts import PolicyLookup
from zonerelay.routing.zones.route_rules import RoutedMail
from zonerelay.routing.zones.zones import BY_HEADER, DEFAULT_ZONE, NO_ROUTE, Zones
from zonerelay.routing.zones.zones import ZoneExplanation as Choice

if TYPE_CHECKING:
    from zonerelay.message.dkim.keys import DkimKeys
    from zonerelay.message.dkim.signature import DkimKey


@dataclass(frozen=True, slots=True)
class ChangePlans:
    """Determines the changes that a zone makes to mail. `keys` and `srs` return the current ones; `keys` may
    raise a ValueError that describes what is wrong with them.
    """

    keys: Callable[[], DkimKeys | None]
    srs: Callable[[], Srs | None]
    clock: Clock

    def of(
        self, zone: ZoneSettings, sender: str, headers: Sequence[tuple[str, str]]
    ) -> answers.ChangePlan | None:
        """Return the changes, or `None` if mail is sent unchanged."""
        author, certain = _author(sender, headers)
        signed_by, unsigned = self._signatures(zone, author)
        plan = answers.ChangePlan(
            sender=self._sender(zone, sender),
            removed=zone.header_remove,
            replaced=zone.header_replace,
            added=zone.header_add,
            author=author if signed_by or unsigned else "",
            author_assumed=not certain,
            signed_by=signed_by,
            unsigned=unsigned,
            must_sign=zone.dkim is DkimMode.REQUIRED,
        )
        changes = (plan.sender, plan.removed, plan.replaced, plan.added, signed_by, unsigned)
        return plan if any(changes) else None

    def _signatures(self, zone: ZoneSettings, author: str) -> tuple[tuple[str, ...], str]:
        """Return the signatures that would be made and the reason why there are none; both are empty if the
        zone does not sign.
        """
        if zone.dkim is DkimMode.OFF:
            return (), ""
        try:
            keys = self.keys()
        except ValueError as error:
            return (), str(error)
        if keys is None:
            return (), "no keys are configured" if zone.dkim is DkimMode.REQUIRED else ""
        found = keys.for_author(author, self.clock.now()) if author else ()
        if not found:
            return (), f"no key for {author}" if author else "the From address is unknown"
        return tuple(map(_name, found)), ""

    def _sender(self, zone: ZoneSettings, sender: str) -> str:
        """Return the sender as SRS rewrites it, or "" if it is unchanged."""
        srs = self.srs() if zone.srs else None
        if srs is None or not sender:
            return ""
        try:
            becomes = srs.forward(Mailbox(sender), self.clock.now())
        except SrsError:
            return ""
        return "" if becomes == sender else str(becomes)


def _name(key: DkimKey) -> str:
    return f"{key.selector}._domainkey.{key.domain} ({key.algorithm})"


def _author(sender: str, headers: Sequence[tuple[str, str]]) -> tuple[str, bool]:
    """Return the domain of the author, and whether it is certain."""
    given = [value for name, value in headers if name.lower() == "from"]
    if not given:
        return domain_of(Mailbox(sender)) if "@" in sender else "", False
    return author_domain("".join(f"From: {value}\r\n" for value in given).encode()), True


SRS = "srs"


class RewriteResult(NamedTuple):
    """The recipient and the sender after rewriting, and the rules that were applied."""

    recipient: str
    sender: str
    plans: tuple[answers.RewritePlan, ...]


@dataclass(frozen=True, slots=True)
class RewritePlans:
    """Determines how addresses are rewritten. `rewriting` and `srs` return the current rules."""

    rewriting: Callable[[], RewriteRules | None]
    srs: Callable[[], Srs | None]
    clock: Clock

    def of(self, recipient: str, sender: str, *, listener: str, user: str) -> RewriteResult:
        plans: list[answers.RewritePlan] = []
        recipient = self._reversed(recipient, plans)
        rewriting = self.rewriting()
        if rewriting is not None:
            rewrites = rewriting.of(listener, user)
            found = []
            for place, address in ((AddressKind.SENDER, sender), (AddressKind.RECIPIENT, recipient)):
                other, rule = rewrites.find(place, Mailbox(address))
                if rule:
                    plans.append(
                        answers.RewritePlan(what=place.name.lower(), becomes=other, by=f"rewrite={rule}")
                    )
                found.append(other)
            sender, recipient = found
        return RewriteResult(recipient, sender, tuple(plans))

    def _reversed(self, recipient: str, plans: list[answers.RewritePlan]) -> str:
        srs = self.srs()
        if srs is None:
            return recipient
        try:
            first = srs.reverse(Mailbox(recipient), self.clock.now())
        except SrsError as error:
            plans.append(
                answers.RewritePlan(what="recipient", by=SRS, problem=f"rejected with 550 5.1.1: {error}")
            )
            return recipient
        if first is None:
            return recipient
        plans.append(answers.RewritePlan(what="recipient", becomes=first, by=SRS))
        return first


class UserLimitsResult(NamedTuple):
    """The limits of the user, or `None` if they cannot be read, and the `mailbox` to which mail is
    redirected.
    """

    allowance: Allowance | None
    mailbox: str = ""


@dataclass(frozen=True, slots=True)
class UserLimitsPlans:
    """Determines the effect of user limits. `rails` returns those of a user, or `None` if they cannot be
    read.
    """

    rails: Callable[[str], Awaitable[UserLimits | None]]
    clock: Clock

    async def of(self, user: str) -> UserLimitsResult:
        rails = await self.rails(user)
        if rails is None:
            return UserLimitsResult(None)
        return UserLimitsResult(
            Allowance(user, rails), rails.mailbox if rails.mode is UserMode.REDIRECT else ""
        )

    def words(self, guarded: UserLimitsResult, request: Explain, address: str, zone: str) -> str:
        """Describe the effect of the user's limits on mail for an address, or return "" if there is none."""
        allowance, recipient = guarded.allowance, Mailbox(address)
        if allowance is None:
            return f"rejected with {UNREADABLE.reply}"
        if not request.client and allowance.rails.networks:  # an unknown client may be in these networks
            allowance = replace(allowance, rails=replace(allowance.rails, networks=()))
        delivery = Delivery(
            queue=queue_of(zone), message_id=MessageId("0" * 16), recipient=recipient, created=0.0
        )
        refusal = (
            allowance.mail_refusal(request.client, self.clock.now(), request.size or 0)
            or allowance.rcpt_refusal(recipient, 0)
            or allowance.zone_refusal([delivery])
        )
        if refusal is not None:
            return f"rejected with {refusal.reply}"
        mode = f'mode = "{allowance.rails.mode}"'
        if allowance.is_captured(recipient):
            return f"not sent: captured, or held if no zone captures mail ({mode})"
        if allowance.rails.mode is UserMode.COPY:
            return f"a copy is sent to {allowance.rails.mailbox} ({mode})"
        return ""


MAX_PENALTIES = 1000


class SilentReports:
    """Implements `source_ways.Reports` without logging, for use outside a relay."""

    def source_refused(self, zone: str, source: str, destination: str, reply: Reply, until: float) -> None:
        pass

    def source_refused_again(self, source: str) -> None:
        pass

    def source_absent(self, source: str, address: str, problem: str) -> None:
        pass

    def source_back(self, source: str, address: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class SourcePlans:
    """Determines the sources from which mail would be sent. `hostname` is the relay's own host name."""

    selection: SourceSelection
    hostname: str

    def of(self, zone: ZoneSettings, site: SiteKey | None, sender: str) -> tuple[answers.SourcePlan, ...]:
        """Return the sources for mail of this sender ("" if it is unknown) to these hosts, if there
        are any.
        """
        if not zone.sources:
            return ()
        return tuple(self._plan(zone, each) for each in self.selection.statuses(zone, site, sender))

    def _plan(self, zone: ZoneSettings, status: SourceStatus) -> answers.SourcePlan:
        source, penalty = status.source, status.penalty
        return answers.SourcePlan(
            name=source.name,
            addresses=source.address,
            ehlo_name=source.ehlo_name or zone.ehlo_name or self.hostname,
            share=round(status.share, 4),
            chosen=status.first,
            refused_until=penalty.until if penalty else None,
            refused_reply=str(penalty.reply) if penalty else "",
            refused_ipv6_only=penalty.ipv6 if penalty else False,
            absent=status.absent,
        )

    def penalties(self) -> tuple[answers.SourcePenalty, ...]:
        """Return the penalties, the latest first."""
        latest = self.selection.penalties()[: -MAX_PENALTIES - 1 : -1]
        return tuple(
            answers.SourcePenalty(
                source=each.source,
                destination=each.hosts,
                until=each.until,
                reply=str(each.reply),
                ipv6_only=each.ipv6,
            )
            for each in latest
        )


def candidates(plans: Sequence[answers.SourcePlan]) -> list[answers.SourcePlan]:
    """Return the sources from which the mail may be sent: exactly one if it is certain."""
    chosen = [plan for plan in plans if plan.chosen]
    return chosen or [plan for plan in plans if plan.share]


def own_addresses(plans: Sequence[answers.SourcePlan], *, ipv6: bool) -> str:
    """Return the addresses of a family, in the order of the configuration; "" if there are none."""
    return ", ".join(ip for plan in candidates(plans) for ip in plan.addresses if (":" in ip) == ipv6)


MAX_ADDRESS = 512


class ActiveSuspension(NamedTuple):
    """A suspension that applies to the explained mail."""

    until: float
    reply: str


@dataclass(frozen=True, slots=True)
class Explainer:
    """Explains the route of mail for an address. `hostname` is the relay's own host name, `listeners` returns
    the current listeners.

    `suspended` returns the scheduler's suspension of a destination, `credential` describes the login of a
    zone for a sender, and `learned` returns what deliveries have learned about an address (`ip:port`).
    """

    zones: Zones
    router: MxRouter
    resolver: Resolver
    _: KW_ONLY
    hostname: str
    listeners: Callable[[], Sequence[ListenerSettings]] = tuple
    suspended: Callable[[DestinationKey], ActiveSuspension | None] = lambda destination: None
    learned: Callable[[str], tuple[str, ...]] = lambda address: ()
    orders: Callable[[Subject], tuple[answers.OrderRow, ...]] = lambda mail: ()
    sources: SourcePlans | None = None
    rewrites: RewritePlans | None = None
    credential: Callable[[ZoneSettings, str], str] | None = None
    changes: ChangePlans | None = None
    guard: UserLimitsPlans | None = None
    relay_running: bool = True

    async def explain(self, request: Explain) -> answers.Explanation:
        """Explain the route of mail for an address. Raise ControlError if the request has no valid
        address.
        """
        listener = self._listener(request.listener)
        address, sender, rewritten = self._rewritten(request, listener)
        named, guarded = address, None
        if self.guard is not None and request.user:
            guarded = await self.guard.of(request.user)
            if guarded.mailbox:
                address = guarded.mailbox
                mode = answers.RewritePlan(
                    what="recipient", becomes=address, by=f"mode of the user {request.user}"
                )
                rewritten = (*rewritten, mode)
        choice = self._choice(request, listener, address, sender)
        priority = choice.priority or _priority(request, listener)
        found = await self._explained(request, choice, address, sender)
        words = ""
        if guarded is not None and self.guard is not None:
            words = self.guard.words(guarded, request, named, found.zone)
        return msgspec.structs.replace(found, rewritten=rewritten, priority=priority.value, guard_rails=words)

    async def explain_queued(self, message: Message, row: answers.DeliveryRow) -> answers.Explanation:
        """Explain the route of one queued delivery, which stays in its zone."""
        request = Explain(
            address=row.recipient,
            sender=row.sender or "",
            user=message.envelope.origin.user,
            size=message.size,
            headers=message.headers,
        )
        choice = Choice(row.zone, 0, row.routed or "chosen when the message was accepted")
        found = await self._explained(request, choice, row.recipient, row.sender or "")
        if row.zone not in (*self.zones.names, DEFAULT_ZONE) and row.queue.kind is QueueKind.MAIL:
            gone = f"the zone {row.zone} is no longer configured; its mail stays in the queue"
            found = msgspec.structs.replace(
                found, zone=row.zone, unroutable=gone, verdict="deferred", hosts=()
            )
        return msgspec.structs.replace(found, priority=row.priority, queued=row)

    def compared(self, message: Message, row: answers.DeliveryRow) -> answers.DeliveryRow:
        """Return the row with the rule that chose its zone, and the zone that would be chosen now."""
        mark = f"zone={row.zone} "
        notes = [note.removeprefix(mark) for note in message.trace if note.startswith(mark)]
        routed = next((note for note in notes if row.recipient in note), notes[0] if notes else "")
        if sum(note.startswith("zone=") for note in message.trace) > 1:
            # the rule without its recipients (`zones.zone_notes`)
            routed = routed.rpartition(": ")[0] or routed
        row = msgspec.structs.replace(row, routed=routed)
        if routed == BY_HEADER or row.queue.kind is QueueKind.MAILBOX:
            return row  # the zone header is not stored, and the outbox chooses zones differently
        chosen = self.zones.choose(message.envelope, headers=message.headers, size=message.size)
        now = chosen(Mailbox(row.recipient))
        if now.zone == row.zone:
            return row
        return msgspec.structs.replace(row, new_zone=now.zone, new_why=now.why or NO_ROUTE)

    async def _explained(
        self, request: Explain, choice: Choice, address: str, sender: str
    ) -> answers.Explanation:
        zone = self.zones.get(choice.zone)
        domain = domain_of(Mailbox(address))
        findings = await self.router.examine(zone, "" if zone.next_hop else domain)
        found = findings.answer
        too_large = too_large_for(zone, request.size)
        tls = tls_plan(zone, findings)
        site = found.site if isinstance(found, Route) else None
        sources = () if self.sources is None else self.sources.of(zone, site, sender)
        hosts = await self._hosts(zone, found, sources)
        suspended = self.suspended(found.destination) if isinstance(found, Route) else None
        return answers.Explanation(
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
            or self.hostname,
            limits=limits_in_force(zone, findings),
            rates=rates_in_force(zone, findings),
            suspended_until=suspended.until if suspended else None,
            suspended_reply=suspended.reply if suspended else "",
            orders=self.orders(_subject(request, zone, address, sender, found)),
            relay_running=self.relay_running,
            routes=tuple(
                answers.RouteCheck(
                    rule=check.rule, zone=check.zone, matches=not check.unmatched, unmatched=check.unmatched
                )
                for check in choice.checks
            ),
            sources=sources,
            credential=self._login(zone, sender),
            destination=findings.entry.name if findings.entry is not None else "",
            tls_demand=tls,
            mta_sts=sts_plan(findings.sts),
            changes=None if self.changes is None else self.changes.of(zone, sender, request.headers),
        )

    def _rewritten(self, request: Explain, listener: ListenerSettings | None) -> RewriteResult:
        address, sender = _mailbox(request.address), _sender(request.sender)
        if self.rewrites is None:
            return RewriteResult(address, sender, ())
        came_in_at = "" if listener is None else listener.address
        return self.rewrites.of(address, sender, listener=came_in_at, user=request.user)

    def _choice(
        self, request: Explain, listener: ListenerSettings | None, address: str, sender: str
    ) -> Choice:
        zone_header = None if listener is None else ZoneHeader.of(listener)
        fields, named = request.headers, ""
        if zone_header is not None and zone_header.trusts(request.client, request.user):
            named = zone_header.zone_in(fields)
        if listener is not None:
            fields = Header(fields).without(dropped_headers(listener)).fields
        mail = RoutedMail(
            sender=sender,
            user=request.user,
            listener="" if listener is None else listener.address,
            client=request.client,
            certificate=request.certificate,
            priority=_priority(request, listener),
            headers=fields,
            size=request.size,
        )
        return self.zones.explain(address, mail, named=named)

    def _listener(self, text: str) -> ListenerSettings | None:
        """Return the listener at an address. Raise ControlError if there is none."""
        if not text:
            return None
        listeners = {each.address: each for each in self.listeners()}
        try:
            address = str(parse_listen(text))
        except ValueError as error:
            raise ControlError(f"--listener: {error}") from error
        if address not in listeners:
            near = did_you_mean(address, listeners) or f"; the listeners are {in_words(listeners)}"
            raise ControlError(f'no listener has the address "{address}"{near}')
        return listeners[address]

    def _login(self, zone: ZoneSettings, sender: str) -> str:
        if self.credential is None or not zone.credentials:
            return ""
        return self.credential(zone, sender) or "none: no credential of the zone applies to this sender"

    async def _hosts(
        self, zone: ZoneSettings, found: Route | Unroutable, sources: Sequence[answers.SourcePlan]
    ) -> tuple[answers.HostPlan, ...]:
        if isinstance(found, Unroutable) or zone.next_hop == CAPTURE:
            return ()
        terms = Terms(zone, found)
        return tuple(await asyncio.gather(*(self._host(terms, host, sources) for host in found.hosts)))

    async def _host(
        self, terms: Terms, host: MxHost, sources: Sequence[answers.SourcePlan]
    ) -> answers.HostPlan:
        zone = terms.zone
        addresses = await self.resolver.addresses(host.name, ipv6=zone.ipv6)
        failure = addresses.failure
        problem = failure.reply.text if failure is not None and not addresses.ips else ""
        tlsa: tuple[TlsaRecord, ...] = ()
        try:
            tlsa = (await TlsPlanner(self.resolver).plan(terms, host, addresses)).tlsa
        except HostFailure as error:
            problem = problem or error.reply.text
        return answers.HostPlan(
            name=host.name,
            port=host.port,
            preference=host.preference,
            addresses=tuple(self._address(zone, ip, host.port, sources) for ip in addresses.ips),
            problem=problem,
            tlsa=tuple(dict.fromkeys(f"{each.usage} {each.selector} {each.matching}" for each in tlsa)),
        )

    def _address(
        self, zone: ZoneSettings, ip: str, port: int, sources: Sequence[answers.SourcePlan]
    ) -> answers.AddressPlan:
        plan = _address(zone, ip, port, sources)
        return msgspec.structs.replace(plan, learned=self.learned(display_address(ip, port)))


def _subject(
    request: Explain, zone: ZoneSettings, address: str, sender: str, found: Route | Unroutable
) -> Subject:
    label = found.destination.partition(" ")[2] if isinstance(found, Route) else ""
    return Subject(zone.name, address, sender, request.user, found.name, label)


def _verdict(found: Route | Unroutable) -> str:
    return found.outcome.verdict.value if isinstance(found, Unroutable) else ""


def _sender(text: str) -> str:
    return text.strip("<> ")


def _mailbox(text: str) -> str:
    """Return the requested address; a bare domain stands for a mailbox in it."""
    address = text.strip("<> ")
    if not address or len(address) > MAX_ADDRESS or not address.isprintable():
        raise ControlError("not an address; expected an address such as user@example.com, or a domain")
    if is_message_id(address):
        raise ControlError(
            f"{address} is a message: `zonerelay queue show {address}` shows what it waits for"
        )
    return address if "@" in address else f"postmaster@{address}"


def _address(
    zone: ZoneSettings, ip: str, port: int, sources: Sequence[answers.SourcePlan]
) -> answers.AddressPlan:
    if is_private(ip) and not (zone.allow_private_addresses or zone.next_hop):
        return answers.AddressPlan(
            address=ip, problem="private address, not used: the zone does not set allow_private_addresses"
        )
    if sources:
        own = own_addresses(sources, ipv6=":" in ip)
        family = "IPv6" if ":" in ip else "IPv4"
        return answers.AddressPlan(
            address=ip, source=own, problem="" if own else f"no source has an {family} address"
        )
    try:
        return answers.AddressPlan(address=ip, source=source_address(ip, port))
    except OSError as error:
        return answers.AddressPlan(
            address=ip, problem=f"not reachable from this machine: {error.strerror or error}"
        )


def source_address(ip: str, port: int) -> str:
    """Return the local address of packets to `ip`. Connecting a datagram socket looks up the route and sends
    nothing.
    """
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


def tls_plan(zone: ZoneSettings, found: ExaminedRoute) -> answers.TlsPlan:
    answer = found.answer
    demand = answer.tls_in(zone) if isinstance(answer, Route) else TlsDemand(zone.tls)
    return answers.TlsPlan(
        mode=demand.mode.value,
        because=demand.because,
        dane=demand.dane,
        names=demand.names,
        certificates=demand.certificates,
    )


def sts_plan(found: PolicyLookup | None) -> answers.StsPlan | None:
    """Return the MTA-STS policy, or `None` if none is used because of the zone's settings or a destination
    table.
    """
    if found is None:
        return None
    held = found.held
    if held is None:
        return answers.StsPlan(problem=found.problem)
    policy = held.policy
    return answers.StsPlan(mode=policy.mode.value, policy=held.id, expires=held.expires, mx=policy.patterns)


def _limits(zone: ZoneSettings, found: ExaminedRoute) -> DestinationLimits:
    answer = found.answer
    return answer.limits_in(zone) if isinstance(answer, Route) else DestinationLimits.of_zone(zone)


def limits_in_force(zone: ZoneSettings, found: ExaminedRoute) -> dict[str, int]:
    limits = _limits(zone, found)
    in_force = {
        "max_connections": zone.max_connections,
        "max_connections_per_destination": limits.max_connections,
        "max_recipients_per_transaction": limits.max_recipients_per_transaction,
        "max_messages_per_connection": limits.max_messages_per_connection,
    }
    if zone.max_message_size:
        in_force["max_message_size"] = zone.max_message_size
    return in_force


def too_large_for(zone: ZoneSettings, size: int | None) -> str:
    """Return the reply with which a message of this size would be bounced; "" if it would not be."""
    if not zone.max_message_size or size is None or size <= zone.max_message_size:
        return ""
    most = format_size(zone.max_message_size)
    return f"552 5.3.4 the message has {size} bytes, but zone {zone.name} accepts at most {most}"


def rates_in_force(zone: ZoneSettings, found: ExaminedRoute) -> dict[str, str]:
    """Return the rates that apply, in the notation of the configuration."""
    rates: dict[str, Rate | None] = {
        "max_rate": zone.max_rate,
        "max_rate_per_destination": _limits(zone, found).max_rate,
    }
    return {name: str(rate) for name, rate in rates.items() if rate is not None}
