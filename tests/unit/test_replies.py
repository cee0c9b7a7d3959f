"""Replies of peers, fed whole, halved and byte by byte. Whatever comes, it is a reply or a PeerError."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.model.reply import Reply
from zonerelay.smtp.client.replies import (
    MAX_BACKLOG,
    MAX_LINE,
    MAX_REPLY,
    MAX_SKIPPED,
    PeerError,
    ReplyParser,
    printable,
)


def splits(data: bytes) -> Iterator[list[bytes]]:
    yield [data]
    for at in range(1, len(data)):
        yield [data[:at], data[at:]]
    yield [data[at : at + 1] for at in range(len(data))]


def parse(pieces: list[bytes]) -> list[Reply]:
    parser, replies = ReplyParser(), []
    for piece in pieces:
        parser.feed(piece)
        while (reply := parser.next_reply()) is not None:
            replies.append(reply)
    return replies


@pytest.mark.parametrize(
    ("raw", "expected", "why"),
    [
        (b"250 2.1.0 Ok\r\n", Reply(250, "1.0", "Ok"), "the usual"),
        (b"250 Ok\r\n", Reply(250, "", "Ok"), "no enhanced code"),
        (b"250\r\n", Reply(250, "", ""), "no text at all"),
        (b"250 \r\n", Reply(250, "", ""), "an empty text"),
        (b"250 2.1.0\r\n", Reply(250, "1.0", ""), "only codes"),
        (b"550 5.1.1 no\n", Reply(550, "1.1", "no"), "bare LF from a sloppy server"),
        (b"550 4.1.1 no\r\n", Reply(550, "", "4.1.1 no"), "the class contradicts the code"),
        (b"550 5.1.1234 no\r\n", Reply(550, "", "5.1.1234 no"), "too many digits for a code"),
        (b"550 5.7.26 no\r\n", Reply(550, "7.26", "no"), "two digits"),
        (b"354 3.0.0 go\r\n", Reply(354, "", "3.0.0 go"), "there is no class 3"),
        (b"550-5.1.1 a\r\n550-5.1.1 b\r\n550 5.1.1 c\r\n", Reply(550, "1.1", "a\nb\nc"), "code on each line"),
        (b"550-5.1.1 a\r\n550 b\r\n", Reply(550, "1.1", "a\nb"), "code on the first line only"),
        (b"250-a\r\n250-\r\n250 c\r\n", Reply(250, "", "a\n\nc"), "an empty line in between"),
        (b"250-a\r\n550 b\r\n", Reply(550, "", "a\nb"), "the last line's code counts"),
        (b"550 5.1.1 gr\xc3\xbc\xc3\x9fe \xff\r\n", Reply(550, "1.1", "grüße \ufffd"), "UTF-8 and not"),
        (b"550 a\x1b[31m\x00\x07\tb\r\n", Reply(550, "", "a?[31m?? b"), "control characters"),
        (b"550 \xe2\x80\xaeevil\r\n", Reply(550, "", "?evil"), "text direction override"),
    ],
)
def test_reply_is_understood_however_it_arrives(raw: bytes, expected: Reply, why: str) -> None:
    for pieces in splits(raw):
        assert parse(pieces) == [expected], why


def test_pipelined_replies_come_in_order() -> None:
    raw = b"250 2.1.0 a\r\n550-5.1.1 b\r\n550 5.1.1 b\r\n354 c\r\n"
    for pieces in splits(raw):
        assert [reply.code for reply in parse(pieces)] == [250, 550, 354]


@pytest.mark.parametrize(
    "junk",
    [
        b"\r\n",
        b"\n",
        b"hello\r\n",
        b"25 ok\r\n",
        b"2500 ok\r\n",
        b"150 x\r\n",
        b"650 x\r\n",
        b"\xff\r\n",
        b"\0\0\r\n",
        b" 250 no code\r\n",
        b"a\r\n\r\nb\n",
    ],
)
def test_a_line_without_a_code_is_skipped_wherever_it_is(junk: bytes) -> None:
    for pieces in splits(junk + b"250-a\r\n" + junk + b"250 b\r\n" + junk + b"550 c\r\n"):
        assert parse(pieces) == [Reply(250, "", "a\nb"), Reply(550, "", "c")]
    parser = ReplyParser()
    parser.feed(b"250 a\r\n" + junk)
    assert parser.next_reply() == Reply(250, "", "a")
    assert not parser.has_input
    assert parser.skipped


@pytest.mark.parametrize("reads", [True, False])
def test_lines_to_skip_are_bounded_in_number_and_octets(reads: bool) -> None:
    for junk, most in ((b"\r\n", MAX_SKIPPED), (b"x" * (MAX_LINE - 1) + b"\n", MAX_REPLY // MAX_LINE)):
        parser = ReplyParser()
        for _ in range(most):
            parser.feed(junk)
            assert not (parser.has_input if reads else parser.next_reply())
        parser.feed(junk)
        assert parser.has_input or junk != b"\r\n"
        with pytest.raises(PeerError):
            parser.next_reply()
    parser = ReplyParser()
    for _ in range(5):  # counted anew for each reply
        parser.feed(b"\r\n" * MAX_SKIPPED + b"250 ok\r\n")
        assert parser.next_reply() == Reply(250, "", "ok")


@pytest.mark.parametrize("raw", [b"250ok", b"250\tok", b"\0\x00250 ok", b"250_ok", b"250 ok\r"])
def test_a_code_is_seen_in_odd_forms(raw: bytes) -> None:
    for pieces in splits(raw + b"\r\n"):
        [reply] = parse(pieces)
        assert (reply.code, reply.text.strip(" _")) == (250, "ok")


def test_a_long_line_is_cut_and_one_without_an_end_is_an_error() -> None:
    parser = ReplyParser()
    parser.feed(b"250 " + b"x" * 2 * MAX_LINE)
    assert parser.next_reply() is None
    parser.feed(b"\r\n")
    assert parser.next_reply() == Reply(250, "", "x" * MAX_LINE)
    parser.feed(b"250 " + b"x" * MAX_REPLY)
    with pytest.raises(PeerError):
        parser.next_reply()


def test_reply_without_an_end_is_cut_off() -> None:
    with pytest.raises(PeerError):
        parse([b"250-\r\n"] * (MAX_REPLY // 6 + 1))
    assert parse([b"250-\r\n"] * (MAX_REPLY // 6)) == []


def test_input_that_nobody_reads_is_bounded() -> None:
    parser = ReplyParser()
    for _ in range(10):
        parser.feed(b"x" * MAX_BACKLOG)
    assert len(parser._buffer) <= 2 * MAX_BACKLOG
    with pytest.raises(PeerError):
        parser.next_reply()


def test_a_flood_of_tiny_lines_is_parsed_in_linear_time() -> None:
    parser = ReplyParser()
    parser.feed(b"250 \r\n" * 20_000)
    count = 0
    while parser.next_reply() is not None:
        count += 1
    assert count == 20_000


def test_unread_input_is_visible() -> None:
    parser = ReplyParser()
    assert not parser.has_input
    parser.feed(b"250 ok\r\n4")
    assert parser.next_reply() is not None
    assert parser.has_input
    parser.feed(b"21-bye\r\n")
    assert parser.next_reply() is None
    assert parser.has_input
    parser.feed(b"421 bye\r\n")
    assert parser.next_reply() is not None
    assert not parser.has_input


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_any_bytes_are_a_reply_or_a_peer_error(pieces: list[bytes]) -> None:
    try:
        replies = parse(pieces)
    except PeerError as error:
        replies = [Reply(451, "", str(error))]
    for reply in replies:
        assert 200 <= reply.code <= 599
        assert all(line.isprintable() for line in reply.text.split("\n"))


@given(st.binary(max_size=200), st.integers(0, 200))
def test_a_split_changes_nothing(data: bytes, at: int) -> None:
    def attempt(pieces: list[bytes]) -> list[Reply] | None:
        try:
            return parse(pieces)
        except PeerError:
            return None

    assert attempt([data]) == attempt([data[:at], data[at:]])


def test_text_for_people_has_no_line_breaks() -> None:
    assert printable("a\r\nb\u2028c\x85d") == "a  b c d"
