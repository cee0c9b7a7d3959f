"""Composes delivery status notifications (RFC 3464 in an RFC 6522 report; RFC 6533 for non-ASCII addresses).

The result is a whole message with CRLF line ends. Its body is 7-bit, whatever the reports quote
(encoded where needed), except that an 8-bit message that comes back whole stays unchanged:
`message/rfc822` must not be encoded (RFC 2046 5.2.1). Its header is ASCII too, unless the recipient's address
is not; then the notification needs SMTPUTF8. Text of a peer or of the original message is made harmless
before it reaches a header field, a status field or a MIME boundary.

The international types are used when an address in the report is beyond ASCII, which only mail sent with
SMTPUTF8 can have, and for the returned part when such mail has UTF-8 in its header.

The caller decides whether a report is due, and its recipient; the null sender never gets one.

Writes the human-readable part of a DSN: what happened, why, and what happens next.
"""

import enum
import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from zonerelay.message.compose import multipart, part
from zonerelay.message.header import field, one_line, rfc5322_date, wrap
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Mailbox, Message, MessageId
from zonerelay.model.reply import Attempt, Outcome, Verdict

MAX_REPLY = 512
"""Characters of a remote reply that a report repeats, for each recipient."""

MAX_SUBJECT = 100


class DsnKind(enum.StrEnum):
    """The kind of a DSN: failed, delayed or relayed."""

    FAILED = "failed"
    DELAYED = "delayed"
    RELAYED = "relayed"
    """Handed to a server that cannot report more (RFC 3464 2.3.3), so the result stays unknown."""


