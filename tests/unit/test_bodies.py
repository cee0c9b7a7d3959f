"""Bodies in any borders and packets: by BDAT and DATA, into the store and out of it, and smuggling."""

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.smuggling import ENDS, SEQUENCES, SMUGGLED, bodies
from tests.fuzz.targets import bodies as body_target
from tests.fuzz.targets.chunks import bdat
from tests.support import lenient
from tests.support.feeding import cuts
from tests.support.lenient import LENIENT, STRICT, Receiver
from zonerelay.smtp.client.stuffing import ChunkLines, DotStuffer, as_chunk, stuffed
from zonerelay.smtp.server import line_ends
from zonerelay.smtp.server.line_ends import END_OF_DATA, BodyReader, ChunkReader
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
    assert line_ends.parse_bdat(argument) == expected


BAD_ARGUMENTS = [
    "", "LAST", "x", "-1", "+1", "1x", "1.0", "0x10", "1_0", " 1", "1 LAST ", "1 LAST LAST", "1 FIRST",
    "1LAST", "1 2", "9" * 21, "\u0661", "\xb2", "1\tLAST", "1 LA\u017fT",
]  # fmt: skip


@pytest.mark.parametrize("argument", BAD_ARGUMENTS)
def test_size_that_cannot_be_read_is_refused(argument: str) -> None:
    with pytest.raises(CommandError, match=r"501 5\.5\.4"):
        line_ends.parse_bdat(argument)


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
        is_long = max(map(len, whole.split(b"\n"))) > line_ends.MAX_LINE + len(b"\r")
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


# Bodies of DATA in any packets, read in the plainest way beside it; what is plain goes out as it is


def read_data(pieces: list[bytes]) -> tuple[bytes, bytes] | None:
    """Body and what follows it; `None` without an end of data. Stops feeding where the session would."""
    reader = BodyReader()
    text = b""
    for at, piece in enumerate(pieces):
        text += reader.feed(piece)
        if reader.done:
            return text, reader.rest + b"".join(pieces[at + 1 :])
    return None


