"""Header fields of a message: read, written by us, changed for operators, and whose they say that it is."""

import re
import time
from email import message_from_bytes, policy
from email.utils import parsedate_to_datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import messages
from tests.support.feeding import cuts
from zonerelay.config.credentials.file import User
from zonerelay.config.settings import KB, ListenerSettings
from zonerelay.inbound.access.networks import Client
from zonerelay.inbound.state.client_state import ClientState, grant_table
from zonerelay.message import header as headers
from zonerelay.message.header import EMPTY_LINE, Fields, Header, HeaderScanner, authors, edit_header
from zonerelay.model.envelope import Envelope, Mailbox, MessageId, Origin, Recipient


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
    (b"From a@b Mon Nov 20\r\nSubject: x\r\n\r\n", SUBJECT, headers.MAILBOX_LINE, "an mbox line"),
    (b">From a@b 10:00:00\r\nSubject: x\r\n\r\n", SUBJECT, headers.MAILBOX_LINE, "a quoted mbox line"),
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
        with pytest.raises(headers.HeaderTooLargeError):
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
    assert sum(len(name) + len(value) for name, value in header.fields) <= headers.MAX_METADATA
    assert header.received == 60
    assert "date" in header.names


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from([b"A: b", b"\r\n", b" ", b"\t", b":", b"x", b"From ", b"\x00", b"\xe9"]), max_size=25
    )
)
def test_cutting_changes_nothing(parts: list[bytes]) -> None:
    messages.headers(b"".join(parts))


COMPLETE = Header(names=frozenset({"date", "from", "message-id"}))


def envelope(
    *recipients: str,
    helo: str = "client.example.org",
    address: str = "192.0.2.1",
    protocol: str = "ESMTP",
    utf8: bool = False,
) -> Envelope:
    return Envelope(
        id=MessageId("18bc8f3a12340000"),
        sender=Mailbox("a@example.org"),
        recipients=tuple(Recipient(address=Mailbox(r)) for r in recipients or ("b@example.com",)),
        created=1_700_000_000.0,
        smtputf8=utf8,
        origin=Origin(client_address=address, client_port=4711, helo=helo, protocol=protocol),
    )


def fields(of: Envelope, header: Header = COMPLETE) -> bytes:
    return headers.trace_fields(of, header, hostname="relay.example.org")


def test_received_names_client_queue_id_and_the_only_recipient() -> None:
    assert fields(envelope()) == (
        b"Received: from client.example.org ([192.0.2.1])\r\n"
        b"\tby relay.example.org with ESMTP id 18bc8f3a12340000\r\n"
        b"\tfor <b@example.com>;\r\n"
        b"\tTue, 14 Nov 2023 22:13:20 +0000\r\n"
    )


def test_recipients_are_not_named_when_there_are_several() -> None:
    assert b"example.com" not in fields(envelope("b@example.com", "c@example.com"))


def test_ipv6_client_is_tagged_and_a_local_one_has_no_address() -> None:
    assert b"([IPv6:2001:db8::1])" in fields(envelope(address="2001:db8::1"))
    assert b"(local)" in fields(envelope(address=""))


@pytest.mark.parametrize(
    "helo",
    [
        "x\r\nBcc: evil@example.org",
        "a) (b",
        'x" <y>; z',
        "bücher.example",
        "\x00\x1b[2J",
        "x" * 5000,
        "a,b=c\\d",
    ],
)
def test_ehlo_name_cannot_leave_its_place(helo: str) -> None:
    text = fields(envelope(helo=helo))
    assert re.fullmatch(
        rb"Received: from [A-Za-z0-9.:_?\[\]-]{1,255} \(\[192\.0\.2\.1\]\)\r\n\tby .*", text, re.DOTALL
    )
    assert text.count(b"\n") == 4
    assert text.isascii()


def test_utf8smtp_keeps_letters_and_nothing_else() -> None:
    text = fields(
        envelope("é@bücher.example", helo="bücher.\u202eexample(\n", protocol="UTF8SMTP", utf8=True)
    )
    assert text.decode().startswith("Received: from bücher.?example?? ([192.0.2.1])\r\n")
    assert "for <é@bücher.example>;" in text.decode()
    assert b"with UTF8SMTP id" in text


