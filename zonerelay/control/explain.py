"""Answers `explain`: determines the route of mail for an address with the components that would deliver it.

Nothing is sent. DNS is queried as for real mail, and the source address is the zone's or follows from the
system's routing table. The same code runs inside the relay and, if none runs, in the command line.

The author of a message is that of `--header 'From: …'`, or else the envelope sender. Used-up quotas are in
the status.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from zonerelay.config.endpoints import CAPTURE, join_port, parse_listen
from zonerelay.config.problems import did_you_mean, in_words
from zonerelay.config.settings import DkimMode, ListenerSettings, RewriteScope, ZoneSettings
from zonerelay.config.units import format_size
from zonerelay.config.user_limits import NONE as NO_LIMITS
from zonerelay.config.user_limits import UserLimits, UserMode
from zonerelay.delivery.peer import HostFailure, Terms
from zonerelay.delivery.source import SourceSelection
from zonerelay.delivery.tls.plan import requirements
from zonerelay.inbound.access.guard import UNREADABLE, Allowance
from zonerelay.inbound.state.context import dropped_headers
from zonerelay.inbound.state.transaction import ClientRewrites, RewriteRules, ZoneHeader
from zonerelay.message.dkim.signature import author_domain
from zonerelay.message.header import Header
from zonerelay.message.srs import Srs, SrsError
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, QueueKind, queue_of
from zonerelay.model.envelope import Mailbox, Message, MessageId, Origin, Priority, domain_of, is_message_id
from zonerelay.operations import answers
from zonerelay.operations.errors import ControlError
from zonerelay.operations.requests import Explain
from zonerelay.queue.orders.order import Subject
from zonerelay.routing.addresses import is_private
from zonerelay.routing.destinations import route
from zonerelay.routing.destinations.mx import MxRouter
from zonerelay.routing.dns.answers import TlsaRecord
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.routing.mta_sts import PolicyLookup
from zonerelay.routing.zones.route_rules import RoutedMail
from zonerelay.routing.zones.zones import BY_HEADER, DEFAULT_ZONE, NO_ROUTE, Zones
from zonerelay.routing.zones.zones import ZoneExplanation as Choice
from zonerelay.smtp.server.paths import CommandError, forward_path, read_leniently

if TYPE_CHECKING:
    from zonerelay.message.dkim.keys import DkimKeys


SRS = "srs"
MAX_PENALTIES = 1000
MAX_ADDRESS = 512


def change_plan(
    zone: ZoneSettings,
    sender: str,
    headers: Sequence[tuple[str, str]],
    *,
    keys: Callable[[], DkimKeys | None],
    srs: Srs | None,
    now: float,
) -> answers.ChangePlan | None:
    """Return the changes that a zone makes to a message, or `None` if it is sent unchanged. `keys` may raise
    a ValueError that describes what is wrong with them.
    """
    author, certain = _author(sender, headers)
    signed_by, unsigned = _signatures(zone, author, keys, now)
    plan = answers.ChangePlan(
        sender=_forwarded(sender, srs if zone.srs else None, now),
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


def _signatures(
    zone: ZoneSettings, author: str, keys_in_force: Callable[[], DkimKeys | None], now: float
) -> tuple[tuple[str, ...], str]:
    """Return the DKIM signatures that a message would get, or the reason why it gets none."""
    if zone.dkim is DkimMode.OFF:
        return (), ""
    try:
        keys = keys_in_force()
    except ValueError as error:
        return (), str(error)
    if keys is None:
        return (), "no keys are configured" if zone.dkim is DkimMode.REQUIRED else ""
    found = keys.for_author(author, now) if author else ()
    if not found:
        return (), f"no key for {author}" if author else "the From address is unknown"
    return tuple(f"{key.selector}._domainkey.{key.domain} ({key.algorithm})" for key in found), ""


def _forwarded(sender: str, srs: Srs | None, now: float) -> str:
    """Return the sender as SRS would rewrite it, or "" if it stays unchanged."""
    if srs is None or not sender:
        return ""
    try:
        becomes = srs.forward(Mailbox(sender), now)
    except SrsError:
        return ""
    return "" if becomes == sender else str(becomes)


def _author(sender: str, headers: Sequence[tuple[str, str]]) -> tuple[str, bool]:
    """Return the domain of a message's author, and whether it is known or only guessed from the sender."""
    given = [value for name, value in headers if name.lower() == "from"]
    if not given:
        return domain_of(Mailbox(sender)) if "@" in sender else "", False
    return author_domain("".join(f"From: {value}\r\n" for value in given).encode()), True


