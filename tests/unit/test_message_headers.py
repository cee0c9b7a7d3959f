from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.feeding import cuts
from zonerelay.message.header.headers import (
    EMPTY_LINE,
    MAILBOX_LINE,
    MAX_METADATA,
    Fields,
    Header,
    HeaderScanner,
    HeaderTooLargeError,
)


def scan(pieces: list[bytes], max_size: int = 10_000) -> Header:
    return held(HeaderScanner(max_size), pieces)[0]


def held(scanner: HeaderScanner, pieces: list[bytes]) -> tuple[Header, bytes]:
    """The header, and all that the store is given: what the scanner holds and what came behind it."""
    rest = b""
    for piece in pieces:
        if scanner.header is None:
            scanner.feed(piece)
        else:
            rest += piece
    header = scanner.finish()
    return header, bytes(scanner.held) + rest


SUBJECT = (("Subject", "x"),)

TABLE: list[tuple[bytes, Fields, bytes, str]] = [
    (b"Subject: x\r\n\r\nbody\r\n", SUBJECT, b"", "the usual"),
    (b"Subject: x\r\n", SUBJECT, b"", "a header and no body"),
    (b"Subject:x\r\n\r\n", SUBJECT, b"", "no blank behind the colon"),
    (b"Subject \t: \tx\r\n\r\n", SUBJECT, b"", "blanks before the colon (RFC 5322 4.5)"),
    (b"Subject: x\r\nA: b\r\n c\r\n\td\r\n\r\n", (*SUBJECT, ("A", "b c d")), b"", "folded"),
    (b"A:\r\n b\r\n\r\n", (("A", "b"),), b"", "folded before the first word"),
    (b"Subject:\r\n\r\n", (("Subject", ""),), b"", "an empty field"),
    (b"A: \xc3\xa9\r\nB: \xff\r\n\r\n", (("A", "é"), ("B", "\ufffd")), b"", "UTF-8 and what is not"),
    (
        b"A: x\x00\x1b[2J\x7fy\r\n\r\n",
        (("A", "x\ufffd\ufffd[2J\ufffdy"),),
        b"",
        "controls are shown as unknown in metadata",
    ),
    (b"\r\nbody\r\n", (), b"", "an empty header: the empty line is there"),
    (b"body\r\n", (), EMPTY_LINE, "no header at all"),
    (b" body: x\r\n\r\n", (), EMPTY_LINE, "a first line that would continue our field"),
    (b"", (), EMPTY_LINE, "an empty message"),
    (b": x\r\n\r\n", (), EMPTY_LINE, "a field without a name"),
    (b"two words: x\r\n\r\n", (), EMPTY_LINE, "a name with a blank in it"),
    (b"From a@b Mon Nov 20\r\nSubject: x\r\n\r\n", SUBJECT, MAILBOX_LINE, "an mbox line"),
    (b">From a@b 10:00:00\r\nSubject: x\r\n\r\n", SUBJECT, MAILBOX_LINE, "a quoted mbox line"),
    (
        b"Subject: x\r\nhello there\r\nDate: no\r\n\r\n",
        SUBJECT,
        b"",
        "fields behind a stray line do not count",
    ),
    (b"Subject: x\r\n..\r\n\r\n", SUBJECT, b"", "a stray line of dots"),
]


@pytest.mark.parametrize(("message", "fields", "lead", "reason"), TABLE, ids=[row[3] for row in TABLE])
def test_header_is_the_same_in_every_cut(message: bytes, fields: Fields, lead: bytes, reason: str) -> None:
    for pieces in cuts(message):
        header = scan(pieces)
        assert (header.fields, header.lead) == (fields, lead), (reason, pieces)


STRAY: list[tuple[bytes, bytes]] = [
    (b"A: b\r\nstray\r\nC: d\r\n\r\nbody\r\n", b"A: b\r\n\r\nstray\r\nC: d\r\n\r\nbody\r\n"),
    (b"A: b\r\nstray\r\n", b"A: b\r\n\r\nstray\r\n"),
    (b"A: b\r\n c\r\n: d\r\n\r\n", b"A: b\r\n c\r\n\r\n: d\r\n\r\n"),
    (b"From a b\r\nA: b\r\nC d: e\r\n\r\n", b"From a b\r\nA: b\r\n\r\nC d: e\r\n\r\n"),
    (b"From a b\r\n c\r\n\r\n", b"From a b\r\n c\r\n\r\n"),
    (b"A: b\r\nC\xe9: d\r\n\r\n", b"A: b\r\n\r\nC\xe9: d\r\n\r\n"),
    (b"A: b\r\nC\r\n : d\r\n\r\n", b"A: b\r\nC\r\n : d\r\n\r\n"),
    (b"A: b\r\n \t\r\nC: d\r\n\r\n", b"A: b\r\n \t\r\nC: d\r\n\r\n"),
]


@pytest.mark.parametrize(("message", "stored"), STRAY)
def test_an_empty_line_comes_before_a_line_that_is_no_field(message: bytes, stored: bytes) -> None:
    for pieces in cuts(message):
        scanner = HeaderScanner(10_000)
        header, found = held(scanner, pieces)
        assert found == stored
        assert not header.controls
        assert bytes(scanner.held)[: scanner.size].count(b"\r\n\r\n") == 0