def test_missing_date_and_message_id_are_added_below_received() -> None:
    text = fields(envelope(), Header())
    message = message_from_bytes(text + b"\r\n", policy=policy.SMTP)
    assert message.keys() == ["Received", "Date", "From", "Message-ID"]
    assert message["Message-ID"] == "<18bc8f3a12340000@relay.example.org>"
    assert parsedate_to_datetime(str(message["Date"])).timestamp() == 1_700_000_000


def test_present_ones_are_left_alone() -> None:
    text = fields(envelope(), Header(names=frozenset({"date"})))
    assert b"\r\nDate:" not in text
    assert b"\r\nMessage-ID:" in text


def test_lead_comes_last() -> None:
    assert fields(envelope(), Header(lead=EMPTY_LINE)).endswith(b"@relay.example.org>\r\n\r\n")


@pytest.mark.parametrize("timestamp", [0.0, 951_827_696.9, 1_700_000_000.0, 4_102_444_799.0])
def test_date_is_rfc_5322(timestamp: float) -> None:
    text = headers.rfc5322_date(timestamp)
    assert parsedate_to_datetime(text).timestamp() == int(timestamp)
    assert re.fullmatch(r"[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d \+0000", text)


def test_no_line_is_longer_than_998() -> None:
    longest = "a" * 64 + "@" + "b" * 60 + (".c" * 90)
    for line in fields(envelope(longest, helo="h" * 600), Header()).split(b"\r\n"):
        assert len(line) <= 998


# Fields come and go; every other octet stays


BLOCK = (
    b"From: a@example.org\r\nX-Spam: yes\r\n\tvery much\r\n so\r\nSubject:  two  blanks \r\nx-spam : no\r\n"
)

REMOVALS: list[tuple[bytes, list[str], bytes, str]] = [
    (BLOCK, [], BLOCK, "nothing"),
    (BLOCK, ["X-Other"], BLOCK, "a name that is not there"),
    (BLOCK, ["x-sPAM"], b"From: a@example.org\r\nSubject:  two  blanks \r\n", "all of a name in any case"),
    (BLOCK, ["X-Spa", "X-Spam-", "Spam"], BLOCK, "names that are alike"),
    (BLOCK, ["From", "Subject", "X-Spam"], b"", "everything"),
    (b"A: b\r\nX: 1", ["X"], b"A: b\r\n", "a last line without its end"),
    (b"A: b\r\nX: 1", ["A"], b"X: 1", "before a last line without its end"),
    (b"\r\nX: 1\r\n", ["X"], b"\r\nX: 1\r\n", "an empty line ends the header"),
    (b"A: b\r\n\r\nX: 1\r\n", ["X"], b"A: b\r\n\r\nX: 1\r\n", "behind fields too"),
    (b"A: b\r\nhello there\r\nX: 1\r\n", ["X"], b"A: b\r\nhello there\r\nX: 1\r\n", "so does a stray line"),
    (b" X: 1\r\nX: 2\r\n", ["X"], b" X: 1\r\nX: 2\r\n", "a continuation of nothing"),
    (
        b"Mailbox-Line: From a\r\nX: 1\r\nA: b\r\n",
        ["X"],
        b"Mailbox-Line: From a\r\nA: b\r\n",
        "behind a lead",
    ),
    (b"X:\r\n 1\r\n\t\r\nA: b\r\n", ["X"], b"A: b\r\n", "a value that begins on the next line"),
    (b"A: \xff\x00\r\nX: \xe9\r\n", ["X"], b"A: \xff\x00\r\n", "bytes that are no text"),
    (b"A: b\rX: c\nX: d\r\n", ["X"], b"A: b\rX: c\nX: d\r\n", "bare line ends end no line"),
    (b"", ["X"], b"", "no header"),
]