def penalties_of(selection: SourceSelection) -> tuple[answers.SourcePenalty, ...]:
    """Return the source addresses that destinations have rejected, the latest rejection first."""
    latest = selection.penalties()[: -MAX_PENALTIES - 1 : -1]
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


class Explainer(msgspec.Struct, frozen=True, kw_only=True):
    """Explains the route of mail for an address. `hostname` is the relay's own host name. The functions
    return what applies now.

    `suspended` returns until when the scheduler has suspended a destination, and why. `credential` describes
    the login of a zone for a sender, `rails` returns the limits of a user, or `None` if they cannot be read,
    and `learned` returns what deliveries have learned about an address (`ip:port`).
    """

    zones: Zones
    router: MxRouter
    resolver: Resolver
    hostname: str
    clock: Clock
    selection: SourceSelection
    listeners: Callable[[], Sequence[ListenerSettings]]
    rewriting: Callable[[], RewriteRules | None]
    srs: Callable[[], Srs | None]
    keys: Callable[[], DkimKeys | None]
    rails: Callable[[str], Awaitable[UserLimits | None]]
    credential: Callable[[ZoneSettings, str], str]
    suspended: Callable[[route.DestinationKey], tuple[float | None, str]] = lambda destination: (None, "")
    learned: Callable[[str], tuple[str, ...]] = lambda address: ()
    orders: Callable[[Subject], tuple[answers.OrderRow, ...]] = lambda mail: ()
    relay_running: bool = True

    async def explain(self, request: Explain) -> answers.Explanation:
        """Return the route of mail for an address and the policies that apply to it. Raise ControlError if
        the request has no valid address.
        """
        request = msgspec.structs.replace(
            request, address=_mailbox(request.address), sender=request.sender.strip("<> ")
        )
        listener = self._listener(request.listener)
        rails = await self.rails(request.user) if request.user else NO_LIMITS
        rewritten: list[answers.RewritePlan] = []
        named, sender = self._rewritten(request, listener, rewritten)
        address = named
        if rails is not None and rails.mode is UserMode.REDIRECT:
            address = rails.mailbox
            by = f"mode of the user {request.user}"
            rewritten.append(answers.RewritePlan(what="recipient", becomes=address, by=by))
        choice = self._choice(request, listener, address, sender)
        priority = choice.priority or _priority(request, listener)
        found = await self._explained(request, choice, address, sender)
        words = self._limits_in_words(rails, request, named, found.zone)
        return msgspec.structs.replace(
            found, rewritten=tuple(rewritten), priority=priority.value, guard_rails=words
        )

    async def explain_queued(self, message: Message, row: answers.DeliveryRow) -> answers.Explanation:
        """Return the route of a queued delivery, for which no new zone is chosen."""
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
        """Return the row of a delivery with the rule that chose its zone, and the zone that would be chosen
        now.
        """
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
        found, site, label, unroutable, verdict = findings.answer, None, "", "", ""
        suspended: tuple[float | None, str] = (None, "")
        demand, limits = route.TlsDemand(zone.tls), route.DestinationLimits.of_zone(zone)
        if isinstance(found, route.Route):
            site, suspended = found.site, self.suspended(found.destination)
            demand, limits = found.tls_in(zone), found.limits_in(zone)
            label = found.destination.partition(" ")[2]
        else:
            unroutable, verdict = str(found.outcome.reply), found.outcome.verdict.value
        if too_large := too_large_for(zone, request.size):
            unroutable, verdict = too_large, "bounced"
        sources = self._sources(zone, site, sender)
        # exactly one if it is certain
        used = [each for each in sources if each.chosen] or [each for each in sources if each.share]
        login = self.credential(zone, sender) if zone.credentials else ""
        if zone.credentials and not login:
            login = "none: no credential of the zone applies to this sender"
        rates = {"max_rate": zone.max_rate, "max_rate_per_destination": limits.max_rate}
        sizes = {"max_message_size": zone.max_message_size} if zone.max_message_size else {}
        return answers.Explanation(
            address=request.address,
            sender=request.sender,
            domain=domain,
            zone=zone.name,
            rule=choice.rule,
            reason=choice.reason,
            next_hop=zone.next_hop,
            route=found.name,
            hosts=await self._hosts(zone, found, used),
            unroutable=unroutable,
            verdict=verdict,
            tls=demand.mode.value,
            ehlo_name=", ".join(dict.fromkeys(each.ehlo_name for each in used))
            or zone.ehlo_name
            or self.hostname,
            limits={
                "max_connections": zone.max_connections,
                "max_connections_per_destination": limits.max_connections,
                "max_recipients_per_transaction": limits.max_recipients_per_transaction,
                "max_messages_per_connection": limits.max_messages_per_connection,
                **sizes,
            },
            rates={name: str(rate) for name, rate in rates.items() if rate is not None},
            suspended_until=suspended[0],
            suspended_reply=suspended[1],
            orders=self.orders(Subject(zone.name, address, sender, request.user, found.name, label)),
            relay_running=self.relay_running,
            routes=tuple(
                answers.RouteCheck(
                    rule=check.rule, zone=check.zone, matches=not check.unmatched, unmatched=check.unmatched
                )
                for check in choice.checks
            ),
            sources=tuple(sources),
            credential=login,
            destination=findings.entry.name if findings.entry is not None else "",
            tls_demand=msgspec.convert(demand, answers.TlsPlan, from_attributes=True),
            mta_sts=sts_plan(findings.sts),
            changes=change_plan(
                zone, sender, request.headers, keys=self.keys, srs=self.srs(), now=self.clock.now()
            ),
        )

    def _rewritten(
        self, request: Explain, listener: ListenerSettings | None, plans: list[answers.RewritePlan]
    ) -> tuple[str, str]:
        """Return the recipient and the sender after SRS addresses are restored and [[rewrite]] rules are
        applied. Add each change to the plans.
        """
        recipient, sender = request.address, request.sender
        srs, rewriting = self.srs(), self.rewriting()
        try:
            first = None if srs is None else srs.reverse(Mailbox(recipient), self.clock.now())
        except SrsError as error:
            first, problem = None, f"rejected with 550 5.1.1: {error}"
            plans.append(answers.RewritePlan(what="recipient", by=SRS, problem=problem))
        if first is not None:
            recipient = first
            plans.append(answers.RewritePlan(what="recipient", becomes=first, by=SRS))
        if rewriting is None:
            return recipient, sender
        rewrites = ClientRewrites(rewriting, "" if listener is None else listener.address, request.user)
        found = []
        for kind, address in ((RewriteScope.SENDER, sender), (RewriteScope.RECIPIENT, recipient)):
            other, rule = rewrites.find(kind, Mailbox(address))
            if rule:
                by = f"rewrite={rule}"
                plans.append(answers.RewritePlan(what=kind.value, becomes=other, by=by))
            found.append(str(other))
        return found[1], found[0]

    def _limits_in_words(self, rails: UserLimits | None, request: Explain, address: str, zone: str) -> str:
        """Describe how the user's limits affect mail for an address, or return "" if they do not."""
        if rails is None:
            return f"rejected with {UNREADABLE.reply}"
        if not request.client:  # an unknown client may be in the user's networks
            rails = replace(rails, networks=())
        allowance, recipient = Allowance(request.user, rails), Mailbox(address)
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
        mode = f'mode = "{rails.mode}"'
        if allowance.is_captured(recipient):
            return f"not sent, but captured (held if no zone captures mail; {mode})"
        return f"a copy is sent to {rails.mailbox} ({mode})" if rails.mode is UserMode.COPY else ""

    def _sources(
        self, zone: ZoneSettings, site: route.SiteKey | None, sender: str
    ) -> list[answers.SourcePlan]:
        """Return the zone's source addresses and their shares, for mail of this sender ("" if unknown) to
        these hosts.
        """
        plans = []
        for each in self.selection.statuses(zone, site, sender) if zone.sources else ():
            source, penalty = each.source, each.penalty
            plan = answers.SourcePlan(
                name=source.name,
                addresses=source.address,
                ehlo_name=source.ehlo_name or zone.ehlo_name or self.hostname,
                share=round(each.share, 4),
                chosen=each.first,
                refused_until=penalty.until if penalty else None,
                refused_reply=str(penalty.reply) if penalty else "",
                refused_ipv6_only=penalty is not None and penalty.ipv6,
                absent=each.absent,
            )
            plans.append(plan)
        return plans

    def _choice(
        self, request: Explain, listener: ListenerSettings | None, address: str, sender: str
    ) -> Choice:
        zone_header = None if listener is None else ZoneHeader.of(listener)
        fields, named = request.headers, ""
        if zone_header is not None and zone_header.trusts(request.client, request.user):
            named = zone_header.zone_in(fields)
        if listener is not None:
            fields = Header(fields).without(dropped_headers(listener)).fields
        origin = Origin(
            user=request.user,
            listener="" if listener is None else listener.address,
            client_address=request.client,
            certificate=request.certificate,
        )
        priority = _priority(request, listener)
        mail = RoutedMail(sender, origin, priority=priority, headers=fields, size=request.size)
        return self.zones.explain(address, mail, named=named)

    def _listener(self, text: str) -> ListenerSettings | None:
        """Return the settings of the listener at an address. Raise ControlError if there is none."""
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

    async def _hosts(
        self, zone: ZoneSettings, found: route.Route | route.Unroutable, sources: Sequence[answers.SourcePlan]
    ) -> tuple[answers.HostPlan, ...]:
        if isinstance(found, route.Unroutable) or zone.next_hop == CAPTURE:
            return ()
        terms = Terms(zone, found)
        return tuple(await asyncio.gather(*(self._host(terms, host, sources) for host in found.hosts)))

    async def _host(
        self, terms: Terms, host: route.MxHost, sources: Sequence[answers.SourcePlan]
    ) -> answers.HostPlan:
        zone = terms.zone
        addresses = await self.resolver.addresses(host.name, ipv6=zone.ipv6)
        problem = "" if addresses.failure is None else addresses.failure.text
        tlsa: tuple[TlsaRecord, ...] = ()
        try:
            tlsa = (await requirements(self.resolver, terms, host, addresses)).tlsa
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
        source = problem = ""
        if is_private(ip) and not (zone.allow_private_addresses or zone.next_hop):
            problem = "private address: not used without allow_private_addresses in the zone"
        elif zone.sources:
            is_ipv6 = ":" in ip
            source = ", ".join(own for each in sources for own in each.addresses if (":" in own) == is_ipv6)
            problem = "" if source else f"no source has an {'IPv6' if is_ipv6 else 'IPv4'} address"
        else:
            try:
                source = source_address(ip, port)
            except OSError as error:
                problem = f"not reachable from this machine: {error.strerror or error}"
        return answers.AddressPlan(
            address=ip, source=source, problem=problem, learned=self.learned(join_port(ip, port))
        )


