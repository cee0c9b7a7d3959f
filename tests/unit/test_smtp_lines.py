from __future__ import annotations

import pytest

from tests.support.feeding import cuts
from zonerelay.smtp.server.commands import LineFault, LineReader


def read(pieces: list[bytes], limit: int = 20) -> list[bytes | LineFault]:
    reader = LineReader(limit)
    lines: list[bytes | LineFault] = []
    for piece in pieces:
        reader.feed(piece)
        while (line := reader.next()) is not None:
            lines.append(line)
    return lines


TABLE = [
    (b"NOOP\r\n", [b"NOOP"], "one line"),
    (b"a\r\nb\r\n\r\n", [b"a", b"b", b""], "a pipelined group, and an empty line"),
    (b"a", [], "no line end yet"),
    (b"a\r", [], "half a line end"),
    (b"a\rb\r\n", [b"a\rb"], "a bare CR ends nothing; the command parser refuses it"),
    (b"a\nb\r\n", [LineFault.BARE_LF, b"b"], "a bare LF is a fault at once"),
    (b"\n", [LineFault.BARE_LF], "nothing but a bare LF"),
    (b"a\r\r\n", [b"a\r"], "only the last CR belongs to the line end"),
    (b"x" * 18 + b"\r\n", [b"x" * 18], "the longest line"),
    (b"x" * 19 + b"\r\nb\r\n", [LineFault.TOO_LONG, b"b"], "one octet more; the next line is read"),
    (b"x" * 90 + b"\r\nb\r\n", [LineFault.TOO_LONG, b"b"], "far too long"),
    (b"x" * 90 + b"\nb\r\n", [LineFault.BARE_LF, b"b"], "a bare LF does not end a long line either"),
]


@pytest.mark.parametrize(("stream", "expected", "reason"), TABLE, ids=[row[2] for row in TABLE])
def test_lines_are_the_same_in_every_cut(stream: bytes, expected: list[object], reason: str) -> None:
    for pieces in cuts(stream):
        assert read(pieces) == expected, (reason, pieces)


@pytest.mark.parametrize(("stream", "expected", "reason"), TABLE, ids=[row[2] for row in TABLE])
def test_a_line_alone_is_what_feed_and_next_return(
    stream: bytes, expected: list[object], reason: str
) -> None:
    reader = LineReader(20)
    line = reader.only_line(stream)
    alone = len(expected) == 1 and isinstance(expected[0], bytes)
    assert [line] == (expected if alone else [None]), reason
    assert reader.waiting == 0
    assert reader.next() is None, "nothing was taken"


def test_a_line_behind_waiting_octets_is_not_alone() -> None:
    reader = LineReader(20)
    reader.feed(b"NO")
    assert reader.next() is None
    assert reader.only_line(b"OP\r\n") is None
    reader.feed(b"OP\r\n")
    assert reader.only_line(b"RSET\r\n") is None
    assert reader.next() == b"NOOP"
    assert reader.only_line(b"RSET\r\n") == b"RSET"


def test_the_end_of_an_overlong_line_is_not_a_line_alone() -> None:
    reader = LineReader(20)
    reader.feed(b"x" * 30)
    assert reader.next() is None
    assert reader.only_line(b"RSET\r\n") is None


def test_a_stream_without_line_end_does_not_grow() -> None:
    reader = LineReader(512)
    for _ in range(1000):
        reader.feed(b"x" * 1000)
        assert reader.next() is None
        assert reader.waiting <= 512
    reader.feed(b"\r\nNOOP\r\n")
    assert [reader.next(), reader.next(), reader.next()] == [LineFault.TOO_LONG, b"NOOP", None]


def test_clear_forgets_pipelined_input() -> None:
    reader = LineReader(512)
    reader.feed(b"STARTTLS\r\nMAIL FROM:<injected@example.org>\r\n")
    assert reader.next() == b"STARTTLS"
    assert reader.waiting
    reader.clear()
    assert reader.waiting == 0
    assert reader.next() is None