@pytest.mark.parametrize(("block", "names", "expected", "reason"), REMOVALS, ids=[row[3] for row in REMOVALS])
def test_removing(block: bytes, names: list[str], expected: bytes, reason: str) -> None:
    assert edit_header(block, remove=names) == expected, reason


def test_added_fields_are_on_top_in_their_order() -> None:
    edited = edit_header(b"A: b\r\n", add=[("X-One", "1"), ("X-Two", "2")], remove=["A"])
    assert edited == b"X-One: 1\r\nX-Two: 2\r\n"
    assert edit_header(b"A: b\r\n", add=[("A", "c")]) == b"A: c\r\nA: b\r\n"
    assert edit_header(b"\r\n", add=[("A", "c")]) == b"A: c\r\n\r\n"
    assert edit_header(b"", add=[("A", "")]) == b"A:\r\n"


REPLACEMENTS: list[tuple[bytes, list[tuple[str, str]], bytes, str]] = [
    (
        BLOCK,
        [("X-Spam", "no")],
        b"From: a@example.org\r\nX-Spam: no\r\nSubject:  two  blanks \r\n",
        "the first of a name, with its continuations; the others go",
    ),
    (BLOCK, [("X-Other", "1")], BLOCK, "a name that is not there"),
    (BLOCK, [("Spam", "1"), ("X-Spam-", "1")], BLOCK, "names that are alike"),
    (b"X: 1\r\nx: 2\r\nX : 3\r\n", [("X", "4")], b"X: 4\r\n", "nothing else"),
    (b"A: b\r\nX: 1", [("X", "2")], b"A: b\r\nX: 2\r\n", "a last line without its end"),
    (b"X: 1\r\nY: 2\r\n", [("Y", "3"), ("X", "4")], b"X: 4\r\nY: 3\r\n", "each in its place"),
    (b"X: 1\r\n", [("X", "2"), ("x", "3")], b"x: 3\r\n", "twice: the last counts"),
    (b"A: b\r\nstray\r\nX: 1\r\n", [("X", "2")], b"A: b\r\nstray\r\nX: 1\r\n", "behind a stray line"),
    (b"A: \xff\r\nX: \xe9\r\nB: \x00\r\n", [("X", "2")], b"A: \xff\r\nX: 2\r\nB: \x00\r\n", "no text"),
    (b"X: 1\r\n", [("X", r"\1\g<0>")], b"X: \\1\\g<0>\r\n", "a value that looks like a pattern"),
]


@pytest.mark.parametrize(
    ("block", "replace", "expected", "reason"), REPLACEMENTS, ids=[row[3] for row in REPLACEMENTS]
)
def test_replacing(block: bytes, replace: list[tuple[str, str]], expected: bytes, reason: str) -> None:
    assert edit_header(block, replace=replace) == expected, reason


def test_fields_are_removed_first_and_added_last() -> None:
    edited = edit_header(BLOCK, add=[("X-Spam", "3")], replace=[("X-Spam", "2")], remove=["X-Spam"])
    assert edited == b"X-Spam: 3\r\nFrom: a@example.org\r\nSubject:  two  blanks \r\n"
    edited = edit_header(b"A: 1\r\n", add=[("A", "3")], replace=[("A", "2")])
    assert edited == b"A: 3\r\nA: 2\r\n"


def test_a_field_can_be_taken_out_and_put_on_top() -> None:
    assert edit_header(BLOCK, add=[("X-Spam", "no")], remove=["X-Spam"]) == (
        b"X-Spam: no\r\nFrom: a@example.org\r\nSubject:  two  blanks \r\n"
    )


@pytest.mark.parametrize(
    "value",
    [
        "a\r\nBcc: x@y",
        "a\nBcc: x@y",
        "a\rBcc: x@y",
        "a\r\n\r\nbody",
        "a\x0bb\x0cc\x1cd\x85e",
        " a \t b ",
        "   ",
    ],
)
def test_no_value_becomes_a_second_line_that_is_a_field(value: str) -> None:
    edited = edit_header(b"From: a@b\r\n", add=[("X-Note", value)])
    assert edited == f"X-Note: {' '.join(value.split())}".rstrip().encode() + b"\r\nFrom: a@b\r\n"


