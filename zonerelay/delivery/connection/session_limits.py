"""Limits that a host announces nowhere: messages in a session, and sessions at a time. No I/O.

Some hosts refuse MAIL, RCPT or DATA when a connection has carried enough messages (Stalwart: 452 4.4.5 at
DATA), and MAIL when the client has too many connections (432 4.3.2). The reply looks like a refusal of the
mail. So a refusal is *suspect*

- on a connection that has delivered a message: the session may have reached its limit;
- at MAIL on any other connection, while more connections to the host are open: they may be too many.

The courier closes the connection and asks again on another one, without using up an attempt. The answer there
tells which it was:

- The mail gets further: the refusal was about the connection. The number of messages is remembered for the
  address for `REMEMBER_FOR`, as if the host had announced it (MAILMAX, RFC 9422).
- The same refusal: it is about the mail. It is final, and the same words of that address are not suspect for
  `ABOUT_MAIL_FOR`. So a host that refuses many recipients, or greylists, costs one connection more for each
  kind of refusal; where the words are never the same, `MOST_IN_VAIN` in that time.

A random refusal must not lower the number for a day: once a connection has carried the number of messages, it
takes two refusals before that to lower it.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from zonerelay.delivery.connection.session import Session
from zonerelay.model.clock import Clock
from zonerelay.model.outcome import Verdict
from zonerelay.model.reply import Reply
from zonerelay.smtp.client.transaction import Phase, Transaction

REMEMBER_FOR = 24 * 3600.0
ABOUT_MAIL_FOR = 3600.0

MOST_IN_VAIN = 8
"""Times, per `ABOUT_MAIL_FOR`, that refusals of one command at one address are asked about in vain."""

MAX_REMEMBERED = 10_000
"""Addresses. The one that was used longest ago is forgotten first."""

MAX_REFUSALS = 32
"""Refusals of one command that are remembered for an address."""

MAX_TEXT = 200
"""Characters of a reply that are compared."""

_PROGRESS = {Phase.MAIL: 0, Phase.RCPT: 1, Phase.DATA: 2, Phase.LAST_CHUNK: 3, Phase.FINAL_DOT: 3}
"""How far mail gets that is refused at a phase. An only BDAT (LAST_CHUNK) is DATA and final dot in one."""
_VARIABLE = re.compile(r"\S*[\d@<>\"'_/=]\S*")
"""A word with an address, a number or an identifier: it differs between two replies for the same reason."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A refusal that may be about the connection. `messages`: those that the session carried before it.

    `others`: the open connections to the host besides this one, when the refusal may be about their number.
    """

    session: Session
    phase: Phase
    reply: Reply
    messages: int
    others: int = 0


@dataclass(slots=True)
class _Host:
    most: int | None = None
    until: float = 0.0
    was_reached: bool = False
    """A connection has carried `most` messages since the number was learned."""
    about_mail: dict[Phase, OrderedDict[str, float]] = field(default_factory=dict)
    """Until when a refusal is not suspect."""
    in_vain: dict[Phase, deque[float]] = field(default_factory=dict)
    """When the latest suspect refusals were asked about in vain."""


class SessionLimits:
    """One per worker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._hosts: OrderedDict[str, _Host] = OrderedDict()

    def most(self, address: str) -> int | None:
        """Returns how many messages a session with this address (`ip:port`) takes, `None` if not known."""
        host = self._hosts.get(address)
        if host is None or host.until <= self._clock.monotonic():
            return None
        return host.most

    def apply(self, session: Session) -> None:
        """Ends the session after the number of messages that is known."""
        most = self.most(session.peer.address)
        if most is not None:
            session.max_transactions = min(session.max_transactions, most)

    def suspect(self, session: Session, transaction: Transaction, *, others: int) -> Suspect | None:
        """Returns the refusal that ended the transaction when it may be about the connection.

        Call it after every transaction, because it also notes what the session has delivered.
        `others` are the open connections to the host besides this one.
        """
        if transaction.delivered:
            self._carried(session, transaction)
        phase, reply = transaction.refused_at, transaction.refusal
        if phase is None or phase is Phase.FINAL_DOT or reply is None:
            return None
        if session.delivered:
            others = 0
        elif phase is not Phase.MAIL or not others:  # a new connection, and not one too many
            self._note(session.peer.address, phase, reply)
            return None
        if self._is_about_mail(session.peer.address, phase, reply):
            return None
        # A limit that is told at RCPT may count recipients.
        messages = session.transactions - 1
        if phase is Phase.RCPT:
            messages = max(messages, session.delivered)
        return Suspect(session, phase, reply, messages, others)

    def still_suspect(
        self, suspect: Suspect, session: Session, transaction: Transaction, *, others: int
    ) -> Suspect | None:
        """Learns from the transaction that follows a suspect refusal, on another connection to the address.

        Returns `None` when it has shown what the refusal was about. `others`: as for `suspect`.
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
                in_vain = self._host(session.peer.address).in_vain
                in_vain.setdefault(suspect.phase, deque(maxlen=MOST_IN_VAIN)).append(self._clock.monotonic())
            return None
        if not suspect.others:  # the queue sees to fewer connections
            self._learn(suspect)
        return None

    def _learn(self, suspect: Suspect) -> None:
        address = suspect.session.peer.address
        host, known = self._host(address), self.most(address)
        is_lower = known is not None and suspect.messages < known
        if not (is_lower and host.was_reached):
            host.most = max(suspect.messages, 1)
            host.until = self._clock.monotonic() + REMEMBER_FOR
        host.was_reached = False

    def _carried(self, session: Session, transaction: Transaction) -> None:
        taken = (each for each in transaction.outcomes if each and each.verdict is Verdict.DELIVERED)
        session.delivered += sum(1 for _ in taken)
        host = self._hosts.get(session.peer.address)
        if host is not None and host.most is not None and session.transactions >= host.most:
            host.was_reached = True

    def _note(self, address: str, phase: Phase, reply: Reply) -> None:
        known = self._host(address).about_mail.setdefault(phase, OrderedDict())
        text = comparable(reply)
        known[text] = self._clock.monotonic() + ABOUT_MAIL_FOR
        known.move_to_end(text)
        if len(known) > MAX_REFUSALS:
            known.popitem(last=False)

    def _is_about_mail(self, address: str, phase: Phase, reply: Reply) -> bool:
        host = self._hosts.get(address)
        if host is None:
            return False
        now = self._clock.monotonic()
        known = host.about_mail.get(phase)
        if known is not None and known.get(comparable(reply), 0.0) > now:
            return True
        in_vain = host.in_vain.get(phase, deque())
        return len(in_vain) >= MOST_IN_VAIN and in_vain[0] + ABOUT_MAIL_FOR > now

    def _host(self, address: str) -> _Host:
        host = self._hosts.get(address)
        if host is None:
            host = self._hosts[address] = _Host()
            if len(self._hosts) > MAX_REMEMBERED:
                self._hosts.popitem(last=False)
        self._hosts.move_to_end(address)
        return host


def comparable(reply: Reply) -> str:
    """Returns a reply without what differs between two recipients or two messages."""
    return f"{reply.code} {reply.detail} {_VARIABLE.sub('*', reply.text[:MAX_TEXT])}"
