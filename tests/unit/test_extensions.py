"""EHLO replies as servers write them."""

from __future__ import annotations

import pytest

from zonerelay.smtp.client.extensions import (
    NO_LIMITS,
    Capabilities,
    PeerLimits,
    future_release_line,
    limits_line,
    parse_ehlo,
)


def test_extensions_of_a_usual_server() -> None:
    text = (
        "mx.example.com Hello\nPIPELINING\nSIZE 52428800\n8BITMIME\nSMTPUTF8\nSTARTTLS\nENHANCEDSTATUSCODES"
    )
    assert parse_ehlo(text) == Capabilities(
        pipelining=True, size_offered=True, size=52428800, eight_bit_mime=True, smtputf8=True, starttls=True
    )


def test_keywords_are_case_insensitive_and_trimmed() -> None:
    assert parse_ehlo("x\n pipelining \r\nChunking\ndsn") == Capabilities(
        pipelining=True, chunking=True, dsn=True
    )


def test_of_a_keyword_on_several_lines_nothing_is_lost() -> None:
    assert parse_ehlo("x\nSIZE 2000\nSIZE 1000\nsize").size == 1000
    assert parse_ehlo("x\nLIMITS RCPTMAX=7\nlimits MAILMAX=8").limits == PeerLimits(rcptmax=7, mailmax=8)
    found = parse_ehlo("x\nstarttls\nsize\t9\npipelining\nchunking\n8bitmime\nsmtputf8\ndsn\nrequiretls")
    assert found == Capabilities(
        pipelining=True,
        size_offered=True,
        size=9,
        eight_bit_mime=True,
        smtputf8=True,
        starttls=True,
        chunking=True,
        dsn=True,
        require_tls=True,
    )


def test_greeting_line_is_not_a_keyword() -> None:
    assert parse_ehlo("PIPELINING at your service") == Capabilities()
    assert parse_ehlo("PIPELINING") == Capabilities()


@pytest.mark.parametrize(
    ("parameter", "why"),
    [
        ("", "no number: no fixed limit"),
        (" 0", "zero: no fixed limit"),
        (" many", "not a number"),
        (" -1", "not a number"),
        (" ١٢", "digits, but not ASCII"),
        (" " + "9" * 21, "more digits than RFC 1870 allows"),
    ],
)
def test_size_without_a_usable_limit(parameter: str, why: str) -> None:
    capabilities = parse_ehlo(f"x\nSIZE{parameter}")
    assert capabilities.size is None, why
    assert capabilities.size_offered


LIMITS = [
    ("LIMITS RCPTMAX=1000", PeerLimits(rcptmax=1000), "one"),
    (
        "LIMITS MAILMAX=5 RCPTMAX=999999 RCPTDOMAINMAX=1",
        PeerLimits(mailmax=5, rcptmax=999_999, rcptdomainmax=1),
        "all that are registered",
    ),
    ("limits  rcptmax=7   MailMax=8", PeerLimits(rcptmax=7, mailmax=8), "no case, several blanks"),
    (
        "LIMITS FUTURE NEW-ONE=a=b:c RCPTMAX=7",
        PeerLimits(rcptmax=7),
        "those that we do not know are passed over",
    ),
    ("LIMITS RCPTMAX=7 RCPTMAX=5 RCPTMAX=6", PeerLimits(rcptmax=5), "the strictest of several"),
    ("LIMITS RCPTMAX=0 MAILMAX=8", PeerLimits(mailmax=8), "zero is not allowed"),
    ("LIMITS RCPTMAX=1000000 MAILMAX=8", PeerLimits(mailmax=8), "seven digits are not allowed"),
    ("LIMITS RCPTMAX=x MAILMAX=8", PeerLimits(mailmax=8), "not a number"),
    ("LIMITS RCPTMAX=\u0667 MAILMAX=8", NO_LIMITS, "digits, but not ASCII"),
    ("LIMITS RCPTMAX MAILMAX=8", PeerLimits(mailmax=8), "no value"),
    ("LIMITS RCPTMAX=7; MAILMAX=8", NO_LIMITS, "bad syntax anywhere makes all of it void"),
    ("LIMITS RCPTMAX= MAILMAX=8", NO_LIMITS, "an empty value is bad syntax"),
    ("LIMITS =7 MAILMAX=8", NO_LIMITS, "so is an empty name"),
    ("LIMITS", NO_LIMITS, "nothing"),
    ("SIZE 5", NO_LIMITS, "not offered"),
]


@pytest.mark.parametrize(("line", "limits", "why"), LIMITS, ids=[row[2] for row in LIMITS])
def test_limits_of_a_server(line: str, limits: PeerLimits, why: str) -> None:
    assert parse_ehlo(f"x\nPIPELINING\n{line}").limits == limits


def test_our_limits_can_be_read_by_anybody() -> None:
    assert limits_line(1000) == "LIMITS RCPTMAX=1000"
    assert parse_ehlo(f"x\n{limits_line(1000)}").limits == PeerLimits(rcptmax=1000)
    assert limits_line(5_000_000) == "LIMITS RCPTMAX=999999"


def test_how_far_ahead_a_message_may_be_held() -> None:
    now = 1_893_456_000.9  # 2030-01-01T00:00:00.9Z
    assert future_release_line(604_800.0, now) == "FUTURERELEASE 604800 2030-01-08T00:00:00Z"
    assert future_release_line(1.5, now) == "FUTURERELEASE 1 2030-01-01T00:00:01Z"
    assert future_release_line(2e9, now).startswith("FUTURERELEASE 999999999 2061-")
