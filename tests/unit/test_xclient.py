from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.smtp.server.paths import CommandError
from zonerelay.smtp.server.proxy_protocol import KEYWORDS, MAX_VALUE, XClient, parse_xclient

GOOD = [
    (
        "NAME=client.example.org ADDR=192.0.2.1",
        XClient(name="client.example.org", address="192.0.2.1"),
        "two",
    ),
    ("name=a addr=192.0.2.1", XClient(name="a", address="192.0.2.1"), "names in any case"),
    ("ADDR=IPV6:2001:DB8::1", XClient(address="2001:db8::1"), "IPv6 in canonical form"),
    ("ADDR=ipv6:::ffff:192.0.2.1", XClient(address="192.0.2.1"), "mapped is IPv4"),
    ("PORT=56324 PROTO=esmtp", XClient(port=56324, protocol="ESMTP"), "a port and a protocol"),
    ("PROTO=SMTP", XClient(protocol="SMTP"), "the other protocol"),
    ("HELO=[192.0.2.1]", XClient(helo="[192.0.2.1]"), "what a client without a name says"),
    ("HELO=my+20host", XClient(helo="my host"), "xtext"),
    ("LOGIN=j+C3+B6rg+40example.org", XClient(login="j\u00f6rg@example.org"), "xtext of UTF-8"),
    ("LOGIN=a+2bb", XClient(login="a+b"), "lower case hexadecimal, which some senders use"),
    (
        "NAME=[UNAVAILABLE] ADDR=[unavailable] PORT=[Unavailable] HELO=[UNAVAILABLE] LOGIN=[UNAVAILABLE]",
        XClient(name="", address="", port=0, helo="", login=""),
        "nobody knows",
    ),
    ("NAME=[TEMPUNAVAIL]", XClient(name=""), "nobody knows now"),
    ("DESTADDR=192.0.2.9 DESTPORT=25", XClient(), "where the client has connected to is dropped"),
    ("DESTADDR=[UNAVAILABLE] DESTPORT=[UNAVAILABLE]", XClient(), "or is not known"),
    (f"HELO={'x' * MAX_VALUE}", XClient(helo="x" * MAX_VALUE), "the longest value"),
    ("  NAME=a   PORT=1 ", XClient(name="a", port=1), "spaces"),
]


@pytest.mark.parametrize(("argument", "expected", "reason"), GOOD, ids=[row[2] for row in GOOD])
def test_what_a_server_in_front_says(argument: str, expected: XClient, reason: str) -> None:
    assert parse_xclient(argument) == expected, reason


def test_every_keyword_that_is_offered_is_understood() -> None:
    for keyword in KEYWORDS.split():
        value = "SMTP" if keyword == "PROTO" else "[UNAVAILABLE]"
        parse_xclient(f"{keyword}={value}")


@given(st.text(max_size=60))
def test_any_text_is_understood_or_refused(text: str) -> None:
    for argument in (text, f"NAME={text}", f"LOGIN={text}", f"ADDR={text}"):
        try:
            said = parse_xclient(argument)
        except CommandError:
            continue
        assert all(value.isprintable() for value in (said.name, said.address, said.helo, said.login) if value)


LOGINS = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=40)


@given(LOGINS.filter(lambda login: login.upper() not in ("[UNAVAILABLE]", "[TEMPUNAVAIL]")))
def test_a_login_that_was_encoded_as_xtext_comes_out_again(login: str) -> None:
    encoded = "".join(
        chr(octet) if 33 <= octet <= 126 and chr(octet) not in "+=" else f"+{octet:02X}"
        for octet in login.encode()
    )
    assert parse_xclient(f"LOGIN={encoded}").login == login
