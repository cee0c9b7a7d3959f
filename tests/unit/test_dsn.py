"""Delivery reports, read back with the standard library's email package."""

import email
import email.policy
import re
from collections.abc import Sequence
from email.message import EmailMessage
from email.message import Message as ParsedMessage
from email.utils import parsedate_to_datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.fuzz.targets.messages import check_report
from zonerelay.message.dsn import MAX_REPLY, DsnKind, Notice, RecipientReport, compose
from zonerelay.message.header import fits_lines
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import Envelope, Mailbox, Message, MessageId
from zonerelay.model.reply import Attempt, Outcome, Reply, Verdict

CREATED = 1_700_000_000.0
NOW = CREATED + 5 * 86400
ID = MessageId("018bcfe568000000")
DSN_ID = MessageId("018be9a4b8000100")
HEADER = b"From: Alice <alice@sender.example>\r\nSubject: Hello\r\nMessage-ID: <1@sender.example>\r\n"
UNKNOWN_USER = Outcome(
    Verdict.BOUNCED, Reply(550, "1.1", "no such user"), host="mx.example.com", peer="192.0.2.1:25"
)


def message(
    sender: str = "alice@sender.example",
    *,
    envid: str = "",
    headers: tuple[tuple[str, str], ...] = (("Subject", "Hello"), ("Message-ID", "<1@sender.example>")),
) -> Message:
    envelope = Envelope(id=ID, sender=Mailbox(sender), recipients=(), created=CREATED, envid=envid)
    return Message(envelope=envelope, size=4096, chunks=1, headers=headers)


def report(
    outcome: Outcome, recipient: str = "bob@example.com", *, orcpt: str = "", last: Attempt | None = None
) -> RecipientReport:
    delivery = Delivery(
        queue=queue_of("default"),
        message_id=ID,
        recipient=Mailbox(recipient),
        created=CREATED,
        orcpt=orcpt,
        last=last,
    )
    return RecipientReport(delivery, outcome)


def composed(
    *reports: RecipientReport,
    kind: DsnKind = DsnKind.FAILED,
    about: Message | None = None,
    header: bytes = HEADER,
    retry_until: float | None = None,
    whole: bytes = b"",
) -> bytes:
    notice = Notice(
        kind=kind,
        message=about or message(),
        original_header=header,
        reports=reports,
        hostname="relay.example.org",
        dsn_id=DSN_ID,
        now=NOW,
        retry_until=retry_until,
        whole_message=whole,
    )
    return compose(notice)