DATA_TABLE = [
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


@pytest.mark.parametrize(("wire", "expected", "reason"), DATA_TABLE, ids=[row[2] for row in DATA_TABLE])
def test_body_is_the_same_in_every_cut(wire: bytes, expected: bytes, reason: str) -> None:
    for pieces in cuts(wire):
        assert read_data(pieces) == (expected, b""), (reason, pieces)


@settings(max_examples=300, deadline=None)
@given(wire=OCTETS)
def test_reader_agrees_with_the_plain_reference_on_any_split(wire: bytes) -> None:
    body_target.body(wire)
    body_target.body(wire + END_OF_DATA)


def test_nothing_is_held_of_a_line_that_never_ends() -> None:
    reader = BodyReader()
    assert reader.feed(b"x" * 100_000) == b"x" * 100_000
    assert reader.feed(b"y" * 100_000) == b"y" * 100_000


# Dot-stuffing over any split, against the rule applied to the whole message at once


def stuff(pieces: list[bytes]) -> bytes:
    stuffer = DotStuffer()
    return b"".join([*(stuffer.feed(piece) for piece in pieces), stuffer.finish()])


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
    body_target.stuffing(b"".join(pieces))


def test_clean_chunk_is_passed_on_without_a_copy() -> None:
    chunk = b"a line\r\n" * 1000
    assert DotStuffer().feed(chunk) is chunk


# What goes into chunks has CRLF line ends only and ends with one, over any split; nothing else changes


BODY = st.text(alphabet="\r\n.x\x00", max_size=30).map(str.encode)


def cut(body: bytes, size: int, *, plain: bool) -> bytes:
    lines = ChunkLines(plain=plain)
    pieces = [lines.feed(body[at : at + size]) for at in range(0, len(body), size)]
    return b"".join([*pieces, lines.finish()])


@settings(max_examples=150, deadline=None)
@given(body=BODY, size=st.integers(1, 10))
def test_line_ends_are_strict_whatever_was_stored(body: bytes, size: int) -> None:
    sent = cut(body, size, plain=False)
    assert sent == as_chunk(body, plain=False)
    assert line_ends.crlf_only(sent) == sent
    assert sent.endswith(b"\r\n")
    # Nothing but line ends was touched.
    assert sent.replace(b"\r\n", b"").replace(b" ", b"") == body.replace(b"\r", b"").replace(b"\n", b"")


@settings(max_examples=100, deadline=None)
@given(body=BODY.map(line_ends.crlf_only), size=st.integers(1, 10))
def test_a_plain_body_goes_as_it_is(body: bytes, size: int) -> None:
    expected = body if body.endswith(b"\n") else body + b"\r\n"
    assert cut(body, size, plain=True) == expected
    assert cut(body, size, plain=False) == expected
    assert as_chunk(body, plain=True) == expected


# SMTP smuggling, in and out: nothing but CRLF.CRLF ends a message here, or at any server behind us


HIDDEN_DOT = re.compile(rb"^(\x00+)\.", re.MULTILINE)
TAIL = len(SMUGGLED) - 6
"""Octets behind the sequences, where a cut is like any other."""
BARE = re.compile(rb"\r(?!\n)|(?<!\r)\n")


def by_data(wire: bytes) -> tuple[bytes, bool]:
    """Body and `is_plain` of what ends with the only end of data."""
    reader = BodyReader()
    body = reader.feed(wire)
    assert (reader.done, reader.rest) == (True, b"")
    return body, reader.is_plain


def in_one_chunk(octets: bytes) -> tuple[bytes, bool]:
    reader = ChunkReader()
    reader.begin(len(octets), True)
    return reader.feed(octets), reader.is_plain


def test_only_crlf_dot_crlf_ends_data() -> None:
    for sequence in SEQUENCES:
        for sent in bodies(sequence):
            body_target.body(sent + b".\r\n")


def test_nothing_at_all_ends_a_chunk_but_its_size() -> None:
    for sequence in (*SEQUENCES, END_OF_DATA):
        for sent in bodies(sequence) or [b"first" + sequence + SMUGGLED]:
            bdat(b"1\n" + sent)


@pytest.mark.parametrize(("before", "behind"), ENDS, ids=repr)
def test_what_stands_around_the_end_does_not_hide_it(before: bytes, behind: bytes) -> None:
    body_target.body(b"first" + before + b".\r\n" + behind + SMUGGLED)


def ways_out(body: bytes, plain: bool) -> Iterator[bytes]:
    """What is sent for a stored body, over all splits that the store and the courier could make of it."""
    yield stuffed(body, plain=plain)
    for pieces in cuts(body, but=TAIL):
        stuffer = DotStuffer(plain=plain)
        yield b"".join([*map(stuffer.feed, pieces), stuffer.finish()])


def stored(sequence: bytes) -> set[tuple[bytes, bool]]:
    """What attackers can bring into the store with it: by DATA, stuffed properly and not, and by BDAT."""
    found = set()
    for sent in bodies(sequence):
        found |= {by_data(sent + b".\r\n"), in_one_chunk(sent)}
        found.add(by_data(sent.replace(b"\r\n.", b"\r\n..") + b".\r\n"))
    return found


def test_no_server_behind_us_sees_a_second_message() -> None:
    for sequence in SEQUENCES:
        for body, plain in stored(sequence):
            assert b"evil@example.org" in body
            sent = set(ways_out(body, plain))
            assert len(sent) == 1, "the same octets for any split"
            wire = sent.pop()
            assert not BARE.search(wire), sequence
            text = HIDDEN_DOT.sub(rb"\1 .", body)
            assert STRICT.receive(wire) == (text, b""), sequence
            for receiver in LENIENT:
                assert receiver.receive(wire) == (text.translate(None, receiver.dropped), b""), (
                    sequence,
                    receiver.name,
                )


FOOLED: list[tuple[Receiver, list[bytes]]] = [
    (lenient.POSTFIX, [b"\n.\n", b"\n.\r\n", b"\r\n.\n", b"\r\n.\r\r\n", b"\r\r\n.\r\r\n"]),
    (lenient.SENDMAIL, [b"\n.\n", b"\n.\r\n", b"\r\n.\n"]),
    (lenient.EXIM, [b"\n.\n", b"\n.\r\n", b"\r\n.\n", b"\r.\r\n"]),
    (lenient.AIOSMTPD, [b"\n.\r\n", b"\r\x00\n.\r\n"]),
    (lenient.CLEANER, [b"\r.\r", b"\n.\r", b"\r.\n", b"\n.\n"]),
    (lenient.NUL_DROPPER, [b"\r\n\x00.\r\n", b"\r\n.\x00\r\n", b"\r\n\x00.\r", b"\r\n.\r\x00\n"]),
    (lenient.TRIMMER, [b"\r\n. \r\n", b"\r\n.\t\r\n", b"\n.\x00\n"]),
]


@pytest.mark.parametrize(("receiver", "sequences"), FOOLED, ids=[row[0].name for row in FOOLED])
def test_the_models_fall_for_what_fooled_the_servers(receiver: Receiver, sequences: list[bytes]) -> None:
    """Without this the test before it would prove nothing."""
    for sequence in sequences:
        assert sequence in SEQUENCES
        received = receiver.receive(b"first" + sequence + SMUGGLED + b".\r\n")
        assert received is not None
        assert received[1].startswith(b"MAIL FROM:<evil@example.org>"), sequence


def test_the_list_is_complete_and_holds_no_real_end() -> None:
    assert len(SEQUENCES) == len(set(SEQUENCES)) > 150
    for sequence in SEQUENCES:
        assert END_OF_DATA not in sequence
        assert bodies(sequence)