def test_long_values_are_folded_between_words() -> None:
    value = " ".join(["word"] * 199)
    edited = edit_header(b"", add=[("X-Long", value)])
    assert all(len(line) <= 78 for line in edited.split(b"\r\n"))
    assert headers.parse_header(edited).fields == (("X-Long", value),)


NAMES = st.sampled_from([b"A", b"a", b"X-Spam", b"x-spam", b"X-Spam2", b"Subject"])
VALUES = st.binary(max_size=20).map(lambda value: value.replace(b"\r", b"").replace(b"\n", b""))
FOLDED = st.lists(st.tuples(st.sampled_from([b" ", b"\t"]), VALUES), max_size=3)
FIELDS = st.lists(st.tuples(NAMES, st.sampled_from([b":", b" :", b"\t:"]), VALUES, FOLDED), max_size=8)


@settings(max_examples=100, deadline=None)
@given(fields=FIELDS, remove=st.lists(st.sampled_from(["a", "X-SPAM", "Subject", "Other"]), max_size=3))
def test_what_is_not_removed_keeps_every_octet(
    fields: list[tuple[bytes, bytes, bytes, list[tuple[bytes, bytes]]]], remove: list[str]
) -> None:
    def written(name: bytes, colon: bytes, value: bytes, folded: list[tuple[bytes, bytes]]) -> bytes:
        return name + colon + value + b"\r\n" + b"".join(blank + more + b"\r\n" for blank, more in folded)

    gone = {name.lower().encode() for name in remove}
    block = b"".join(written(*field) for field in fields)
    kept = b"".join(written(*field) for field in fields if field[0].lower() not in gone)
    assert edit_header(block, remove=remove) == kept
    assert edit_header(block, add=[("New", "field")], remove=remove) == b"New: field\r\n" + kept


@settings(max_examples=100, deadline=None)
@given(
    block=st.lists(
        st.sampled_from(
            [b"A: b", b"X: c", b"\r\n", b" ", b"\t", b":", b"x", b"From ", b"\x00", b"\r", b"\n"]
        ),
        max_size=25,
    ).map(b"".join)
)
def test_removing_only_ever_takes_away_whole_lines_and_twice_is_once(block: bytes) -> None:
    edited = edit_header(block, remove=["X"])
    assert edit_header(edited, remove=["X"]) == edited
    left = iter(re.findall(rb"(?s:.+?)(?:\r\n|\Z)", block))
    assert all(line in left for line in re.findall(rb"(?s:.+?)(?:\r\n|\Z)", edited))


@settings(max_examples=80, deadline=None)
@given(value=st.text(st.characters(min_codepoint=1, max_codepoint=126), max_size=400))
def test_an_added_value_reads_back_on_one_line(value: str) -> None:
    edited = edit_header(b"From: a@b\r\n", add=[("X-Note", value)])
    header = headers.parse_header(edited)
    assert [name for name, _ in header.fields] == ["X-Note", "From"]
    assert edited.endswith(b"\r\nFrom: a@b\r\n")


# Who writes as whom: a user who is bound to senders may not use another From field, however it is hidden


MAX_HEADER = 256 * KB


def may_write(header: bytes, *, whole: bool = True) -> bool:
    settings = ListenerSettings()
    standing = ClientState(settings, grant_table(settings), Client("", 0, may_relay=True), None)
    standing.logged_in(User("app", "", ("me@example.org",)))
    message = header + b"\r\n\r\nFrom: somebody@example.com\r\n"
    for pieces in [[message]] if whole else cuts(message):
        scanner = HeaderScanner(MAX_HEADER)
        for piece in pieces:
            if scanner.header is None:
                scanner.feed(piece)
        found = scanner.finish()
        allowed = standing.may_write_as(authors(found, bytes(scanner.held)))
        if not allowed:
            return False
    return True