class Report:
    """A composed notification, taken apart."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.head: EmailMessage = email.message_from_bytes(raw, policy=email.policy.default)
        assert self.head.get_content_type() == "multipart/report"
        assert self.head.get_param("report-type") == "delivery-status"
        assert not self.head.defects
        self.parts: Sequence[ParsedMessage] = list(self.head.iter_parts())
        assert len(self.parts) == 3

    @property
    def people(self) -> str:
        part = self.parts[0]
        assert isinstance(part, EmailMessage)
        content: str = part.get_content()
        return content

    @property
    def status(self) -> list[ParsedMessage]:
        """The per-message group, then one group for each recipient."""
        assert self.parts[1].get_content_type() == "message/delivery-status"
        groups = self.parts[1].get_payload()
        assert isinstance(groups, list)
        return [group for group in groups if isinstance(group, ParsedMessage)]

    @property
    def recipient(self) -> dict[str, str]:
        (_, group) = self.status
        return {name: str(value) for name, value in group.items()}


def test_the_header_says_that_a_machine_answers() -> None:
    head = Report(composed(report(UNKNOWN_USER))).head
    assert head["From"] == "Mail Delivery System <MAILER-DAEMON@relay.example.org>"
    assert head["To"] == "alice@sender.example"
    assert head["Auto-Submitted"] == "auto-replied"
    assert head["MIME-Version"] == "1.0"
    assert head["Message-ID"] == f"<{DSN_ID}.failed@relay.example.org>"
    assert head["In-Reply-To"] == head["References"] == "<1@sender.example>"
    assert parsedate_to_datetime(head["Date"]).timestamp() == NOW
    assert "could not be delivered" in head["Subject"]


def test_a_refused_recipient_is_reported_field_by_field() -> None:
    found = Report(
        composed(
            report(UNKNOWN_USER, orcpt="rfc822;Bob+2Bnews@example.com"), about=message(envid="QQ+2B314+3D159")
        )
    )
    per_message = found.status[0]
    assert per_message["Reporting-MTA"] == "dns; relay.example.org"
    assert per_message["Original-Envelope-Id"] == "QQ+314=159"
    assert parsedate_to_datetime(per_message["Arrival-Date"]).timestamp() == CREATED
    assert per_message["X-Zonerelay-Queue-Id"] == ID
    fields = found.recipient
    assert parsedate_to_datetime(fields.pop("Last-Attempt-Date")).timestamp() == NOW
    assert fields == {
        "Original-Recipient": "rfc822; Bob+news@example.com",
        "Final-Recipient": "rfc822; bob@example.com",
        "Action": "failed",
        "Status": "5.1.1",
        "Remote-MTA": "dns; mx.example.com",
        "Diagnostic-Code": "smtp; 550 5.1.1 no such user",
    }


def test_people_are_told_who_what_and_why() -> None:
    people = Report(composed(report(UNKNOWN_USER))).people
    assert "relay.example.org" in people
    assert "<bob@example.com>" in people
    assert "mx.example.com said: 550 5.1.1 no such user" in people
    assert "check it for typing mistakes" in people
    assert "Subject: Hello" in people


def test_what_we_say_ourselves_is_nobodys_smtp_reply() -> None:
    outcome = Outcome(Verdict.BOUNCED, Reply(550, "1.2", "the domain does not exist"), local=True)
    found = Report(composed(report(outcome)))
    assert found.recipient["Status"] == "5.1.2"
    assert not {"Remote-MTA", "Diagnostic-Code"} & found.recipient.keys()
    assert "the domain does not exist" in found.people


def test_an_expired_delivery_tells_what_the_peer_said_last() -> None:
    last = Attempt(at=NOW - 600, reply=Reply(452, "2.2", "mailbox full"), host="mx.example.com")
    gave_up = Outcome(Verdict.EXPIRED, Reply(451, "4.7", "too old"), local=True, counts=False)
    found = Report(composed(report(gave_up, last=last)))
    fields = found.recipient
    assert (fields["Action"], fields["Status"]) == ("failed", "4.2.2")
    assert fields["Diagnostic-Code"] == "smtp; 452 4.2.2 mailbox full"
    assert parsedate_to_datetime(fields["Last-Attempt-Date"]).timestamp() == NOW - 600
    assert "within 5 days" in found.people


def test_an_attempt_that_was_never_made_has_no_date() -> None:
    outcome = Outcome(Verdict.EXPIRED, Reply(451, "4.1", "suspended"), local=True, counts=False)
    assert "Last-Attempt-Date" not in Report(composed(report(outcome))).recipient


def test_a_delay_warning_says_until_when_and_that_nothing_is_to_be_done() -> None:
    outcome = Outcome(Verdict.DEFERRED, Reply(451, "7.1", "greylisted"), host="mx.example.com")
    found = Report(composed(report(outcome), kind=DsnKind.DELAYED, retry_until=NOW + 3600))
    assert found.recipient["Action"] == "delayed"
    assert found.recipient["Status"] == "4.7.1"
    assert parsedate_to_datetime(found.recipient["Will-Retry-Until"]).timestamp() == NOW + 3600
    assert "do not need to send it again" in " ".join(found.people.split())
    assert "rejected this message" not in found.people


def test_a_relayed_message_is_told_in_words() -> None:
    outcome = Outcome(Verdict.DELIVERED, Reply(250, "0.0", "queued as 7"), host="mx.example.com")
    found = Report(composed(report(outcome), kind=DsnKind.RELAYED))
    assert found.head["Subject"] == "Your message was relayed"
    assert "do not confirm deliveries" in " ".join(found.people.split())
    assert (found.recipient["Action"], found.recipient["Status"]) == ("relayed", "2.0.0")
    assert found.recipient["Remote-MTA"] == "dns; mx.example.com"
    assert found.recipient["Diagnostic-Code"] == "smtp; 250 2.0.0 queued as 7"


WHOLE = HEADER + b"\r\nThe body.\r\n"


def test_a_whole_message_comes_back_as_a_message() -> None:
    found = Report(composed(report(UNKNOWN_USER), whole=WHOLE))
    part = found.parts[2]
    assert part.get_content_type() == "message/rfc822"
    assert part["Content-Transfer-Encoding"] == "7bit"
    payload = part.get_payload()
    assert isinstance(payload, list)
    (inner,) = payload
    assert isinstance(inner, ParsedMessage)
    assert inner["Subject"] == "Hello"
    assert inner.get_payload() == "The body.\r\n"
    assert "technical details and your message are attached" in found.people


def test_a_whole_8bit_message_makes_the_report_8bit_and_says_so() -> None:
    whole = HEADER + b"\r\n\xff\xfe gr\xfc\xdfe\r\n"
    raw = composed(report(UNKNOWN_USER), whole=whole)
    assert whole in raw
    found = Report(raw)
    assert found.head["Content-Transfer-Encoding"] == "8bit"
    assert found.parts[2]["Content-Transfer-Encoding"] == "8bit"
    assert Report(composed(report(UNKNOWN_USER))).head["Content-Transfer-Encoding"] is None


def test_a_whole_message_cannot_guess_the_boundary() -> None:
    whole = WHOLE + b"--" + boundary_of(composed(report(UNKNOWN_USER), whole=WHOLE)) + b"--\r\n"
    raw = composed(report(UNKNOWN_USER), whole=whole)
    assert whole in raw
    assert boundary_of(raw) not in whole


@pytest.mark.parametrize("bad", [b"x\0y\r\n", b"x" * 999 + b"\r\n"])
def test_what_smtp_cannot_carry_is_not_returned_whole(bad: bytes) -> None:
    assert fits_lines(WHOLE + b"x" * 998 + b"\r\n")
    assert not fits_lines(WHOLE + bad)


def test_utf8_in_the_header_of_smtputf8_mail_has_its_own_types() -> None:
    header = "Subject: Grüße\r\n".encode()
    about = message()
    international = structs.replace(about, envelope=structs.replace(about.envelope, smtputf8=True))
    raw = composed(report(UNKNOWN_USER), about=international, header=header)
    assert b"Content-Type: message/global-headers\r\n" in raw
    assert b"Content-Type: message/delivery-status\r\n" in raw
    raw = composed(report(UNKNOWN_USER), about=international, header=header, whole=header + b"\r\nx\r\n")
    assert b"Content-Type: message/global\r\n" in raw
    assert raw.isascii()
    plain = composed(report(UNKNOWN_USER), about=about, header=header)
    assert b"Content-Type: text/rfc822-headers\r\n" in plain


def test_a_utf8_original_recipient_stays_encoded_where_the_report_is_ascii() -> None:
    found = Report(composed(report(UNKNOWN_USER, orcpt=r"utf-8;j\x{FC}rgen@example.com")))
    assert found.recipient["Original-Recipient"] == r"utf-8; j\x{FC}rgen@example.com"


@pytest.mark.parametrize(
    ("orcpt", "shown"),
    [
        (r"utf-8;j\x{FC}@x.example", "utf-8; jü@x.example"),
        (r"utf-8;a\x{2B}b\x{1F600}", "utf-8; a+b😀"),
        (r"utf-8;\x{D800}\x{FFFFFF}", r"utf-8; \x{D800}\x{FFFFFF}"),
        (r"utf-8;\x{0D}\x{0A}Status: 2.0.0", "utf-8; Status: 2.0.0"),
        ("rfc822;a+2Bb", "rfc822; a+b"),
    ],
)
def test_in_an_international_report_the_original_recipient_is_readable(orcpt: str, shown: str) -> None:
    raw = composed(report(UNKNOWN_USER, "jürgen@x.example", orcpt=orcpt))
    assert f"Original-Recipient: {shown}\r\n" in decoded_part(raw, 2)


def test_a_doubtful_end_says_that_the_message_may_have_arrived() -> None:
    outcome = Outcome(Verdict.BOUNCED, Reply(451, "4.2", "connection lost"), local=True, in_doubt=True)
    assert "it may have arrived" in " ".join(Report(composed(report(outcome))).people.split())


def test_a_reply_without_enhanced_code_gets_the_class_of_its_code() -> None:
    outcome = Outcome(Verdict.BOUNCED, Reply(554, "", "go away\nfor ever"), host="192.0.2.1")
    fields = Report(composed(report(outcome))).recipient
    assert fields["Status"] == "5.0.0"
    assert fields["Diagnostic-Code"] == "smtp; 554 go away for ever"
    assert fields["Remote-MTA"] == "dns; [192.0.2.1]"


def test_addresses_beyond_ascii_use_the_international_types() -> None:
    raw = composed(
        report(UNKNOWN_USER, "jürgen@bücher.example", orcpt=r"utf-8;j\x{FC}rgen@example.com"),
        about=message("änne@sender.example"),
        header="Subject: Grüße\r\n".encode(),
    )
    found = Report(raw)
    assert [part.get_content_type() for part in found.parts[1:]] == [
        "message/global-delivery-status",
        "message/global-headers",
    ]
    assert b"To: <\xc3\xa4nne@sender.example>" in raw
    head, _, body = raw.partition(b"\r\n\r\n")
    assert not head.isascii()
    assert body.isascii()
    status = decoded_part(raw, 2)
    assert "Final-Recipient: utf-8; jürgen@bücher.example\r\n" in status
    assert "Original-Recipient: utf-8; jürgen@example.com\r\n" in status
    assert "Subject: Grüße" in decoded_part(raw, 3)
    assert "<jürgen@bücher.example>" in found.people


def boundary_of(raw: bytes) -> bytes:
    match = re.search(rb'boundary="([^"]+)"', raw)
    assert match
    return match[1]


def decoded_part(raw: bytes, number: int) -> str:
    """A part by position, decoded by hand: the email package takes no global types apart."""
    import base64
    import quopri

    head, _, body = raw.split(b"--" + boundary_of(raw))[number].partition(b"\r\n\r\n")
    if b": base64" in head:
        return base64.b64decode(body).decode()
    assert b"quoted-printable" in head
    return quopri.decodestring(body.replace(b"\r\n", b"\n")).decode().replace("\n", "\r\n")


def test_eight_bit_text_never_makes_the_report_eight_bit() -> None:
    outcome = Outcome(Verdict.BOUNCED, Reply(550, "1.1", "kein Empfänger"), host="mx.example.com")
    raw = composed(
        report(outcome),
        about=message(headers=(("Subject", "Grüße"),)),
        header="Subject: Grüße\r\nX-Raw: ".encode() + b"\xff\x00\r\n",
    )
    assert raw.isascii()
    found = Report(raw)
    assert found.recipient["Diagnostic-Code"] == "smtp; 550 5.1.1 kein Empf?nger"
    assert "kein Empfänger" in found.people
    assert "Grüße" in found.people
    assert found.parts[2].get_payload(decode=True) == "Subject: Grüße\r\nX-Raw: ".encode() + b"\xff\x00\r\n"


def test_a_line_too_long_for_smtp_is_encoded_not_broken() -> None:
    header = b"X-Long: " + b"x" * 5000 + b"\r\n"
    raw = composed(report(UNKNOWN_USER), header=header)
    assert max(map(len, raw.split(b"\r\n"))) <= 998
    assert Report(raw).parts[2].get_payload(decode=True) == header


def test_the_original_header_comes_back_as_it_was_and_cannot_guess_the_boundary() -> None:
    guess = b"--" + boundary_of(composed(report(UNKNOWN_USER)))
    header = HEADER + guess + b"--\r\n" + guess + b"\r\nContent-Type: text/html\r\n\r\n"
    found = Report(composed(report(UNKNOWN_USER), header=header))
    assert found.parts[2].get_payload(decode=True) == header


def test_a_message_id_that_could_forge_a_header_is_not_quoted() -> None:
    for forged in ("<a@b>\r\nBcc: x@y", "<a b>", "no brackets", "<" + "a" * 2000 + "@b>"):
        head = Report(composed(report(UNKNOWN_USER), about=message(headers=(("Message-ID", forged),)))).head
        assert head["References"] is None
        assert head["Bcc"] is None


def test_no_report_is_ever_made_for_the_null_sender() -> None:
    with pytest.raises(ValueError, match="null sender"):
        composed(report(UNKNOWN_USER), about=message(""))


HOSTILE = st.one_of(
    st.text(max_size=200),
    st.text(st.sampled_from("\r\n\x00\x0b\x85\u2028 :-=_.ab\x1b\udcff"), max_size=2000),
    st.just("x\r\n\r\n--=_018be9a4b8000100_0\r\nStatus: 2.0.0\r\n"),
    st.just("y" * 5000),
)


@settings(max_examples=60, deadline=None)
@given(
    text=HOSTILE, host=HOSTILE, orcpt=HOSTILE, envid=HOSTILE, subject=HOSTILE, header=st.binary(max_size=500)
)
def test_nothing_hostile_changes_the_shape_of_a_report(
    text: str, host: str, orcpt: str, envid: str, subject: str, header: bytes
) -> None:
    outcome = Outcome(Verdict.BOUNCED, Reply(550, "1.1", text), host=host)
    about = message(envid=envid, headers=(("Subject", subject), ("Message-ID", subject)))
    raw = composed(report(outcome, orcpt=orcpt), about=about, header=header)
    check_report(raw, ascii_header=True)
    if orcpt.isascii():
        assert raw.isascii()
        assert len(Report(raw).recipient.get("Diagnostic-Code", "")) <= MAX_REPLY + 100
