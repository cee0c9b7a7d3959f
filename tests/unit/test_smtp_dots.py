from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.feeding import cuts
from zonerelay.smtp.server.line_ends import BodyReader


def reference(wire: bytes) -> tuple[bytes, bytes] | None:
    """Body and what follows it, in the plainest way; `None` without an end of data."""
    stream = b"\r\n" + wire
    end = stream.find(b"\r\n.\r\n")
    if end < 0:
        return None
    lines = stream[2 : end + 2].split(b"\r\n")
    body = b"\r\n".join(line[1:] if line.startswith(b".") else line for line in lines)
    return normalized(body), stream[end + 5 :]


def normalized(body: bytes) -> bytes:
    out = bytearray()
    for at, octet in enumerate(body):
        if octet == 0x0D:
            out += b"\r" if body[at + 1 : at + 2] == b"\n" else b" "
        elif octet == 0x0A:
            out += b"\n" if at and body[at - 1] == 0x0D else b"\r\n"
        else:
            out.append(octet)
    return bytes(out)


def read(pieces: list[bytes]) -> tuple[bytes, bytes] | None:
    """Like `reference`, through the reader; stops feeding where the session would."""
    reader = BodyReader()
    body = b""
    for at, piece in enumerate(pieces):
        body += reader.feed(piece)
        if reader.done:
            return body, reader.rest + b"".join(pieces[at + 1 :])
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


@pytest.mark.parametrize(("wire", "body", "reason"), TABLE, ids=[row[2] for row in TABLE])
def test_body_is_the_same_in_every_cut(wire: bytes, body: bytes, reason: str) -> None:
    assert reference(wire) == (body, b"")
    for pieces in cuts(wire):
        assert read(pieces) == (body, b""), (reason, pieces)


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


SEVERE = st.lists(
    st.sampled_from([b"\r", b"\n", b".", b"\r\n", b"\r\n.", b"\r\n.\r\n", b"a", b"\x00", b" ", b"\xff"]),
    max_size=40,
).map(b"".join)


@settings(max_examples=150, deadline=None)
@given(wire=SEVERE, data=st.data())
def test_reader_agrees_with_the_plain_reference_on_any_split(wire: bytes, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(wire)), max_size=6).map(sorted))
    bounds = [0, *places, len(wire)]
    pieces = [wire[a:b] for a, b in itertools.pairwise(bounds)]
    assert read(pieces) == reference(wire)


@settings(max_examples=200, deadline=None)
@given(wire=SEVERE)
def test_what_comes_out_before_the_end_has_crlf_line_ends_only(wire: bytes) -> None:
    reader = BodyReader()
    body = b""
    for at in range(len(wire)):
        if reader.done:
            break
        body += reader.feed(wire[at : at + 1])
    plain = body.replace(b"\r\n", b"")
    assert b"\r" not in plain
    assert b"\n" not in plain


def test_nothing_is_held_of_a_line_that_never_ends() -> None:
    reader = BodyReader()
    assert reader.feed(b"x" * 100_000) == b"x" * 100_000
    assert reader.feed(b"y" * 100_000) == b"y" * 100_000


def test_large_bodies_are_scanned_in_whole_pieces_not_by_line() -> None:
    """A generous floor, for a busy machine: a step per line would take some 20 times as long."""
    piece = (b"x" * 70 + b"\r\n") * 3640
    reader = BodyReader()
    began = time.process_time()
    for _ in range(32):
        reader.feed(piece)
    assert 32 * len(piece) / (time.process_time() - began) > 100e6
