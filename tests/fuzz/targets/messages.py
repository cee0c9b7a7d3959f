"""Headers of messages that strangers wrote, and reports about them.

Invariants: `HeaderTooLargeError` is all that is raised; any cut gives the same header; what is kept for
people is bounded and has no control character; a report has exactly our header fields, three parts, CRLF
line ends, ASCII only where it says so, and no line that SMTP could not carry, whatever is quoted in it.
"""

import quopri
import re
from collections.abc import Callable

from tests.fuzz.targets.bodies import no_bare_line_ends, normalized
from tests.support.feeding import cuttings
from zonerelay.message import header as message_header
from zonerelay.message.dkim.signature import author_domain
from zonerelay.message.dsn import DsnKind, Notice, RecipientReport, compose
from zonerelay.message.header import EMPTY_LINE, MAILBOX_LINE, Header, change_field, edit_header, parse_header
from zonerelay.model.address_list import read_addresses
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import NULL_SENDER, Envelope, Mailbox, Message, MessageId
from zonerelay.model.reply import Outcome, Verdict
from zonerelay.smtp.client.replies import make_reply, printable
from zonerelay.smtp.server.params import parse_envid, parse_orcpt
from zonerelay.smtp.server.paths import CommandError, forward_path, reverse_path

CRLF = b"\r\n"
MAX_HEADER = 2000  # more than the longest beginning of a first line that may be a field
LONGEST_LINE = 998  # RFC 5322 2.1.1
ID = MessageId("018bcfe568000000")
NOW = 1_700_000_000.0
OUR_FIELDS = ["From", "To", "Subject", "Date", "Message-ID", "Auto-Submitted", "MIME-Version", "Content-Type"]
STATUS_FIELDS = {
    "Reporting-MTA", "X-Zonerelay-Queue-Id", "Original-Envelope-Id", "Arrival-Date", "Original-Recipient",
    "Final-Recipient", "Action", "Status", "Remote-MTA", "Diagnostic-Code", "Last-Attempt-Date",
    "Will-Retry-Until",
}  # fmt: skip
_TYPE = b"\r\nContent-Type: "
PARTS = (
    (_TYPE + b"text/plain",),
    (_TYPE + b"message/delivery-status", _TYPE + b"message/global-delivery-status"),
    (_TYPE + b"text/rfc822-headers", _TYPE + b"message/global-headers"),
)

_FIELD = re.compile(r"[A-Za-z-]+:")


def addresses(data: bytes) -> None:
    """An address is text that SMTP could carry; what is none is named; a field changes only where told."""
    for errors in ("replace", "surrogateescape"):
        text = data.decode("utf-8", errors)
        for entry in read_addresses(text).entries:
            assert entry.text
            assert entry.text in text
            assert entry.address.isprintable()
            assert 0 < entry.end <= len(text)
            assert "\ufffd" not in entry.address
    field = b"From: " + data.replace(b"\r", b"").replace(b"\n", b"\r\n ") + CRLF
    assert change_field(field, lambda address: address) is field
    assert not set(author_domain(field)) & set(' \t\r\n@<>,;:"()\\')


def headers(data: bytes) -> None:
    text = normalized(data)
    found = [_scan(pieces) for pieces in cuttings(text)]
    assert all(each == found[0] for each in found[1:])
    header = found[0]
    if header is None:
        assert len(text) > MAX_HEADER
        return
    assert header.lead in (b"", EMPTY_LINE, MAILBOX_LINE)
    assert header.names >= {name.lower() for name, _ in header.fields}
    assert header.received >= sum(name.lower() == "received" for name, _ in header.fields)
    assert sum(len(name) + len(value) for name, value in header.fields) <= message_header.MAX_METADATA
    for name, value in header.fields:
        assert name.isascii()
        assert not any(ord(c) < 0x20 or ord(c) == 0x7F for c in name + value)
    _stays_the_same_behind_our_fields(header, text)


def _scan(pieces: list[bytes]) -> Header | None:
    scanner = message_header.HeaderScanner(MAX_HEADER)
    held = b""
    try:
        for piece in pieces:
            # What comes from a BodyReader never ends between CR and LF.
            held += piece
            if scanner.header is None and not held.endswith(b"\r"):
                scanner.feed(held)
                held = b""
        return scanner.finish()
    except message_header.HeaderTooLargeError:
        return None


def _stays_the_same_behind_our_fields(header: Header, text: bytes) -> None:
    """With a field of ours and the lead in front, nothing joins our field and none of theirs is lost."""
    ours = b"Received: by relay.test\r\n"
    block, end, _ = (ours + header.lead + text).partition(b"\r\n\r\n")
    again = parse_header(block + b"\r\n" if end else block)
    assert again.fields[:1] == (("Received", "by relay.test"),) or not end
    if end and header.lead != MAILBOX_LINE and len(block) <= MAX_HEADER:
        assert again.fields[1:] == header.fields


