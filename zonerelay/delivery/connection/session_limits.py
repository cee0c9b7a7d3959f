"""Learns limits that a host does not announce (messages per session, concurrent sessions) and which of its
extensions work. Orders hosts by success. No I/O.

Some hosts refuse MAIL, RCPT or DATA when a connection has carried enough messages (Stalwart: 452 4.4.5 at
DATA), and MAIL when the client has too many connections (432 4.3.2). The reply looks like a refusal of the
mail. So a refusal is *suspect*

- on a connection that has delivered a message, because the session may have reached its limit;
- at MAIL on any other connection, while more connections to the host are open, because they may be too many.

The courier closes the connection and tries again on another one, which does not count as an attempt. The
reply there shows the cause:

- The mail gets further: the refusal was about the connection. The number of messages is remembered for the
  address for `REMEMBER_FOR`, as if the host had announced it (MAILMAX, RFC 9422).
- The same refusal: it is about the mail. It is final, and the same text of that address is not suspect for
  `ABOUT_MAIL_FOR`. So a host that refuses many recipients, or greylists, costs one more connection for each
  kind of refusal. If the text is never the same, it costs at most `MOST_IN_VAIN` in that time.

A random refusal must not lower the number for a day. So once a connection has carried the number of messages,
two earlier refusals are needed to lower it.

`UsedExtensions` decides which of a host's extensions are used: BDAT instead of DATA (RFC 3030), and the
optional parameters of a message (SIZE, BODY for a body of 7 bits, RET, ENVID, NOTIFY, ORCPT, an unnecessary
SMTPUTF8). Some hosts offer an extension and then refuse it. For `REMEMBER_FOR` seconds such a host gets mail
without it. The decision is made once for each connection, so that mail to other hosts has no cost.

`HostOrder` orders the hosts of a route by preference, with dead hosts last. Equal hosts are shuffled (RFC
5321 5.1). In a zone that shares its mail between next hops, each batch begins with one of the equal hosts and
uses only idle connections to that host (`ConnectionKey.host`).

    up ──connecting fails, or the greeting is bad──▶ down for 30 s ──▶ a probe ──it answers──▶ up
                                                        ▲                 │
                                                        └── twice as long, up to 10 minutes

The state is kept for each address (`ip:port`) and, for the choice between hosts before their look-up, for
each `name:port`. While an address is down, and while its probe is in progress, it is tried after all others.
When its time is over, one batch tries it in its usual place. No address is ever excluded: if every address is
down, mail is tried as if none were. Of more than `MAX_REMEMBERED` dead hosts, those that failed longest ago
are forgotten.
"""

import functools
import random as random_module
import re
from collections import deque
from collections.abc import Iterator
from itertools import groupby

import msgspec
from msgspec import structs

from zonerelay.config.endpoints import join_port
from zonerelay.delivery.connection.session import OutgoingSession
from zonerelay.delivery.peer import HostFailure, Terms
from zonerelay.model.bounded import BoundedDict, ExpiringSet
from zonerelay.model.clock import Clock
from zonerelay.model.reply import Reply, Verdict
from zonerelay.routing.destinations.route import MxHost, Route
from zonerelay.smtp.client.transaction import BdatFailure, ClientTransaction, TransactionPhase

FIRST_PAUSE = 30.0
LONGEST_PAUSE = 600.0

PROBE_TIME = 60.0
"""Seconds for which a probe keeps other batches from the host if the probe never reports a result."""


class _DownHost(msgspec.Struct):
    """A host that is considered down, and the time until which it is tried last."""

    failures: int = 0
    probed: bool = True
    until: float = 0.0


class HostOrder:
    """Orders the hosts of a route so that working ones come first, and remembers hosts that are down."""

    def __init__(self, clock: Clock, random: random_module.Random) -> None:
        self._clock = clock
        self._random = random
        self._down: BoundedDict[str, _DownHost] = BoundedDict(MAX_REMEMBERED)

    def first_of(self, route: Route) -> str:
        """Return one of the most preferred hosts that are not known to be down, for `ConnectionKey.host`.
        Does not start a probe.
        """
        most = route.hosts[0].preference if route.hosts else 0
        best = [_name(host) for host in route.hosts if host.preference == most]
        now = self._clock.monotonic()
        dead = {name for name in best if name in self._down and now < self._down[name].until}
        best = [name for name in best if name not in dead] or best
        return self._random.choice(best) if best else ""

    def hosts(self, terms: Terms, again: str = "") -> Iterator[MxHost]:
        """Yield the route's hosts in the order in which to try them, beginning with the host `again` if it is
        given.
        """
        yield from (host for host in terms.route.hosts if again and host.name == again)
        first = terms.key.host
        for _, equal in groupby(terms.route.hosts, key=lambda host: host.preference):
            group = list(equal)
            self._random.shuffle(group)
            if first:
                group.sort(key=lambda host: _name(host) != first)
            yield from (host for host in group if host.name != again)

    def is_down(self, host: MxHost, ip: str) -> bool:
        """Return whether the address should be tried after all others. Call it right before the attempt:
        after the address's time the first call starts its probe and returns false.
        """
        down = self._down.get(join_port(ip, host.port)) if self._down else None
        if down is None:
            return False
        now = self._clock.monotonic()
        if now < down.until:
            return True
        down.probed = True
        down.until = now + PROBE_TIME
        return False

    def talked(self, host: MxHost, ip: str) -> None:
        """Record that the host accepted a connection and answered like a mail server."""
        for key in _keys(host, ip) if self._down else ():
            self._down.pop(key, None)

    def failed(self, host: MxHost, ip: str, failure: HostFailure) -> None:
        """Record a failed attempt, after which a host that seems to be down is tried last for some time.
        Connections that fail at the same time count as one failure.
        """
        if not failure.down:
            if failure.asked:
                self.talked(host, ip)
            return
        now = self._clock.monotonic()
        for key in _keys(host, ip):
            down = self._down.get(key) or _DownHost()
            if down.probed or now >= down.until:
                self._down[key] = down
                down.probed = False
                down.until = now + min(FIRST_PAUSE * 2.0 ** min(down.failures, 30), LONGEST_PAUSE)
                down.failures += 1