CLOUDED = [
    (b"Fr\x00om: a\r\n\r\n", b"From: a\r\n\r\n"),
    (b"A: b\r\n\x00From: c\r\n\r\n\x00", b"A: b\r\nFrom: c\r\n\r\n\x00"),
    (b"A: b\r\n\x7fFrom \x01\t: c\x01\r\n\r\n", b"A: b\r\nFrom \t: c\x01\r\n\r\n"),
    (b"A: \x00b\r\n\x00\r\nC: d\r\n\r\n", b"A: b\r\n\r\nC: d\r\n\r\n"),
    (b"A: b\r\n\x00 c\r\n\r\n", b"A: b\r\n c\r\n\r\n"),
    (b"A: b\r\n\x00stray\r\nC: d\r\n\r\n", b"A: b\r\n\r\nstray\r\nC: d\r\n\r\n"),
    (b"\x00\x00A\x00: b\r\n", b"A: b\r\n"),
    (b"A: b\r\nC\x0b: d\r\nE\x0c: f\r\n\r\n", b"A: b\r\nC: d\r\nE: f\r\n\r\n"),
]
CLEAR = [
    b"A: \x01\x1b$B\x7f\r\n\r\n\x00",
    b"A: b\r\nstray\r\n\x00: c\r\n\r\n",
    b"\x1b$B and: c\r\n\r\n",
    b"\x00" * 3000 + b": x\r\n\r\n",
    b"A: b\r\n\x01 and: c\r\n\r\n",
]


@pytest.mark.parametrize(("message", "left"), CLOUDED)
def test_control_characters_that_hide_a_field_are_seen_and_removed(message: bytes, left: bytes) -> None:
    for pieces in cuts(message):
        assert scan(pieces).controls, pieces
        header, found = held(HeaderScanner(10_000, removes_controls=True), pieces)
        assert found == left, pieces
        assert not header.controls
        assert header.fields == scan([left]).fields


@pytest.mark.parametrize("message", CLEAR)
def test_control_characters_that_hide_nothing_stay(message: bytes) -> None:
    for pieces in cuts(message) if len(message) < 100 else [[message]]:
        assert not scan(pieces).controls, pieces


@pytest.mark.parametrize("unit", [b"\x01", b"\x00", b"a\x01 ", b"a\x01\r\n", b"\x00\r\n", b"a\x01: \r\n"])
def test_control_characters_cost_little(unit: bytes) -> None:
    text = b"A: b\r\n" + unit * (1_000_000 // len(unit)) + b"\r\n\r\n"
    for removes in (False, True):
        began = time.process_time()
        pieces = [text[at : at + 65536] for at in range(0, len(text), 65536)]
        held(HeaderScanner(2_000_000, removes_controls=removes), pieces)
        assert time.process_time() - began < 2.0


def test_names_are_found_in_any_case_and_received_fields_counted() -> None:
    header = scan(
        [b"RECEIVED: a\r\nreceived: b\r\nReceived-SPF: c\r\nDATE: d\r\nmessage-ID: e\r\n\r\nDate: body\r\n"]
    )
    assert header.received == 2
    assert "date" in header.names
    assert "message-id" in header.names
    assert "from" not in header.names


def test_header_beyond_the_limit_is_refused() -> None:
    for pieces in ([b"A: " + b"x" * 2000 + b"\r\n\r\n"], [b"A: b\r\n"] * 200, [b"A: ", *[b"x" * 100] * 20]):
        with pytest.raises(HeaderTooLargeError):
            scan(pieces, max_size=1000)


def test_limit_counts_the_header_not_the_body() -> None:
    assert scan([b"Subject: x\r\n\r\n" + b"y" * 5000], max_size=1000).fields == SUBJECT


def test_header_that_breaks_off_before_the_limit_ends_there() -> None:
    """A body that began without an empty line is no reason to refuse the message."""
    message = b"Subject: x\r\nhello there\r\n" + b"and so on\r\n" * 500
    assert scan([message], max_size=1000).fields == SUBJECT
    assert scan([message[i : i + 100] for i in range(0, len(message), 100)], max_size=1000).fields == SUBJECT


def test_a_body_of_one_endless_line_is_no_header() -> None:
    scanner = HeaderScanner(100_000)
    scanner.feed(b"x" * 5000)
    assert scanner.header == Header(lead=EMPTY_LINE)


def test_metadata_is_capped_but_all_fields_count() -> None:
    header = scan([b"Received: " + b"x" * 1000 + b"\r\n"] * 60 + [b"Date: now\r\n\r\n"], max_size=100_000)
    assert sum(len(name) + len(value) for name, value in header.fields) <= MAX_METADATA
    assert header.received == 60
    assert "date" in header.names


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from([b"A: b", b"\r\n", b" ", b"\t", b":", b"x", b"From ", b"\x00", b"\xe9"]), max_size=25
    ),
    data=st.data(),
)
def test_cutting_changes_nothing(parts: list[bytes], data: st.DataObject) -> None:
    message = b"".join(parts)
    at = data.draw(st.integers(0, len(message)))
    # Pieces never end between CR and LF: BodyReader holds a CR back.
    if message[at - 1 : at + 1] == b"\r\n":
        at -= 1
    assert scan([message[:at], message[at:]]) == scan([message])
