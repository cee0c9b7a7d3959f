"""Chunks of a message in any borders and packets, against all of it joined and normalized at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets.chunks import bdat
from tests.support.feeding import cuts
from zonerelay.smtp.server.line_ends import MAX_LINE, BodyReader, ChunkReader, parse_bdat
from zonerelay.smtp.server.paths import CommandError

ARGUMENTS = [
    ("1000", (1000, False), "a chunk"),
    ("1000 LAST", (1000, True), "the last chunk"),
    ("0 LAST", (0, True), "the end, and nothing else"),
    ("0", (0, False), "nothing at all is in the grammar"),
    ("86 last", (86, True), "keywords have no case"),
    ("86  Last", (86, True), "several blanks"),
    ("0086 LAST", (86, True), "leading zeros"),
    ("9" * 20, (10**20 - 1, False), "twenty digits"),
]


@pytest.mark.parametrize(("argument", "expected", "reason"), ARGUMENTS, ids=[row[2] for row in ARGUMENTS])
def test_size_and_last(argument: str, expected: tuple[int, bool], reason: str) -> None:
    assert parse_bdat(argument) == expected


BAD_ARGUMENTS = [
    "", "LAST", "x", "-1", "+1", "1x", "1.0", "0x10", "1_0", " 1", "1 LAST ", "1 LAST LAST", "1 FIRST",
    "1LAST", "1 2", "9" * 21, "\u0661", "\xb2", "1\tLAST", "1 LA\u017fT",
]  # fmt: skip


@pytest.mark.parametrize("argument", BAD_ARGUMENTS)
def test_size_that_cannot_be_read_is_refused(argument: str) -> None:
    with pytest.raises(CommandError, match=r"501 5\.5\.4"):
        parse_bdat(argument)


def read(chunks: Iterable[tuple[Sequence[bytes], bool]]) -> tuple[bytes, ChunkReader]:
    """Each chunk in its packets."""
    reader = ChunkReader()
    body = b""
    for packets, last in chunks:
        reader.begin(sum(map(len, packets)), last)
        for packet in packets or [b""]:
            assert not reader.chunk_done
            body += reader.feed(packet)
        assert reader.chunk_done
        assert reader.rest == b""
        assert reader.done == last
    return body, reader


TABLE = [
    (b"", b"", "no body at all"),
    (b"hello\r\n", b"hello\r\n", "one line"),
    (b"hello", b"hello\r\n", "a body without its last line end gets one"),
    (b".", b".\r\n", "a dot"),
    (b"a\r\n.\r\nb\r\n", b"a\r\n.\r\nb\r\n", "the end of DATA is text here"),
    (b"\r\n.\r\n", b"\r\n.\r\n", "and nothing but it"),
    (b"..\r\n...\r\n", b"..\r\n...\r\n", "dots are nobody's stuffing"),
    (b"BDAT 5 LAST\r\nQUIT\r\n", b"BDAT 5 LAST\r\nQUIT\r\n", "commands are text"),
    (b"x\x00y\xff\r\n", b"x\x00y\xff\r\n", "NUL and 8-bit are kept"),
    (b"a\nb\n", b"a\r\nb\r\n", "bare LF becomes CRLF"),
    (b"a\rb", b"a b\r\n", "bare CR becomes a blank"),
    (b"a\r", b"a \r\n", "CR as the last octet is bare"),
    (b"a\r\r\n", b"a \r\n", "CR CR LF"),
    (b"a\n\r\n\r", b"a\r\n\r\n \r\n", "LF CR LF CR"),
]


@pytest.mark.parametrize(("sent", "body", "reason"), TABLE, ids=[row[2] for row in TABLE])
def test_body_is_the_same_in_all_chunks_and_packets(sent: bytes, body: bytes, reason: str) -> None:
    for pieces in cuts(sent):
        assert read([(pieces, True)])[0] == body, ("packets", pieces)
        last = len(pieces) - 1
        chunks = [([piece] if piece else [], at == last) for at, piece in enumerate(pieces)]
        if not chunks:
            continue
        assert read(chunks)[0] == body, ("chunks", pieces)
        ended = [*((packets, False) for packets, _ in chunks), ((), True)]
        assert read(ended)[0] == body, ("ended by BDAT 0 LAST", pieces)


def test_what_follows_a_chunk_is_handed_back() -> None:
    commands = b"BDAT 3 LAST\r\nd\r\nQUIT\r\n"
    for pieces in cuts(b"a\nb\r" + commands):
        reader = ChunkReader()
        reader.begin(4, False)
        body, rest = b"", b""
        for piece in pieces:
            if reader.chunk_done:
                rest += piece
            else:
                body += reader.feed(piece)
                rest += reader.rest
        assert (body, rest) == (b"a\r\nb", commands), pieces
        reader.begin(3, True)
        assert reader.rest == b""
        assert reader.feed(rest[len(b"BDAT 3 LAST\r\n") :]) == b" d\r\n"
        assert reader.done
        assert reader.rest == b"QUIT\r\n"


def test_a_chunk_of_nothing_is_done_once_it_is_fed() -> None:
    reader = ChunkReader()
    reader.begin(0, False)
    assert not reader.chunk_done
    assert reader.feed(b"RSET\r\n") == b""
    assert (reader.chunk_done, reader.done, reader.rest) == (True, False, b"RSET\r\n")


def test_long_lines_are_seen_wherever_lines_and_packets_end() -> None:
    random = Random(1)
    seen = {False: 0, True: 0}
    for _ in range(400):
        lines = [b"x" * random.choice((0, 1, 70, 500, 996, 997, 998, 998, 998, 999, 3000)) for _ in range(8)]
        whole = b"".join(line + random.choice((b"\r\n", b"\r\n", b"\n")) for line in lines)
        cuts_at = sorted(random.choices(range(len(whole)), k=5))
        packets = [whole[a:b] for a, b in itertools.pairwise([0, *cuts_at, len(whole)])]
        _, reader = read([([packet for packet in packets if packet], True)])
        is_long = max(map(len, whole.split(b"\n"))) > MAX_LINE + len(b"\r")
        assert reader.has_long is is_long, packets
        seen[is_long] += 1
    assert min(seen.values()) > 50


def test_nothing_certain_is_waited_for() -> None:
    reader = ChunkReader()
    reader.begin(10**20, True)
    assert reader.feed(b"x" * 100_000) == b"x" * 100_000
    assert reader.feed(b"y" * 100_000 + b"\r") == b"y" * 100_000
    assert reader.feed(b"") == b""
    assert reader.feed(b"\n") == b"\r\n"
    assert not reader.chunk_done


NOT_PLAIN = [
    b".", b".a\r\n", b"a\r\n.b\r\n", b"a\r\n..\r\n", b"a\nb", b"a\rb", b"a\r", b"\n.", b"a\r\r\n",
    b"a\x00",
]  # fmt: skip
PLAIN = [b"", b"a", b"a\r\n", b"a.\r\n\r\nb.", b"\r\n"]


@pytest.mark.parametrize("body", NOT_PLAIN + PLAIN, ids=repr)
def test_what_can_be_sent_as_it_is_is_plain_and_nothing_else(body: bytes) -> None:
    for pieces in cuts(body):
        assert read([(pieces, True)])[1].is_plain == (body in PLAIN), pieces
        chunks = [*(([piece], False) for piece in pieces), ((), True)]
        assert read(chunks)[1].is_plain == (body in PLAIN), pieces


OCTETS = st.lists(
    st.sampled_from([b"\r", b"\n", b".", b"\r\n", b"\r\n.", b"\r\n.\r\n", b"a", b"\x00", b" ", b"\xff"]),
    max_size=40,
).map(b"".join)


@settings(max_examples=120, deadline=None)
@given(sent=OCTETS)
def test_reader_agrees_with_the_plain_reference_on_any_borders(sent: bytes) -> None:
    bdat(b"1\n" + sent)


@pytest.mark.parametrize("reader", [ChunkReader(), BodyReader()], ids=["BDAT", "DATA"])
def test_large_bodies_are_scanned_in_whole_pieces_not_by_line(reader: ChunkReader | BodyReader) -> None:
    """A generous floor, for a busy machine: a step per line would take some 20 times as long."""
    piece = (b"x" * 70 + b"\r\n") * 3640
    if isinstance(reader, ChunkReader):
        reader.begin(32 * len(piece), True)
    began = time.process_time()
    for _ in range(32):
        reader.feed(piece)
    assert reader.done is isinstance(reader, ChunkReader)
    assert 32 * len(piece) / (time.process_time() - began) > 100e6
