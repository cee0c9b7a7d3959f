from __future__ import annotations

import re
from email import message_from_bytes, policy
from email.utils import parsedate_to_datetime

import pytest

from zonerelay.message.header.headers import EMPTY_LINE, Header, rfc5322_date, trace_fields
from zonerelay.model.address import Mailbox
from zonerelay.model.envelope import Envelope, Origin, Recipient
from zonerelay.model.message_id import MessageId

COMPLETE = Header(names=frozenset({"date", "from", "message-id"}))


def envelope(
    *recipients: str,
    helo: str = "client.example.org",
    address: str = "192.0.2.1",
    protocol: str = "ESMTP",
    utf8: bool = False,
) -> Envelope:
    return Envelope(
        id=MessageId("18bc8f3a12340000"),
        sender=Mailbox("a@example.org"),
        recipients=tuple(Recipient(address=Mailbox(r)) for r in recipients or ("b@example.com",)),
        created=1_700_000_000.0,
        smtputf8=utf8,
        origin=Origin(client_address=address, client_port=4711, helo=helo, protocol=protocol),
    )


def fields(of: Envelope, header: Header = COMPLETE) -> bytes:
    return trace_fields(of, header, hostname="relay.example.org")


def test_received_names_client_queue_id_and_the_only_recipient() -> None:
    assert fields(envelope()) == (
        b"Received: from client.example.org ([192.0.2.1])\r\n"
        b"\tby relay.example.org with ESMTP id 18bc8f3a12340000\r\n"
        b"\tfor <b@example.com>;\r\n"
        b"\tTue, 14 Nov 2023 22:13:20 +0000\r\n"
    )


def test_recipients_are_not_named_when_there_are_several() -> None:
    assert b"example.com" not in fields(envelope("b@example.com", "c@example.com"))


def test_ipv6_client_is_tagged_and_a_local_one_has_no_address() -> None:
    assert b"([IPv6:2001:db8::1])" in fields(envelope(address="2001:db8::1"))
    assert b"(local)" in fields(envelope(address=""))


@pytest.mark.parametrize(
    "helo",
    [
        "x\r\nBcc: evil@example.org",
        "a) (b",
        'x" <y>; z',
        "bücher.example",
        "\x00\x1b[2J",
        "x" * 5000,
        "a,b=c\\d",
    ],
)
def test_ehlo_name_cannot_leave_its_place(helo: str) -> None:
    text = fields(envelope(helo=helo))
    assert re.fullmatch(
        rb"Received: from [A-Za-z0-9.:_?\[\]-]{1,255} \(\[192\.0\.2\.1\]\)\r\n\tby .*", text, re.DOTALL
    )
    assert text.count(b"\n") == 4
    assert text.isascii()


def test_utf8smtp_keeps_letters_and_nothing_else() -> None:
    text = fields(
        envelope("é@bücher.example", helo="bücher.\u202eexample(\n", protocol="UTF8SMTP", utf8=True)
    )
    assert text.decode().startswith("Received: from bücher.?example?? ([192.0.2.1])\r\n")
    assert "for <é@bücher.example>;" in text.decode()
    assert b"with UTF8SMTP id" in text


def test_missing_date_and_message_id_are_added_below_received() -> None:
    text = fields(envelope(), Header())
    message = message_from_bytes(text + b"\r\n", policy=policy.SMTP)
    assert message.keys() == ["Received", "Date", "From", "Message-ID"]
    assert message["Message-ID"] == "<18bc8f3a12340000@relay.example.org>"
    assert parsedate_to_datetime(str(message["Date"])).timestamp() == 1_700_000_000


def test_present_ones_are_left_alone() -> None:
    text = fields(envelope(), Header(names=frozenset({"date"})))
    assert b"\r\nDate:" not in text
    assert b"\r\nMessage-ID:" in text


def test_lead_comes_last() -> None:
    assert fields(envelope(), Header(lead=EMPTY_LINE)).endswith(b"@relay.example.org>\r\n\r\n")


@pytest.mark.parametrize("timestamp", [0.0, 951_827_696.9, 1_700_000_000.0, 4_102_444_799.0])
def test_date_is_rfc_5322(timestamp: float) -> None:
    text = rfc5322_date(timestamp)
    assert parsedate_to_datetime(text).timestamp() == int(timestamp)
    assert re.fullmatch(r"[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d \+0000", text)


def test_no_line_is_longer_than_998() -> None:
    longest = "a" * 64 + "@" + "b" * 60 + (".c" * 90)
    for line in fields(envelope(longest, helo="h" * 600), Header()).split(b"\r\n"):
        assert len(line) <= 998