def _mailbox(text: str) -> str:
    """Parse the requested address as RCPT does; a domain alone stands for a mailbox in it. Raise ControlError
    if it is not an address.
    """
    address = text.strip("<> ")
    if is_message_id(address):
        raise ControlError(
            f"{address} is a message: `zonerelay queue show {address}` shows what it waits for"
        )
    written = f"<{address}>" if "@" in address else f"<postmaster@{address}>"
    with suppress(CommandError):
        mailbox, rest = forward_path(read_leniently(written[:MAX_ADDRESS]))
        if not rest:
            return mailbox
    raise ControlError("not an address; expected an address such as user@example.com, or a domain")


def source_address(ip: str, port: int) -> str:
    """Return the local address from which the system sends packets to `ip`. Connecting a datagram socket
    looks up the route and sends nothing.
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


def sts_plan(found: PolicyLookup | None) -> answers.StsPlan | None:
    """Return the MTA-STS policy of a domain, or `None` if the zone or a [[destination]] table does not use
    MTA-STS.
    """
    if found is None:
        return None
    held = found.held
    if held is None:
        return answers.StsPlan(problem=found.problem)
    return answers.StsPlan(mode=held.mode.value, policy=held.id, expires=held.expires, mx=held.patterns)


def too_large_for(zone: ZoneSettings, size: int | None) -> str:
    """Return the reply with which the zone would bounce a message of this size, or "" if it would not."""
    if not zone.max_message_size or size is None or size <= zone.max_message_size:
        return ""
    most = format_size(zone.max_message_size)
    return f"552 5.3.4 the message has {size} bytes, but zone {zone.name} accepts at most {most}"
