"""Fields come and go; every other octet stays."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zonerelay.message.header.address_fields import edit_header
from zonerelay.message.header.headers import parse_header

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
    assert parse_header(edited).fields == (("X-Long", value),)


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
    header = parse_header(edited)
    assert [name for name, _ in header.fields] == ["X-Note", "From"]
    assert edited.endswith(b"\r\nFrom: a@b\r\n")
