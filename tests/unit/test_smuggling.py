"""SMTP smuggling, in and out: nothing but CRLF.CRLF ends a message here, or at any server behind us."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.data.smuggling import END_OF_DATA, ENDS, SEQUENCES, SMUGGLED, bodies
from tests.support import lenient
from tests.support.feeding import cuts
from tests.support.lenient import LENIENT, STRICT, Receiver
from zonerelay.smtp.client.stuffing import DotStuffer, stuffed
from zonerelay.smtp.server.line_ends import BodyReader, ChunkReader

HIDDEN_DOT = re.compile(rb"^(\x00+)\.", re.MULTILINE)
TAIL = len(SMUGGLED) - 6
"""Octets behind the sequences, where a cut is like any other."""
BARE = re.compile(rb"\r(?!\n)|(?<!\r)\n")


def by_data(pieces: list[bytes]) -> tuple[bytes, bool]:
    """Body and `is_plain` of pieces whose last octets are the only end of data."""
    reader, body = BodyReader(), b""
    for piece in pieces:
        assert not reader.done, "a part of the body would run as commands"
        body += reader.feed(piece)
    assert reader.done
    assert reader.rest == b""
    return body, reader.is_plain


def in_one_chunk(packets: list[bytes]) -> tuple[bytes, bool]:
    reader, body = ChunkReader(), b""
    reader.begin(sum(map(len, packets)), True)
    for packet in packets:
        assert not reader.done
        body += reader.feed(packet)
    assert reader.done
    assert reader.rest == b""
    return body, reader.is_plain


def in_chunks(chunks: list[bytes]) -> tuple[bytes, bool]:
    reader, body = ChunkReader(), b""
    for at, chunk in enumerate(chunks):
        reader.begin(len(chunk), at == len(chunks) - 1)
        body += reader.feed(chunk)
        assert reader.chunk_done
    assert reader.done
    return body, reader.is_plain


def test_only_crlf_dot_crlf_ends_data() -> None:
    for sequence in SEQUENCES:
        for sent in bodies(sequence):
            expected = by_data([sent + b".\r\n"])
            assert b"evil@example.org" in expected[0], "the smuggled commands stay in the body"
            assert not BARE.search(expected[0]), sequence
            for pieces in cuts(sent + b".\r\n", but=TAIL):
                assert by_data(pieces) == expected, (sequence, pieces)


def test_nothing_at_all_ends_a_chunk_but_its_size() -> None:
    for sequence in (*SEQUENCES, END_OF_DATA):
        for sent in bodies(sequence) or [b"first" + sequence + SMUGGLED]:
            expected = in_one_chunk([sent])
            assert expected[0].endswith(SMUGGLED)
            assert not BARE.search(expected[0]), sequence
            for pieces in cuts(sent, but=TAIL):
                assert in_one_chunk(pieces) == expected, pieces
                assert in_chunks(pieces) == expected, pieces


@pytest.mark.parametrize(("before", "behind"), ENDS, ids=repr)
def test_what_stands_around_the_end_does_not_hide_it(before: bytes, behind: bytes) -> None:
    for pieces in cuts(b"first" + before + b".\r\n" + behind + SMUGGLED):
        reader, rest = BodyReader(), b""
        for piece in pieces:
            if reader.done:
                rest += piece
            else:
                reader.feed(piece)
                rest += reader.rest
        assert rest == behind + SMUGGLED, pieces


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
        found |= {by_data([sent + b".\r\n"]), in_one_chunk([sent])}
        found.add(by_data([sent.replace(b"\r\n.", b"\r\n..") + b".\r\n"]))
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
def test_the_models_would_fall_for_what_fooled_the_servers(
    receiver: Receiver, sequences: list[bytes]
) -> None:
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