class RecipientReport(msgspec.Struct, frozen=True):
    """What a DSN reports about one recipient: the outcome, and the state of the delivery before it."""

    delivery: Delivery
    outcome: Outcome


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one DSN about `message`, which is sent to the sender of the message. The caller limits
    the size of the returned part.

    With `whole_message`, the DSN contains the whole message instead of its header; the message must pass
    `header.fits_lines`.
    """

    kind: DsnKind
    message: Message
    original_header: bytes
    reports: Sequence[RecipientReport]
    hostname: str
    dsn_id: MessageId
    now: float
    retry_until: float | None = None
    whole_message: bytes = b""

    @property
    def is_international(self) -> bool:
        """Whether an address contains non-ASCII characters, which requires the media types and address type
        of RFC 6533.
        """
        addresses = [self.message.envelope.sender]
        for report in self.reports:
            addresses += [report.delivery.recipient, Mailbox(report.delivery.orcpt)]
        return not all(address.isascii() for address in addresses)

    def last_words(self, report: RecipientReport) -> Attempt:
        """Return the attempt whose reply the DSN reports: this one, or the peer's last one if the mail has
        expired. `host` is `""` for the relay's own reply, `at` is 0.0 without any attempt.
        """
        outcome, last = report.outcome, report.delivery.last
        if outcome.local and outcome.verdict is Verdict.EXPIRED and last is not None and not last.local:
            return last
        at = self.now if outcome.counts else (last.at if last is not None else 0.0)
        return Attempt(at, outcome.reply, "" if outcome.local else outcome.host)


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
    DsnKind.RELAYED: "Your message was relayed to the mail servers of the recipients below. They do not "
    "confirm deliveries, so you will be notified only if delivery fails there.",
}

_HINTS = {
    "1.1": "There is no such address. Please check it for typing mistakes.",
    "1.2": "The domain of the address (the part after the @) has no mail server. Please check it.",
    "1.10": "The domain of the address (the part after the @) does not accept mail.",
    "2.1": "The mailbox exists but does not accept mail at present.",
    "2.2": "The recipient's mailbox is full.",
    "2.3": "The message is too large for the recipient.",
    "3.4": "The message is too large for the recipient's mail server.",
    "4.6": (
        "The message was caught in a mail loop; the configuration of the recipient's mail system must be "
        "corrected."
    ),
    "6.7": "The recipient's mail server does not support addresses with these characters.",
    "7.1": "The recipient's mail server rejected this message because of its policy.",
}


def for_people(notice: Notice) -> str:
    """Return the human-readable part of the DSN, with CRLF line ends."""
    lines = [f"This is the mail system of {notice.hostname}.", "", *wrap(_OPENINGS[notice.kind])]
    if notice.kind is DsnKind.DELAYED and notice.retry_until is not None:
        lines += wrap(f"Delivery will be tried until {_date(notice.retry_until)}.")
    lines += ["", f"Sent:    {_date(notice.message.envelope.created)}"]
    subject = one_line(notice.message.header("Subject"), limit=MAX_SUBJECT)
    if subject:
        lines.append(f"Subject: {subject}")
    for report in notice.reports:
        lines += ["", *_about(notice, report)]
    returned = "your message" if notice.whole_message else "the header of your message"
    lines += ["", f"The technical details and {returned} are attached.", ""]
    return "\r\n".join(lines)


def _about(notice: Notice, report: RecipientReport) -> list[str]:
    said = notice.last_words(report)
    lines = [f"<{shown(report.delivery.recipient)}>"]
    if report.outcome.verdict is Verdict.EXPIRED:
        age = _span(notice.now - report.delivery.created)
        lines += _indented(f"No attempt succeeded within {age}. The last reply was:")
    who = f"{one_line(said.host, limit=255)} said" if said.host else "reason"
    lines += _indented(f"{who}: {one_line(str(said.reply), limit=MAX_REPLY)}")
    if report.outcome.in_doubt:
        lines += _indented(
            "The connection was lost before the recipient's mail server confirmed the message; it may have "
            "arrived."
        )
    hint = _HINTS.get(said.reply.detail)
    if hint and notice.kind is DsnKind.FAILED and said.reply.is_permanent:
        lines += _indented(hint)
    return lines


def shown(mailbox: Mailbox) -> str:
    """Return an address in a form that is safe to display."""
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


_MSG_ID = re.compile(r"<[!-;=?-~]{1,900}>")
_XTEXT = re.compile(r"\+([0-9A-F]{2})")
_EMBEDDED = re.compile(r"\\x\{([0-9A-F]{2,6})\}")
_MAX_XTEXT = 512


def compose(notice: Notice) -> bytes:
    """Compose the DSN as a whole message."""
    if not notice.message.envelope.sender:
        raise ValueError("a notification is never sent to the null sender")
    people = for_people(notice)
    charset = "us-ascii" if people.isascii() else "utf-8"
    beyond_ascii = notice.is_international
    status_type = "message/global-delivery-status" if beyond_ascii else "message/delivery-status"
    parts = (
        part(f"text/plain; charset={charset}", _octets(people), description="Notification"),
        part(status_type, _octets(_status_fields(notice)), description="Delivery report"),
        _returned(notice),
    )
    encoding = "" if all(part.isascii() for part in parts) else "Content-Transfer-Encoding: 8bit\r\n"
    digest = hashlib.blake2b(b"".join(parts), digest_size=15).hexdigest()
    body = multipart("report; report-type=delivery-status", digest, [[part] for part in parts])
    return b"".join((_header(notice), encoding.encode(), *body))


def _returned(notice: Notice) -> bytes:
    header, message = notice.original_header, notice.whole_message
    international = notice.is_international or (notice.message.envelope.smtputf8 and not header.isascii())
    if not message:
        header_type = "message/global-headers" if international else "text/rfc822-headers"
        return part(header_type, header, description="Header of the message")
    if international:
        return part("message/global", message, description="The message")
    encoding = "7bit" if message.isascii() else "8bit"
    return part("message/rfc822", message, description="The message", transfer_encoding=encoding)


def _header(notice: Notice) -> bytes:
    fields = [
        field("From", f"Mail Delivery System <MAILER-DAEMON@{notice.hostname}>"),
        field("To", f"<{shown(notice.message.envelope.sender)}>"),
        field("Subject", SUBJECTS[notice.kind]),
        field("Date", rfc5322_date(notice.now)),
        field("Message-ID", f"<{notice.dsn_id}.{notice.kind}@{notice.hostname}>"),
    ]
    original = notice.message.header("Message-ID").strip()
    if _MSG_ID.fullmatch(original):
        fields += [field("In-Reply-To", original), field("References", original)]
    fields += [field("Auto-Submitted", "auto-replied"), field("MIME-Version", "1.0")]
    return _octets("".join(fields))


def _octets(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _status_fields(notice: Notice) -> str:
    envelope = notice.message.envelope
    fields = [field("Reporting-MTA", f"dns; {notice.hostname}"), field("X-Zonerelay-Queue-Id", envelope.id)]
    if envelope.envid:
        fields.append(field("Original-Envelope-Id", _decoded(envelope.envid)))
    fields.append(field("Arrival-Date", rfc5322_date(envelope.created)))
    for report in notice.reports:
        fields += ["\r\n", *_recipient_fields(notice, report)]
    return "".join(fields)


def _recipient_fields(notice: Notice, report: RecipientReport) -> list[str]:
    said = notice.last_words(report)
    recipient = shown(report.delivery.recipient)
    fields: list[str] = []
    if report.delivery.orcpt:
        fields.append(field("Original-Recipient", _original_recipient(notice, report.delivery.orcpt)))
    fields += [
        field("Final-Recipient", f"{'rfc822' if recipient.isascii() else 'utf-8'}; {recipient}"),
        field("Action", notice.kind),
        field("Status", said.reply.status),
    ]
    # Our own words are no SMTP reply: the text for people has them.
    if said.host:
        host = one_line(said.host, limit=255, ascii_only=True)
        if ":" in host or host.replace(".", "").isdigit():
            host = f"[{host}]"
        text = one_line(str(said.reply), limit=MAX_REPLY, ascii_only=not notice.is_international)
        fields += [field("Remote-MTA", f"dns; {host}"), field("Diagnostic-Code", f"smtp; {text}")]
    if said.at:
        fields.append(field("Last-Attempt-Date", rfc5322_date(said.at)))
    if notice.kind is DsnKind.DELAYED and notice.retry_until is not None:
        fields.append(field("Will-Retry-Until", rfc5322_date(notice.retry_until)))
    return fields


def _original_recipient(notice: Notice, orcpt: str) -> str:
    """Decode the address in an ORCPT value (RFC 3461 6.3 d). The type utf-8 appears only where it is allowed
    (RFC 6533 3).
    """
    kind, _, address = orcpt.partition(";")
    if kind.lower() != "utf-8":
        plain = _decoded(address)
    elif notice.is_international:
        plain = _EMBEDDED.sub(_embedded_character, address)
    else:
        plain = address
    return f"{one_line(kind, limit=40, ascii_only=True)}; {one_line(plain, limit=_MAX_XTEXT)}"


def _embedded_character(match: re.Match[str]) -> str:
    number = int(match[1], 16)
    # Surrogates and numbers beyond Unicode are no characters: such text stays unchanged.
    return chr(number) if number < 0xD800 or 0xDFFF < number <= 0x10FFFF else match[0]


def _decoded(xtext: str) -> str:
    """Decode xtext (RFC 3461 4): `+XX` is one byte. The result stays printable ASCII, because it is shown."""
    text = _XTEXT.sub(lambda match: chr(int(match[1], 16)), xtext)
    return one_line(text, limit=_MAX_XTEXT, ascii_only=True)