MINE = [
    (b"From: me@example.org", "plain"),
    (b"FROM : Me <me@example.org>", "in capitals, a blank before the colon"),
    (b"From:\r\n\tme@example.org", "folded"),
    (b"From: me@example.org (boss@example.org)", "a comment is no address"),
    (b'From: "boss@example.org" <me@example.org>', "nor is a name"),
    (b"From: me@example.org <me@example.org>", "an address for a name, as WordPress writes"),
    (b"From: boss@example.org <me@example.org>", "whatever the name is"),
    (b"From: A (Foo, Inc) <me@example.org>", "a comma in a comment"),
    (b"From: Shop [Sales] <me@example.org>", "brackets in a name"),
    (b"From: J\xfcrgen <me@example.org>", "a name in Latin-1"),
    (b'From: "\x95\x5c" <me@example.org>', "a name in Shift JIS, whose last octet is a backslash"),
    (b"From: \x81\x40 <me@example.org>", "a name in GBK with an octet like @"),
    (b'From: "Me <me@example.org>', "a quote without an end"),
    (b'From: \x1b$B$"\x1b(B <me@example.org>', "a name in ISO-2022-JP"),
    (b"From: =?utf-8?q?Foo,_Inc?= <me@example.org>", "a comma in an encoded word"),
    (b"Subject: x\r\n from: boss@example.org", "a continuation is no field"),
    (b"Subject: x", "no author at all"),
    (b"From me@example.org Mon Jan  1\r\nFrom: me@example.org", "behind an mbox line"),
    (b"no header\r\nFrom: boss@example.org", "a body: we put an empty line before it"),
    (b"Subject: x\r\nstray\r\nFrom: boss@example.org", "behind a stray line: likewise"),
    (b"From x Mon Jan  1\r\nstray\r\nFrom: boss@example.org", "behind an mbox line and a stray one"),
]
OTHERS = [
    (b"From: boss@example.org", "plain"),
    (b"From: me@example.org, boss@example.org", "the second of two"),
    (b"From: me@example.org\r\nFrom: boss@example.org", "in a second field"),
    (b"From\t: boss@example.org", "a tab before the colon"),
    (b"From: all: boss@example.org;", "in a group"),
    (b"From: b\xf6ss@example.org", "not ASCII"),
    (b"From: b\xf6@example.com <me@example.org>, \xf6@example.com", "before the @"),
    (b"From: =?utf-8?q?,boss@example.org,?= <me@example.org>", "for those who split an encoded word"),
    (b'From: "a\\" <boss@example.org>, "b" <me@example.org>', "for those who know no quoted pairs"),
    (b'From: me@example.org, "boss <boss@example.org>', "behind a quote without an end"),
    (b"From: <me@example.org> <boss@example.org>", "without a comma"),
    (b"From: boss@example.org <me@example.org", "before a bracket without an end"),
    (b"From: me@example.org, boss", "without a domain"),
    (b"From: boss:;", "an empty group"),
    (b"From:", "nobody"),
    (b"Subject: x\x0bFrom: boss@example.org", "behind a vertical tab, for those to whom it ends a line"),
    (b"Subject: x\xe2\x80\xa8From: boss@example.org", "behind a line separator of Unicode"),
    (b"From: me@example.org\x01.evil.example", "for those who drop controls"),
    (b"Subject: x\r\nFrom\r\n : boss@example.org", "a fold before the colon"),
    (
        b"X: " + b"x" * headers.MAX_METADATA + b"\r\nFrom: boss@example.org",
        "behind more than is kept for people",
    ),
    (b"From: " + b"(" * 2000 + b"me@example.org", "more comments than anybody could read"),
    (b"From: " + b"me@example.org, " * 1000 + b"me@example.org", "more authors than anybody has"),
]


@pytest.mark.parametrize(("header", "why"), MINE, ids=[row[1] for row in MINE])
def test_a_user_writes_as_itself(header: bytes, why: str) -> None:
    assert may_write(header, whole=False), why


@pytest.mark.parametrize(("header", "why"), OTHERS, ids=[row[1] for row in OTHERS])
def test_a_user_does_not_write_as_somebody_else(header: bytes, why: str) -> None:
    assert not may_write(header), why