def _name(host: MxHost) -> str:
    return join_port(host.name, host.port)


def _keys(host: MxHost, ip: str) -> set[str]:
    return {join_port(ip, host.port), _name(host)}


REMEMBER_FOR = 24 * 3600.0
ABOUT_MAIL_FOR = 3600.0

MOST_IN_VAIN = 8
"""The number of refusals of one command at one address that are retried in vain, per `ABOUT_MAIL_FOR`."""

MAX_REMEMBERED = 10_000
"""The maximum number of addresses, and of refusals. The oldest ones are forgotten first."""

MAX_TEXT = 200
"""Characters of a reply that are compared."""

_PROGRESS = {
    TransactionPhase.MAIL: 0,
    TransactionPhase.RCPT: 1,
    TransactionPhase.DATA: 2,
    TransactionPhase.LAST_CHUNK: 3,
    TransactionPhase.FINAL_DOT: 3,
}
"""How far mail gets before it is refused in a phase. A single BDAT (LAST_CHUNK) is DATA and
final dot in one.
"""
_VARIABLE = re.compile(r"\S*[\d@<>\"'_/=]\S*")
"""A word with an address, a number or an identifier, which differs between two replies for the
same reason.
"""


class Suspect(msgspec.Struct, frozen=True):
    """A rejection that may be caused by the server's limit on messages per connection or on connections.
    `messages` counts those that the session carried before it.

    `others` is the number of other open connections to the host, if the refusal may be about their number.
    """

    session: OutgoingSession
    phase: TransactionPhase
    reply: Reply
    messages: int
    others: int = 0


class _LearnedLimit(msgspec.Struct):
    """The number of messages that one host accepts on a connection."""

    most: int
    until: float
    was_reached: bool = False
    """Whether a connection has carried `most` messages since the number was learned."""


