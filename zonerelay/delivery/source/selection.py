"""The sources at work: which one sends a batch, who is passed over, and what is told about it.

Policies:

- A source of weight 0 takes nothing, not even when all others are passed over: an operator empties it so.
- Passed over are sources whose address this machine has not got now (for everybody, `ABSENT_FOR`), and
  sources that the batch's hosts have refused for their reputation (`zone.source_penalty`), while another one
  is left. When all have been refused it is the turn of the one whose refusal is the oldest.
- A source that has lost its IPv6 alone, in either way, sends over IPv4; to hosts without IPv4, over IPv6 all
  the same if it can be bound.
- A zone none of whose sources can be used sends nothing: its mail waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Protocol

from zonerelay.config.settings import SourceBy, SourceSettings, ZoneSettings
from zonerelay.delivery.peer.connection_key import ConnectionKey, Terms
from zonerelay.delivery.peer.sockets import SourceTrouble, own_address
from zonerelay.delivery.source.choice import in_order, key_of, shares
from zonerelay.delivery.source.penalties import Penalty, SourceMemory
from zonerelay.model.address import Mailbox
from zonerelay.model.clock import Clock
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.model.reply import Reply
from zonerelay.routing.destinations.addresses import is_address_of_this_machine
from zonerelay.routing.destinations.nexthop import Route, SiteKey
from zonerelay.smtp.client.reputation import blame


class SourceObserver(Protocol):
    """Who is told; `telemetry.events` has it."""

    def source_refused(
        self, zone: str, source: str, destination: str, reply: Reply, until: float
    ) -> None: ...

    def source_refused_again(self, source: str) -> None: ...

    def source_absent(self, source: str, address: str, problem: str) -> None: ...

    def source_back(self, source: str, address: str) -> None: ...


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """What is to be said of one source for one destination. `share` of the zone's mail, 0 to 1.

    `penalty`: it, or its IPv6, is passed over there. `absent`: those of its addresses that are not here now.
    `first`: the mail asked about would go out from it now; `None` when that depends on the message.
    """

    source: SourceSettings
    share: float
    penalty: Penalty | None
    absent: tuple[str, ...]
    first: bool | None


class SourceSelection:
    """One per worker, for all zones."""

    def __init__(self, clock: Clock, observer: SourceObserver) -> None:
        self._clock = clock
        self._observer = observer
        self._memory = SourceMemory(clock)
        self._sources: dict[str, SourceSettings] = {}
        self._keys: dict[tuple[str, bool], ConnectionKey] = {}

    def configure(self, sources: Iterable[SourceSettings]) -> None:
        """A source whose addresses have changed starts afresh."""
        new = {source.name: source for source in sources}
        same = [
            each
            for name, each in new.items()
            if name in self._sources and self._sources[name].address == each.address
        ]
        self._memory.keep(same)
        self._sources = new
        self._keys.clear()
        for source in new.values():
            for ip in source.address:
                if not is_address_of_this_machine(ip_address(ip)):
                    self._absent(source.name, ip, "no interface of this machine has it")

    # The choice.

    def choose(
        self, zone: ZoneSettings, route: Route, message: Message, unfit: Collection[str] = ()
    ) -> ConnectionKey | None:
        """`None` when none of the zone's sources can be used now. `unfit` are not asked."""
        drawn_by = key_of(zone.source_by, message.id, message.envelope.sender)
        source = self._choose(self._usable(zone, unfit), drawn_by, _hosts(route.site))
        if source is None:
            return None
        ipv4_only = self._avoids_ipv6(source, _hosts(route.site))
        key = self._keys.get((source.name, ipv4_only))
        if key is None:
            key = self._keys[source.name, ipv4_only] = ConnectionKey(source=source, ipv4_only=ipv4_only)
        return key

    def reachable(self, key: ConnectionKey, ips: Sequence[str]) -> tuple[str, ...]:
        """Those of a host's addresses that this key leads to."""
        source = key.source
        if source is None:
            return tuple(ips)
        four = tuple(ip for ip in ips if ":" not in ip) if self._has(source, ipv6=False) else ()
        if not self._has(source, ipv6=True) or (key.ipv4_only and four):
            return four
        return tuple(ip for ip in ips if ":" in ip or four)

    def another_left(self, terms: Terms, unfit: Collection[str] = ()) -> bool:
        """Mail that was just refused may be taken from another address, not one of the `unfit`."""
        hosts = _hosts(terms.route.site)
        return any(
            self._memory.refused_at(source.name, hosts) is None for source in self._usable(terms.zone, unfit)
        )

    def _usable(self, zone: ZoneSettings, unfit: Collection[str]) -> list[SourceSettings]:
        named = (self._sources.get(name) for name in zone.sources if name not in unfit)
        return [each for each in named if each is not None and each.weight and not self._is_absent(each)]

    def _choose(self, usable: list[SourceSettings], drawn_by: str, hosts: str) -> SourceSettings | None:
        ranked = in_order(usable, drawn_by) if len(usable) > 1 else usable
        refused: list[tuple[float, SourceSettings]] = []
        for source in ranked:
            at = self._memory.refused_at(source.name, hosts)
            if at is None:
                return source
            refused.append((at, source))
        return min(refused, key=_when)[1] if refused else None

    def _is_absent(self, source: SourceSettings) -> bool:
        """Without IPv4 it reaches too little to count, unless it never had it."""
        ip = own_address(source, ipv6=False) or own_address(source, ipv6=True)
        return self._memory.is_absent(source.name, ip)

    def _avoids_ipv6(self, source: SourceSettings, hosts: str) -> bool:
        return len(source.address) > 1 and (
            self._memory.ipv6_refused(source.name, hosts) or not self._has(source, ipv6=True)
        )

    def _has(self, source: SourceSettings, *, ipv6: bool) -> bool:
        ip = own_address(source, ipv6=ipv6)
        return bool(ip) and not self._memory.is_absent(source.name, ip)

    # What happened.

    def heard(self, terms: Terms, reply: Reply, peer: str) -> bool:
        """A refusal from the peer at this address. True when it is about our address, which is remembered."""
        source = terms.key.source
        if source is None or blame(reply) is None:
            return False
        zone, hosts = terms.zone, _hosts(terms.route.site)
        # One that was told to keep to IPv4 and went over IPv6 all the same has no IPv4 to go back to.
        ipv6_alone = peer.startswith("[") and len(source.address) > 1 and not terms.key.ipv4_only
        seconds = zone.source_penalty
        if self._memory.refused(source.name, hosts, reply, seconds=seconds, ipv6=ipv6_alone):
            until = self._clock.now() + seconds
            self._observer.source_refused(zone.name, source.name, hosts, reply, until)
        else:
            self._observer.source_refused_again(source.name)
        return True

    def lost(self, source: SourceSettings, trouble: SourceTrouble) -> bool:
        """An address could not be bound. True when the source is of no use without it."""
        self._absent(source.name, trouble.ip, trouble.reason)
        return self._is_absent(source)

    def bound(self, source: SourceSettings, peer: str) -> None:
        """A connection to this address of a host stands."""
        ip = own_address(source, ipv6=":" in peer)
        if self._memory.present(source.name, ip):
            self._observer.source_back(source.name, ip)

    def _absent(self, source: str, ip: str, reason: str) -> None:
        if self._memory.absent(source, ip, reason):
            self._observer.source_absent(source, ip, reason)

    # For people.

    def problems(self) -> tuple[str, ...]:
        """What `status` shows. The system is asked again, because no mail may have tried since."""
        found = []
        for name, ip, reason in self._memory.absences():
            if is_address_of_this_machine(ip_address(ip)):
                self._memory.present(name, ip)
                self._observer.source_back(name, ip)
            else:
                found.append(f"source {name}: the address {ip} cannot be sent from: {reason}")
        return tuple(found)

    def penalties(self) -> list[Penalty]:
        return self._memory.penalties()

    def penalty_counts(self) -> dict[str, int]:
        """How many destinations pass a source over, for every source."""
        counts = dict.fromkeys(self._sources, 0)
        for penalty in self._memory.penalties():
            counts[penalty.source] = counts.get(penalty.source, 0) + 1
        return counts

    def statuses(self, zone: ZoneSettings, site: SiteKey | None, sender: str) -> list[SourceStatus]:
        """Every source of a zone, for mail of `sender` (`""`: unknown) to a site."""
        hosts = "" if site is None else _hosts(site)
        sources = [self._sources[name] for name in zone.sources if name in self._sources]
        usable = self._usable(zone, ())
        settled = len(usable) < 2 or (zone.source_by is SourceBy.SENDER and sender != "")
        drawn_by = key_of(zone.source_by, MessageId(""), Mailbox(sender))
        first = self._choose(usable, drawn_by, hosts)
        penalties = {each.source: each for each in self.penalties() if each.hosts == hosts}
        return [
            SourceStatus(
                source,
                share,
                penalties.get(source.name),
                tuple(ip for ip in source.address if self._memory.is_absent(source.name, ip)),
                source is first if settled else None,
            )
            for source, share in zip(sources, shares(sources), strict=True)
        ]


def from_elsewhere(outcome: Outcome) -> Outcome:
    """What a refusal of our address comes to while another one is left: a deferral of this mail alone."""
    reply = outcome.reply
    if outcome.verdict is Verdict.BOUNCED and not outcome.local and blame(reply) is not None:
        later = Reply(reply.code - 100, reply.detail, f"{reply.text}; will be tried from another source")
        return replace(outcome, verdict=Verdict.DEFERRED, reply=later)
    if outcome.scope is Scope.HOST:
        return replace(outcome, scope=Scope.MESSAGE)
    return outcome


def sent_from(source: SourceSettings, outcome: Outcome) -> Outcome:
    """For the log, where a peer was reached."""
    return replace(outcome, source=source.name) if outcome.peer else outcome


def _hosts(site: SiteKey) -> str:
    """Reputation is lost with hosts, whichever zone sent the mail."""
    return site.partition(" ")[2]


def _when(refused: tuple[float, SourceSettings]) -> float:
    return refused[0]
