"""Bodies of DATA in any packets, read in the plainest way beside it; what is plain goes out as it is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.fuzz.targets.bodies import body
from tests.support.feeding import cuts
from tests.unit.test_bdat import OCTETS
from zonerelay.smtp.server.line_ends import END_OF_DATA, BodyReader


def read(pieces: list[bytes]) -> tuple[bytes, bytes] | None:
    """Body and what follows it; `None` without an end of data. Stops feeding where the session would."""
    reader = BodyReader()
    text = b""
    for at, piece in enumerate(pieces):
        text += reader.feed(piece)
        if reader.done:
            return text, reader.rest + b"".join(pieces[at + 1 :])
    return None


TABLE = [
    (b".\r\n", b"", "no body at all: DATA's own CRLF is the first line end"),
    (b"hello\r\n.\r\n", b"hello\r\n", "one line"),
    (b"..\r\n.\r\n", b".\r\n", "a stuffed dot on the first line"),
    (b"a\r\n..b\r\n...\r\n.\r\n", b"a\r\n.b\r\n..\r\n", "stuffed dots"),
    (b".a\r\n.\r\n", b"a\r\n", "a dot that nobody stuffed is removed all the same (RFC 5321 4.5.2)"),
    (b"a.\r\n.\r\n", b"a.\r\n", "a dot elsewhere"),
    (b"\r\n\r\n.\r\n", b"\r\n\r\n", "empty lines"),
    (b"x\x00y\r\n.\r\n", b"x\x00y\r\n", "NUL is kept"),
    (b"a\nb\r\n.\r\n", b"a\r\nb\r\n", "bare LF becomes CRLF"),
    (b"a\rb\r\n.\r\n", b"a b\r\n", "bare CR becomes a blank"),
    (b"a\r\r\n.\r\n", b"a \r\n", "CR CR LF"),
    (b"a\n\r\n.\r\n", b"a\r\n\r\n", "LF CR LF"),
    (b"\n\n.\r\n.\r\n", b"\r\n\r\n.\r\n", "a dot behind bare LFs is text"),
]


@pytest.mark.parametrize(("wire", "expected", "reason"), TABLE, ids=[row[2] for row in TABLE])
def test_body_is_the_same_in_every_cut(wire: bytes, expected: bytes, reason: str) -> None:
    for pieces in cuts(wire):
        assert read(pieces) == (expected, b""), (reason, pieces)


def test_what_follows_the_end_is_handed_back() -> None:
    for pieces in cuts(b"a\r\n.\r\nQUIT\r\n.\r\n"):
        assert read(pieces) == (b"a\r\n", b"QUIT\r\n.\r\n")


def test_bare_line_ends_are_counted() -> None:
    for pieces in cuts(b"a\nb\rc\r\n\n\r\r\n..\n.\r\n.\r\n"):
        reader = BodyReader()
        for piece in pieces:
            if not reader.done:
                reader.feed(piece)
        assert (reader.bare_lf, reader.bare_cr) == (3, 2), pieces


@settings(max_examples=300, deadline=None)
@given(wire=OCTETS)
def test_reader_agrees_with_the_plain_reference_on_any_split(wire: bytes) -> None:
    body(wire)
    body(wire + END_OF_DATA)


@pytest.mark.parametrize(
    ("sent", "plain"),
    [
        *((body, False) for body in (b"..", b"a\r\n..b", b"a\n.b", b"a\rb", b"a\nb", b"\0")),
        *((body, True) for body in (b"", b"a", b"a.\r\n")),
    ],
)
def test_what_needs_stuffing_is_not_plain(sent: bytes, plain: bool) -> None:
    for pieces in cuts(sent + b"\r\n.\r\n" if sent else b".\r\n"):
        reader = BodyReader()
        for piece in pieces:
            if not reader.done:
                reader.feed(piece)
        assert reader.done
        assert reader.is_plain is plain, pieces


def test_nothing_is_held_of_a_line_that_never_ends() -> None:
    reader = BodyReader()
    assert reader.feed(b"x" * 100_000) == b"x" * 100_000
    assert reader.feed(b"y" * 100_000) == b"y" * 100_000
