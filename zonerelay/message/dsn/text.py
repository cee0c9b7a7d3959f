"""Writes the part of a delivery report for people: what happened, why, and what follows."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from zonerelay.message.header.headers import one_line, wrap
from zonerelay.model.address import Mailbox
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.outcome import Outcome, Verdict
from zonerelay.model.reply import Reply

MAX_REPLY = 512
"""Characters of a remote reply that a report repeats, for each recipient."""

MAX_SUBJECT = 100


class DsnKind(enum.StrEnum):
    FAILED = "failed"
    DELAYED = "delayed"
    RELAYED = "relayed"
    """Handed to a server that cannot report more (RFC 3464 2.3.3), so the result stays unknown."""


@dataclass(frozen=True, slots=True)
class RecipientReport:
    """One recipient's part of the report: the delivery before this outcome, and the outcome."""

    delivery: Delivery
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The content of one notification."""

    kind: DsnKind
    message: Message
    reports: Sequence[RecipientReport]
    hostname: str
    now: float
    retry_until: float | None
    whole: bool = False
    """True when the message comes back with the report, not only its header."""

    @property
    def is_international(self) -> bool:
        """True when an address is beyond ASCII, which needs RFC 6533's media types and address type."""
        addresses = [self.message.envelope.sender]
        for report in self.reports:
            addresses += [report.delivery.recipient, Mailbox(report.delivery.orcpt)]
        return not all(address.isascii() for address in addresses)

    def last_words(self, report: RecipientReport) -> Said:
        """Returns this outcome's reply, or, when the relay gave up, the peer's reply to the attempt
        before.
        """
        outcome, last = report.outcome, report.delivery.last
        if outcome.local and outcome.verdict is Verdict.EXPIRED and last is not None and not last.local:
            return Said(last.reply, last.host, last.at)
        at = self.now if outcome.counts else (last.at if last is not None else None)
        return Said(outcome.reply, "" if outcome.local else outcome.host, at)


@dataclass(frozen=True, slots=True)
class Said:
    """The last reply about a recipient and the host that sent it; `host` is `""` for the relay."""

    reply: Reply
    host: str
    at: float | None


SUBJECTS = {
    DsnKind.FAILED: "Your message could not be delivered",
    DsnKind.DELAYED: "Your message is delayed, delivery is still being tried",
    DsnKind.RELAYED: "Your message was relayed",
}

_OPENINGS = {
    DsnKind.FAILED: "Your message could not be delivered to the recipients below. "
    "No further attempt will be made for them.",
    DsnKind.DELAYED: "Your message has not reached the recipients below yet. This is only a warning: "
    "you do not need to send it again.",
    DsnKind.RELAYED: "Your message was handed to the mail servers of the recipients below. "
    "They do not confirm deliveries, so you will hear nothing more unless it fails there.",
}

_HINTS = {
    "1.1": "There is no such address. Please check it for typing mistakes.",
    "1.2": "The part of the address after the @ leads to no mail server. Please check it.",
    "1.10": "The part of the address after the @ belongs to a domain that takes no mail at all.",
    "2.1": "The mailbox exists but takes no mail at present.",
    "2.2": "The recipient's mailbox is full.",
    "2.3": "The message is too large for the recipient.",
    "3.4": "The message is too large for the recipient's mail server.",
    "4.6": "The mail went round in a circle; the recipient's mail set-up needs a correction.",
    "6.7": "The recipient's mail server cannot take an address with these characters.",
    "7.1": "The recipient's mail server refuses this message by its rules.",
}


def for_people(notice: Notice) -> str:
    """Returns plain text with CRLF line ends."""
    lines = [f"This is the mail system of {notice.hostname}.", "", *wrap(_OPENINGS[notice.kind])]
    if notice.kind is DsnKind.DELAYED and notice.retry_until is not None:
        lines += wrap(f"Delivery will be tried until {_date(notice.retry_until)}.")
    lines += ["", f"Sent:    {_date(notice.message.envelope.created)}"]
    subject = one_line(notice.message.header("Subject"), limit=MAX_SUBJECT)
    if subject:
        lines.append(f"Subject: {subject}")
    for report in notice.reports:
        lines += ["", *_about(notice, report)]
    returned = "your message" if notice.whole else "the header of your message"
    lines += ["", f"The technical details and {returned} are attached.", ""]
    return "\r\n".join(lines)


def _about(notice: Notice, report: RecipientReport) -> list[str]:
    said = notice.last_words(report)
    lines = [f"<{shown(report.delivery.recipient)}>"]
    if report.outcome.verdict is Verdict.EXPIRED:
        age = _span(notice.now - report.delivery.created)
        lines += _indented(f"No attempt succeeded within {age}. The last one ended with:")
    who = f"{one_line(said.host, limit=255)} said" if said.host else "reason"
    lines += _indented(f"{who}: {one_line(str(said.reply), limit=MAX_REPLY)}")
    if report.outcome.in_doubt:
        lines += _indented(
            "The connection was lost before the recipient's mail server confirmed: "
            "the message may have arrived all the same."
        )
    hint = _HINTS.get(said.reply.detail)
    if hint and notice.kind is DsnKind.FAILED and said.reply.is_permanent:
        lines += _indented(hint)
    return lines


def shown(mailbox: Mailbox) -> str:
    """Returns the address in a form that is safe on another person's screen, although our parser has checked
    it.
    """
    return one_line(mailbox, limit=512)


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in wrap(text, 72)]


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%A, %d %B %Y, %H:%M UTC")


def _span(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return "a minute"
