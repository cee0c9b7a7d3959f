"""Selects the source address from which a batch is sent, and reports rejected and missing addresses.

Policies:

- A source of weight 0 sends no mail, even if all others are skipped, so that an operator can drain a source.
- A source whose address this machine lacks is skipped for all mail (`ABSENT_FOR`). A source that the batch's
  hosts have refused because of its reputation is skipped there (`zone.source_penalty`) while another one is
  left. If every source has been refused, the one with the oldest refusal sends.
- A source that cannot use its IPv6 for either reason sends over IPv4. To hosts without IPv4 it sends over
  IPv6 if that can be bound.
- A zone without a usable source sends nothing: its mail waits.

A refusal counts for one source and the hosts of one destination, in all zones, until its penalty is over.
While a source has IPv4 as well, a refusal over IPv6 counts only for its IPv6, and the next attempt uses IPv4.
An address that cannot be bound is skipped for all mail for `ABSENT_FOR` seconds and then tried again.

This memory is lost with the process. After a restart each refusal is learnt again, at the cost of one
deferral. It is bounded by `MAX_REMEMBERED`, and the oldest refusal is forgotten first.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from ipaddress import ip_address
from operator import itemgetter
from typing import NamedTuple

import msgspec
from msgspec import structs

from zonerelay.config.settings import SourceSettings, SourceUnit, ZoneSettings
from zonerelay.delivery.peer import ConnectionKey, SourceFailure, Terms, own_address
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.clock import Clock
from zonerelay.model.envelope import NULL_SENDER, Mailbox, Message, MessageId
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.routing.addresses import is_address_of_this_machine
from zonerelay.routing.destinations.route import Route, SiteKey
from zonerelay.smtp.client.reputation import blames_address
from zonerelay.telemetry.events.events import Events

MAX_REMEMBERED = 10_000
ABSENT_FOR = 60.0


class Penalty(msgspec.Struct, frozen=True):
    """A period in which a source is not used for some hosts. They rejected it with `reply` at the time `at`.
    `ipv6` is true if the penalty is only for IPv6.
    """

    source: str
    hosts: str
    ipv6: bool
    reply: Reply
    at: float
    until: float


class _MissingAddress(NamedTuple):
    """A source address that this machine does not have."""

    until: float
    reason: str


# Chooses the source of a message by weighted rendezvous hashing, without state.
#
# Every source computes a number from its name and the key of the mail, adjusted by its weight. The highest
# number wins. So a message keeps its source over retries and restarts, sources share mail by their weights,
# and adding or removing a source moves only its own mail. Pure.

_SPAN = 2.0**64


def key_of(by: SourceUnit, message_id: MessageId, sender: Mailbox) -> str:
    """Return the key by which a source is selected: the sender, or the message id. A DSN has no sender, so
    its key is always the message id.
    """
    return sender.lower() if by is SourceUnit.SENDER and sender != NULL_SENDER else message_id


def in_order(sources: Iterable[SourceSettings], key: str) -> list[SourceSettings]:
    """Return the source that is selected by this key, followed by its substitutes in order. Sources of weight
    0 are omitted.
    """
    drawn = [(_draw(source, key), source.name, source) for source in sources if source.weight]
    drawn.sort(key=lambda each: each[:2], reverse=True)
    return [source for _, _, source in drawn]


def shares(sources: Sequence[SourceSettings]) -> list[float]:
    """Return the share of mail that each source gets when all of them are usable."""
    total = sum(source.weight for source in sources)
    return [source.weight / total if total else 0.0 for source in sources]


def _draw(source: SourceSettings, key: str) -> float:
    digest = blake2b(f"{source.name} {key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    # -log(u) / weight is exponential with the weight as its rate, so each source has the smallest number with
    # the probability of its share. The half keeps u between 0 and 1.
    return math.log((int.from_bytes(digest, "big") + 0.5) / _SPAN) / source.weight


class SourceStatus(msgspec.Struct, frozen=True):
    """The state of one source for one destination. `share` is its share of the zone's mail, 0 to 1.

    `penalty` is the reason why the source, or its IPv6, is skipped there. `absent` are the addresses that
    this machine lacks now. `first` is true if the mail would be sent from this source now, and None if that
    depends on the message.
    """

    source: SourceSettings
    share: float
    penalty: Penalty | None
    absent: tuple[str, ...]
    first: bool | None


class SourceSelection:
    """Selects the source address for each connection, and remembers rejected and missing source addresses.
    The remembered times are monotonic, so setting the clock does not extend a penalty.
    """

    def __init__(self, clock: Clock, events: Events) -> None:
        self._clock = clock
        self._events = events
        self._refusals: BoundedDict[tuple[str, str, bool], Penalty] = BoundedDict(MAX_REMEMBERED)
        self._absences: dict[tuple[str, str], _MissingAddress] = {}
        self._sources: dict[str, SourceSettings] = {}

    def configure(self, sources: Iterable[SourceSettings]) -> None:
        """Replace the configured sources. A source whose addresses have changed loses its penalties."""
        new = {source.name: source for source in sources}
        same = {
            name
            for name, each in new.items()
            if name in self._sources and self._sources[name].address == each.address
        }
        for refusal in [key for key in self._refusals if key[0] not in same]:
            del self._refusals[refusal]
        for absence in [key for key in self._absences if key[0] not in same]:
            del self._absences[absence]
        self._sources = new
        for source in new.values():
            for ip in source.address:
                if not is_address_of_this_machine(ip_address(ip)):
                    self._absent(source.name, ip, "no interface of this machine has it")

    # The choice.

    def choose(
        self, zone: ZoneSettings, route: Route, message: Message, unfit: Collection[str] = ()
    ) -> ConnectionKey | None:
        """Return the connection key with the source chosen for a batch, or None if none is usable now.

        `unfit` sources are excluded.
        """
        drawn_by = key_of(zone.source_by, message.id, message.envelope.sender)
        source = self._choose(self._usable(zone, unfit), drawn_by, _hosts(route.site))
        if source is None:
            return None
        return ConnectionKey(source=source, ipv4_only=self._avoids_ipv6(source, _hosts(route.site)))

    def reachable(self, key: ConnectionKey, ips: Sequence[str]) -> tuple[str, ...]:
        """Return the addresses of a host that can be reached from the source in this key."""
        source = key.source
        if source is None:
            return tuple(ips)
        four = tuple(ip for ip in ips if ":" not in ip) if self._has(source, ipv6=False) else ()
        if not self._has(source, ipv6=True) or (key.ipv4_only and four):
            return four
        return tuple(ip for ip in ips if ":" in ip or four)

    def another_left(self, terms: Terms, unfit: Collection[str] = ()) -> bool:
        """Return whether another source, not in `unfit`, may send the mail that was just refused."""
        hosts = _hosts(terms.route.site)
        return any(self._refusal(source.name, hosts) is None for source in self._usable(terms.zone, unfit))

    def _usable(self, zone: ZoneSettings, unfit: Collection[str]) -> list[SourceSettings]:
        named = (self._sources.get(name) for name in zone.sources if name not in unfit)
        return [each for each in named if each is not None and each.weight and not self._is_absent(each)]

    def _choose(self, usable: list[SourceSettings], drawn_by: str, hosts: str) -> SourceSettings | None:
        ranked = in_order(usable, drawn_by) if len(usable) > 1 else usable
        refused: list[tuple[float, SourceSettings]] = []
        for source in ranked:
            refusal = self._refusal(source.name, hosts)
            if refusal is None:
                return source
            refused.append((refusal.at, source))
        return min(refused, key=itemgetter(0))[1] if refused else None

    def _is_absent(self, source: SourceSettings) -> bool:
        """Return whether this machine lacks the source's IPv4 address, or its IPv6 address if the source has
        no IPv4 address.
        """
        ip = own_address(source, ipv6=False) or own_address(source, ipv6=True)
        return self._is_missing(source.name, ip)

    def _avoids_ipv6(self, source: SourceSettings, hosts: str) -> bool:
        return len(source.address) > 1 and (
            self._refusal(source.name, hosts, ipv6=True) is not None or not self._has(source, ipv6=True)
        )

    def _has(self, source: SourceSettings, *, ipv6: bool) -> bool:
        ip = own_address(source, ipv6=ipv6)
        return bool(ip) and not self._is_missing(source.name, ip)

    def _is_missing(self, source: str, ip: str) -> bool:
        """Return whether an address was recently found missing and should not be tried now."""
        absence = self._absences.get((source, ip))
        return absence is not None and absence.until > self._clock.monotonic()

    def _refusal(self, source: str, hosts: str, *, ipv6: bool = False) -> Penalty | None:
        """Return the last refusal of the source by these hosts, or None if no penalty is active. With `ipv6`,
        return that of its IPv6 alone.
        """
        refusal = self._refusals.get((source, hosts, ipv6))
        if refusal is None or refusal.until > self._clock.monotonic():
            return refusal
        del self._refusals[source, hosts, ipv6]
        return None

    # Results of attempts.

    def heard(self, terms: Terms, reply: Reply, peer: str) -> bool:
        """Record a reply of a peer if it rejects the source address. Return true if it does."""
        source = terms.key.source
        if source is None or not blames_address(reply):
            return False
        zone, hosts = terms.zone, _hosts(terms.route.site)
        # A source that was to use IPv4 but used IPv6 has no IPv4 to return to.
        ipv6_alone = peer.startswith("[") and len(source.address) > 1 and not terms.key.ipv4_only
        seconds, now = zone.source_penalty, self._clock.monotonic()
        is_new = self._refusal(source.name, hosts, ipv6=ipv6_alone) is None
        key = (source.name, hosts, ipv6_alone)
        self._refusals[key] = Penalty(*key, reply, now, now + seconds)
        if is_new:
            until = self._clock.now() + seconds
            self._events.source_refused(zone.name, source.name, hosts, reply, until)
        else:
            self._events.source_refused_again(source.name)
        return True

    def lost(self, source: SourceSettings, failure: SourceFailure) -> bool:
        """Record that a socket cannot be bound to an address of a source. Return true if the source cannot be
        used without it.
        """
        self._absent(source.name, failure.ip, failure.reason)
        return self._is_absent(source)

    def bound(self, source: SourceSettings, peer: str) -> None:
        """Record a successful connection from the source to this address of a host."""
        self._present(source.name, own_address(source, ipv6=":" in peer))

    def _present(self, source: str, ip: str) -> None:
        if self._absences.pop((source, ip), None) is not None:
            self._events.source_back(source, ip)

    def _absent(self, source: str, ip: str, reason: str) -> None:
        is_new = (source, ip) not in self._absences
        self._absences[source, ip] = _MissingAddress(self._clock.monotonic() + ABSENT_FOR, reason)
        if is_new:
            self._events.source_absent(source, ip, reason)

    # Reports for operators.

    def problems(self) -> tuple[str, ...]:
        """Describe the missing source addresses for `status`. The system is queried again, because no mail
        may have been tried since.
        """
        found = []
        for (name, ip), absence in list(self._absences.items()):
            if is_address_of_this_machine(ip_address(ip)):
                self._present(name, ip)
            else:
                found.append(f"source {name}: the address {ip} cannot be sent from: {absence.reason}")
        return tuple(found)

    def penalties(self) -> list[Penalty]:
        """Return all active penalties with Unix times, the latest last."""
        now, offset = self._clock.monotonic(), self._clock.now() - self._clock.monotonic()
        active = [each for each in self._refusals.values() if each.until > now]
        return [structs.replace(each, at=each.at + offset, until=each.until + offset) for each in active]

    def penalty_counts(self) -> dict[str, int]:
        """Return the number of destinations for which each source is skipped."""
        counts = dict.fromkeys(self._sources, 0)
        for penalty in self.penalties():
            counts[penalty.source] = counts.get(penalty.source, 0) + 1
        return counts

    def statuses(self, zone: ZoneSettings, site: SiteKey | None, sender: str) -> list[SourceStatus]:
        """Return the status of every source of a zone for mail of `sender` (`""`: unknown) to these hosts."""
        hosts = "" if site is None else _hosts(site)
        sources = [self._sources[name] for name in zone.sources if name in self._sources]
        usable = self._usable(zone, ())
        settled = len(usable) < 2 or (zone.source_by is SourceUnit.SENDER and sender != "")
        drawn_by = key_of(zone.source_by, MessageId(""), Mailbox(sender))
        first = self._choose(usable, drawn_by, hosts)
        penalties = {each.source: each for each in self.penalties() if each.hosts == hosts}
        return [
            SourceStatus(
                source,
                share,
                penalties.get(source.name),
                tuple(ip for ip in source.address if self._is_missing(source.name, ip)),
                source is first if settled else None,
            )
            for source, share in zip(sources, shares(sources), strict=True)
        ]


def from_elsewhere(outcome: Outcome) -> Outcome:
    """Change the outcome of a refusal of the source address so that it defers only this mail, which another
    source may send.
    """
    reply = outcome.reply
    if outcome.verdict is Verdict.BOUNCED and not outcome.local and blames_address(reply):
        later = Reply(reply.code - 100, reply.detail, f"{reply.text}; will be retried from another source")
        return structs.replace(outcome, verdict=Verdict.DEFERRED, reply=later)
    if outcome.scope is Scope.HOST:
        return structs.replace(outcome, scope=Scope.MESSAGE)
    return outcome


def sent_from(source: SourceSettings, outcome: Outcome) -> Outcome:
    """Add the name of the source to the outcome of an attempt that reached a peer, for the log."""
    return structs.replace(outcome, source=source.name) if outcome.peer else outcome


def _hosts(site: SiteKey) -> str:
    """Return the hosts of a site as one string, by which penalties are recorded. Reputation belongs to hosts,
    whichever zone sent the mail.
    """
    return site.partition(" ")[2]
