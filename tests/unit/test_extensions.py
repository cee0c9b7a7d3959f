"""EHLO replies as servers write them."""

from __future__ import annotations

import pytest

from zonerelay.smtp.extensions import Capabilities, parse_ehlo


def test_extensions_of_a_usual_server() -> None:
    text = (
        "mx.example.com Hello\nPIPELINING\nSIZE 52428800\n8BITMIME\nSMTPUTF8\nSTARTTLS\nENHANCEDSTATUSCODES"
    )
    assert parse_ehlo(text) == Capabilities(
        pipelining=True,
        size_offered=True,
        size=52428800,
        eight_bit_mime=True,
        smtputf8=True,
        starttls=True,
        enhanced_status_codes=True,
    )


def test_keywords_are_case_insensitive_and_trimmed() -> None:
    assert parse_ehlo("x\n pipelining \r\nChunking\ndsn") == Capabilities(
        pipelining=True, chunking=True, dsn=True
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
