"""Dot-stuffing over any split, against the rule applied to the whole message at once."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.smtp.client.stuffing import DotStuffer


def stuff(pieces: list[bytes]) -> bytes:
    stuffer = DotStuffer()
    return b"".join([*(stuffer.feed(piece) for piece in pieces), stuffer.finish()])


def normal(body: bytes) -> bytes:
    """Line ends as DESIGN rule 5 wants them, and no dot behind NULs that some server may drop."""
    clean = re.sub(rb"\r\n|\r|\n", lambda m: b" " if m[0] == b"\r" else b"\r\n", body)
    if clean and not clean.endswith(b"\r\n"):
        clean += b"\r\n"
    return b"\r\n".join(re.sub(rb"^(\x00+)\.", rb"\1 .", line) for line in clean.split(b"\r\n"))


def by_the_rule(body: bytes) -> bytes:
    """RFC 5321 4.5.2 for each line, then the end of data."""
    lines = normal(body).split(b"\r\n")[:-1]
    return b"".join((b"." if line.startswith(b".") else b"") + line + b"\r\n" for line in lines) + b".\r\n"


@pytest.mark.parametrize(
    ("body", "expected", "why"),
    [
        (b"", b".\r\n", "an empty message"),
        (b"a\r\n", b"a\r\n.\r\n", "nothing to do"),
        (b"a", b"a\r\n.\r\n", "the last line is ended"),
        (b".", b"..\r\n.\r\n", "a lone dot"),
        (b".\r\n", b"..\r\n.\r\n", "a lone dot line"),
        (b"a\r\n.\r\nb\r\n", b"a\r\n..\r\nb\r\n.\r\n", "the end of data inside the message"),
        (b"a.\r\n..b\r\n", b"a.\r\n...b\r\n.\r\n", "dots in the line and two at its start"),
        (b"\r\n.\r\n.\r\n", b"\r\n..\r\n..\r\n.\r\n", "one after the other"),
        (b"a\n.\nb\r\n", b"a\r\n..\r\nb\r\n.\r\n", "bare LF would be the end for some servers"),
        (b"a\r.\rb\r\n", b"a . b\r\n.\r\n", "bare CR is a space"),
        (b"a\r\n.\rb\r\n", b"a\r\n.. b\r\n.\r\n", "CR after a dot"),
        (b"a\r", b"a \r\n.\r\n", "CR as the last octet"),
        (b"a\r\r\n", b"a \r\n.\r\n", "CR before CRLF"),
        (b"\x00.\r\n", b"\x00 .\r\n.\r\n", "a lone dot for servers that drop NUL"),
        (b"a\r\n\x00\x00.\r\nb\r\n", b"a\r\n\x00\x00 .\r\nb\r\n.\r\n", "inside, with more of them"),
        (b"\x00\r\n\x00x.\r\n", b"\x00\r\n\x00x.\r\n.\r\n", "NUL and no dot behind it"),
        (b"a\n\x00.\n.\n", b"a\r\n\x00 .\r\n..\r\n.\r\n", "the same behind a bare line end"),
        (b"a\x00.\r\n.\x00", b"a\x00.\r\n..\x00\r\n.\r\n", "NUL elsewhere"),
        (b"\x00\r.\r\n", b"\x00 .\r\n.\r\n", "a bare CR is a space already"),
    ],
)
def test_stuffed_however_it_is_split(body: bytes, expected: bytes, why: str) -> None:
    assert stuff([body]) == expected, why
    assert stuff([body[at : at + 1] for at in range(len(body))]) == expected, why
    for at in range(len(body) + 1):
        assert stuff([body[:at], body[at:]]) == expected, (why, at)


@given(st.lists(st.text(alphabet=".\r\na\x00", max_size=9).map(str.encode), max_size=9))
def test_any_body_in_any_pieces_follows_the_rule(pieces: list[bytes]) -> None:
    assert stuff(pieces) == by_the_rule(b"".join(pieces))


@given(st.lists(st.text(alphabet=".\r\nab\x00", max_size=9).map(str.encode), max_size=9))
def test_what_is_sent_ends_exactly_once_and_has_no_bare_line_end(pieces: list[bytes]) -> None:
    sent = b"\r\n" + stuff(pieces)
    assert sent.find(b"\r\n.\r\n") == len(sent) - 5
    assert re.search(rb"\r(?!\n)|(?<!\r)\n", sent) is None


def test_clean_chunk_is_passed_on_without_a_copy() -> None:
    chunk = b"a line\r\n" * 1000
    assert DotStuffer().feed(chunk) is chunk
