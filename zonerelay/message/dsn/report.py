"""Composes delivery status notifications: RFC 3464 in an RFC 6522 report, RFC 6533 beyond ASCII.

The result is a whole message with CRLF line ends. Its body is 7-bit, whatever the reports quote
(quoted-printable where needed), except that an 8-bit message that comes back whole stays unchanged:
`message/rfc822` must not be encoded (RFC 2046 5.2.1). Its header is ASCII too, unless the recipient's address
is not; then the notification needs SMTPUTF8. Text of a peer or of the original message is made harmless
before it reaches a header field, a status field or a MIME boundary.

The international types are used when an address in the report is beyond ASCII, which only mail sent with
SMTPUTF8 can have, and for the returned part when such mail has UTF-8 in its header.

The caller decides whether a report is due, and its recipient; the null sender never gets one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from zonerelay.message.dsn.text import (
    MAX_REPLY,
    SUBJECTS,
    DsnKind,
    Notice,
    RecipientReport,
    for_people,
    shown,
)
from zonerelay.message.header.headers import crlf, field, one_line, rfc5322_date, seven_bit
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId

__all__ = ["DsnKind", "RecipientReport", "can_return_whole", "compose"]

_MSG_ID = re.compile(r"<[!-;=?-~]{1,900}>")
_XTEXT = re.compile(r"\+([0-9A-F]{2})")
_EMBEDDED = re.compile(r"\\x\{([0-9A-F]{2,6})\}")
_MAX_XTEXT = 512
_MAX_LINE = 998  # RFC 5322 2.1.1


def compose(
    kind: DsnKind,
    *,
    message: Message,
    original_header: bytes,
    reports: Sequence[RecipientReport],
    hostname: str,
    dsn_id: MessageId,
    now: float,
    retry_until: float | None = None,
    whole_message: bytes = b"",
) -> bytes:
    """Returns the notification about `message` to its sender. The caller limits the size of the returned
    part.

    With `whole_message` the message comes back instead of its header; it must pass `can_return_whole`.
    """
    if not message.envelope.sender:
        raise ValueError("a notification is never sent to the null sender")
    notice = Notice(
        kind=kind,
        message=message,
        reports=reports,
        hostname=hostname,
        now=now,
        retry_until=retry_until,
        whole=bool(whole_message),
    )
    people = for_people(notice)
    charset = "us-ascii" if people.isascii() else "utf-8"
    beyond_ascii = notice.is_international
    status_type = "message/global-delivery-status" if beyond_ascii else "message/delivery-status"
    parts = (
        _part(f"text/plain; charset={charset}", "Notification", people.encode("utf-8", "replace")),
        _part(status_type, "Delivery report", _status_fields(notice).encode("utf-8", "replace")),
        _returned(notice, original_header, whole_message),
    )
    boundary = _boundary(dsn_id, parts)
    encoding = "" if all(part.isascii() for part in parts) else "Content-Transfer-Encoding: 8bit\r\n"
    return _header(notice, dsn_id, boundary, encoding) + _multipart(parts, boundary)


def can_return_whole(message: bytes) -> bool:
    """True when the message can stand in a report unchanged: SMTP carries neither NUL nor endless lines."""
    return b"\0" not in message and all(len(line) <= _MAX_LINE for line in message.split(b"\r\n"))


def _returned(notice: Notice, header: bytes, message: bytes) -> bytes:
    international = notice.is_international or (notice.message.envelope.smtputf8 and not header.isascii())
    if not message:
        header_type = "message/global-headers" if international else "text/rfc822-headers"
        return _part(header_type, "Header of the message", crlf(header))
    if international:
        return _part("message/global", "The message", crlf(message))
    encoding = "7bit" if message.isascii() else "8bit"
    return _encoded_part("message/rfc822", "The message", encoding, crlf(message))


def _header(notice: Notice, dsn_id: MessageId, boundary: bytes, encoding: str) -> bytes:
    fields = [
        field("From", f"Mail Delivery System <MAILER-DAEMON@{notice.hostname}>"),
        field("To", f"<{shown(notice.message.envelope.sender)}>"),
        field("Subject", SUBJECTS[notice.kind]),
        field("Date", rfc5322_date(notice.now)),
        field("Message-ID", f"<{dsn_id}.{notice.kind}@{notice.hostname}>"),
    ]
    original = notice.message.header("Message-ID").strip()
    if _MSG_ID.fullmatch(original):
        fields += [field("In-Reply-To", original), field("References", original)]
    fields += [
        field("Auto-Submitted", "auto-replied"),
        field("MIME-Version", "1.0"),
        "Content-Type: multipart/report; report-type=delivery-status;\r\n"
        f' boundary="{boundary.decode("ascii")}"\r\n',
        encoding,
    ]
    return "".join(fields).encode("utf-8", "replace") + b"\r\n"


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
        text = one_line(str(said.reply), limit=MAX_REPLY, ascii_only=not notice.is_international)
        fields += [field("Remote-MTA", f"dns; {_bracketed(host)}"), field("Diagnostic-Code", f"smtp; {text}")]
    if said.at is not None:
        fields.append(field("Last-Attempt-Date", rfc5322_date(said.at)))
    if notice.kind is DsnKind.DELAYED and notice.retry_until is not None:
        fields.append(field("Will-Retry-Until", rfc5322_date(notice.retry_until)))
    return fields


def _part(content_type: str, description: str, content: bytes) -> bytes:
    encoding, body = seven_bit(content)
    return _encoded_part(content_type, description, encoding, body)


def _encoded_part(content_type: str, description: str, encoding: str, body: bytes) -> bytes:
    head = (
        f"Content-Type: {content_type}\r\n"
        f"Content-Description: {description}\r\n"
        f"Content-Transfer-Encoding: {encoding}\r\n\r\n"
    )
    return head.encode("ascii") + body


def _multipart(parts: Sequence[bytes], boundary: bytes) -> bytes:
    opened = b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts)
    return opened + b"--" + boundary + b"--\r\n"


def _boundary(dsn_id: MessageId, parts: Sequence[bytes]) -> bytes:
    """Returns a boundary that no part contains. Ids can be guessed, so the parts are searched for it."""
    number = 0
    while True:
        # "=_" cannot occur in quoted-printable (RFC 2045 6.7).
        boundary = f"=_{dsn_id}_{number}".encode("ascii")
        if not any(boundary in part for part in parts):
            return boundary
        number += 1


def _original_recipient(notice: Notice, orcpt: str) -> str:
    """Decodes the address (RFC 3461 6.3 d). The type utf-8 appears only where it is allowed (RFC 6533 3)."""
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
    """Decodes `+XX` to one octet (RFC 3461 4). The result stays printable ASCII, because it is shown."""
    text = _XTEXT.sub(lambda match: chr(int(match[1], 16)), xtext)
    return one_line(text, limit=_MAX_XTEXT, ascii_only=True)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host or host.replace(".", "").isdigit() else host