class SessionLimits:
    """The limits on sessions that hosts do not announce, as learned from their replies."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._learned: BoundedDict[str, _LearnedLimit] = BoundedDict(MAX_REMEMBERED)
        self._about_mail = ExpiringSet[tuple[str, TransactionPhase, str]](clock, ABOUT_MAIL_FOR)
        """Refusals of an address, in a phase, that are not suspect."""
        self._in_vain: BoundedDict[tuple[str, TransactionPhase], deque[float]] = BoundedDict(MAX_REMEMBERED)
        """The times at which the latest suspect refusals were retried in vain."""

    def most(self, address: str) -> int | None:
        """Return how many messages a session with this address (`ip:port`) accepts, or None if unknown."""
        host = self._learned.get(address)
        if host is None or host.until <= self._clock.monotonic():
            return None
        return host.most

    def apply(self, session: OutgoingSession) -> None:
        """Limit the session to the number of messages that the host is known to accept."""
        most = self.most(session.peer.address)
        if most is not None:
            session.max_transactions = min(session.max_transactions, most)

    def suspect(
        self, session: OutgoingSession, transaction: ClientTransaction, *, others: int
    ) -> Suspect | None:
        """Return the refusal that ended the transaction, if a limit on connections may be the cause.

        Call it after every transaction, because it also notes what the session has delivered. `others` is the
        number of other open connections to the host.
        """
        if transaction.delivered:
            self._carried(session, transaction)
        phase, reply = transaction.refused_at, transaction.refusal
        if phase is None or phase is TransactionPhase.FINAL_DOT or reply is None:
            return None
        if session.delivered:
            others = 0
        elif phase is not TransactionPhase.MAIL or not others:  # a new connection, and not one too many
            self._note(session.peer.address, phase, reply)
            return None
        if self._is_about_mail(session.peer.address, phase, reply):
            return None
        # A limit that is reported at RCPT may count recipients.
        messages = session.transactions - 1
        if phase is TransactionPhase.RCPT:
            messages = max(messages, session.delivered)
        return Suspect(session, phase, reply, messages, others)

    def still_suspect(
        self, suspect: Suspect, session: OutgoingSession, transaction: ClientTransaction, *, others: int
    ) -> Suspect | None:
        """Learn the cause of a suspicious refusal from the next transaction, on another connection to the
        address.

        Return None if it has shown what the refusal was about. `others` has the same meaning as in `suspect`.
        """
        refused_at, reply = transaction.refused_at, transaction.refusal
        if refused_at is None or reply is None:
            if not transaction.delivered:
                return suspect
        elif _PROGRESS[refused_at] <= _PROGRESS[suspect.phase]:
            is_same = comparable(reply) == comparable(suspect.reply)
            if _PROGRESS[refused_at] < _PROGRESS[suspect.phase] or (suspect.others and not session.delivered):
                return suspect
            if is_same:
                self._note(session.peer.address, suspect.phase, reply)
            if is_same or not others:
                key = session.peer.address, suspect.phase
                times = self._in_vain[key] = self._in_vain.get(key) or deque(maxlen=MOST_IN_VAIN)
                times.append(self._clock.monotonic())
            return None
        if not suspect.others:  # the queue limits the connections
            self._learn(suspect)
        return None

    def _learn(self, suspect: Suspect) -> None:
        address = suspect.session.peer.address
        host, known = self._learned.get(address), self.most(address)
        if host is not None and host.was_reached and known is not None and suspect.messages < known:
            host.was_reached = False
        else:
            until = self._clock.monotonic() + REMEMBER_FOR
            self._learned[address] = _LearnedLimit(max(suspect.messages, 1), until)

    def _carried(self, session: OutgoingSession, transaction: ClientTransaction) -> None:
        taken = (each for each in transaction.outcomes if each and each.verdict is Verdict.DELIVERED)
        session.delivered += sum(1 for _ in taken)
        host = self._learned.get(session.peer.address)
        if host is not None and session.transactions >= host.most:
            host.was_reached = True

    def _note(self, address: str, phase: TransactionPhase, reply: Reply) -> None:
        self._about_mail.add((address, phase, comparable(reply)))

    def _is_about_mail(self, address: str, phase: TransactionPhase, reply: Reply) -> bool:
        if (address, phase, comparable(reply)) in self._about_mail:
            return True
        times = self._in_vain.get((address, phase), deque())
        return len(times) >= MOST_IN_VAIN and times[0] + ABOUT_MAIL_FOR > self._clock.monotonic()


def comparable(reply: Reply) -> str:
    """Return a reply as text without the parts that may differ between recipients or messages."""
    return f"{reply.code} {reply.detail} {_VARIABLE.sub('*', reply.text[:MAX_TEXT])}"


class UsedExtensions:
    """The SMTP extensions that are used with each host, as learned from its replies."""

    def __init__(self, clock: Clock) -> None:
        self._without_bdat = {failure: ExpiringSet[str](clock, REMEMBER_FOR) for failure in BdatFailure}
        self._few_parameters = ExpiringSet[str](clock, REMEMBER_FOR)
        self._took_mail = ExpiringSet[str](clock, REMEMBER_FOR)

    def failure(self, address: str) -> str:
        """Return the reason why a host (`ip:port`) is sent DATA instead of BDAT, or `""` if it is not."""
        return next((failure for failure, hosts in self._without_bdat.items() if address in hosts), "")

    def few_parameters(self, address: str) -> bool:
        """Return true if a host has refused command parameters that it offers, and accepted mail without
        them.
        """
        return address in self._few_parameters

    def allow(self, session: OutgoingSession) -> None:
        """Remove extensions that the host does not support correctly from a new session."""
        address = session.peer.address
        session.has_taken_mail = address in self._took_mail
        if self.few_parameters(address):
            session.capabilities = structs.replace(session.capabilities, few_parameters=True)
        session.chunking = (
            session.terms.zone.chunking and session.capabilities.chunking and not self.failure(address)
        )
        if session.chunking:
            surplus = self._without_bdat[BdatFailure.SURPLUS]
            session.protocol.on_surplus = functools.partial(surplus.add, address)

    def learn(self, session: OutgoingSession, transaction: ClientTransaction) -> None:
        """Record from a finished transaction which extensions of the host work."""
        if transaction.parameters_refused:
            session.capabilities = structs.replace(session.capabilities, few_parameters=True)
        elif session.capabilities.few_parameters and transaction.delivered:
            self._few_parameters.add(session.peer.address)
        if transaction.delivered and not session.has_taken_mail:
            session.has_taken_mail = True
            self._took_mail.add(session.peer.address)
        if not session.chunking:
            return
        if transaction.bdat_failure is not None:
            session.chunking = False
            self._without_bdat[transaction.bdat_failure].add(session.peer.address)
        elif transaction.bdat_taken:
            session.bdat_taken = True