def edits(data: bytes) -> None:
    """Names to remove, one a line, an empty line, and a header."""
    names, _, text = normalized(data).partition(b"\r\n\r\n")
    text += b"" if text.endswith(CRLF) else CRLF  # a body that was read ends so
    removed = {name for name in names.decode("latin-1").split("\r\n") if name.isascii()}
    header = _scan([text]) or Header()
    block = header.lead + (text.partition(b"\r\n\r\n")[0] + CRLF if header.fields else b"")
    assert edit_header(block) == block
    added = [("X-Added", text[:300].decode("ascii", "replace").replace("\ufffd", "?"))]
    edited = edit_header(block, add=added, remove=removed)
    no_bare_line_ends(edited)
    lower = {name.lower() for name in removed}
    theirs = tuple((name, value) for name, value in header.fields if name.lower() not in lower)
    again = parse_header(edited)
    assert again.fields[0][0] == "X-Added"
    if header.lead != MAILBOX_LINE and header.fields:
        assert again.fields[1:] == theirs


def dsn(data: bytes) -> None:
    """The input's lines: sender, recipient, ORCPT, ENVID, reply, host, subject; then the original header."""
    parts = (data.split(b"\n", 7) + [b""] * 8)[:8]
    sender, recipient, orcpt, envid, said, host, subject = [printable(part) for part in parts[:7]]
    origin = _mailbox(reverse_path, sender) or Mailbox("sender@example.org")
    delivery = Delivery(
        queue=queue_of("default"),
        message_id=ID,
        recipient=_mailbox(forward_path, recipient) or Mailbox("b@example.com"),
        created=NOW,
        orcpt=_value(parse_orcpt, orcpt),
    )
    envelope = Envelope(id=ID, sender=origin, recipients=(), created=NOW, envid=_value(parse_envid, envid))
    message = Message(
        envelope=envelope, size=1, chunks=1, headers=(("Subject", subject), ("Message-ID", subject))
    )
    reply = make_reply(550 - 99 * (len(said) % 2), said.split("\\"))
    outcome = Outcome(Verdict.BOUNCED, reply, host=host, peer="192.0.2.1:25")
    for kind in DsnKind:
        notice = Notice(
            kind=kind,
            message=message,
            original_header=parts[7],
            reports=[RecipientReport(delivery, outcome)],
            hostname="relay.example.org",
            dsn_id=ID,
            now=NOW,
            retry_until=NOW,
        )
        check_report(compose(notice), ascii_header=origin.isascii())


def _mailbox(parse: Callable[[str], tuple[Mailbox, str]], text: str) -> Mailbox:
    """Only what our own parser lets in gets as far as a report."""
    try:
        return parse(f"<{text}>")[0]
    except CommandError:
        return NULL_SENDER


def _value(parse: Callable[[str], str], text: str) -> str:
    try:
        return parse(text)
    except ValueError:
        return ""


def check_report(report: bytes, *, ascii_header: bool) -> None:
    no_bare_line_ends(report)
    assert max(map(len, report.split(b"\r\n"))) <= LONGEST_LINE
    assert b"\0" not in report
    head, _, rest = report.partition(b"\r\n\r\n")
    assert head.isascii() or not ascii_header
    assert rest.isascii()
    names = _names(head.decode())
    assert [name for name in names if name not in ("In-Reply-To", "References")] == OUR_FIELDS
    boundary = head.rpartition(b'boundary="')[2].removesuffix(b'"')
    nothing, *parts, last = rest.split(b"--" + boundary)
    assert (nothing, len(parts), last) == (b"", 3, b"--\r\n")
    kinds = [part.partition(b";")[0].partition(b"\r\nContent-Description")[0] for part in parts]
    assert all(kind in allowed for kind, allowed in zip(kinds, PARTS, strict=True)), kinds
    for group in _content(parts[1]).decode().strip().split("\r\n\r\n"):
        assert set(_names(group)) <= STATUS_FIELDS, group


def _content(part: bytes) -> bytes:
    head, _, content = part.partition(b"\r\n\r\n")
    return quopri.decodestring(content) if b"quoted-printable" in head else content


def _names(header: str) -> list[str]:
    """Read strictly: every line is a field or continues one."""
    lines = [line for line in header.split("\r\n") if not line.startswith(" ")]
    assert all(_FIELD.match(line) for line in lines), lines
    return [line.partition(":")[0] for line in lines]
