"""The relaxed body hash (RFC 6376 3.4.4): the same as dkimpy's, however the body is cut."""

from __future__ import annotations

import base64
import hashlib
import tracemalloc
from itertools import pairwise

import pytest
from dkim.canonicalization import Relaxed
from hypothesis import given, settings
from hypothesis import strategies as st

from zonerelay.message.dkim.signature import RelaxedBody, single_spaces

EMPTY = "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="  # RFC 6376 3.4.4

CASES = [
    ("the empty body", b"", b""),
    ("one empty line", b"\r\n", b""),
    ("empty lines only", b"\r\n\r\n\r\n", b""),
    ("blanks only, and no line end", b" \t ", b""),
    ("lines of blanks only", b" \r\n\t\r\n \t", b""),
    ("the example of RFC 6376 3.4.5", b" C \r\nD \t E\r\n\r\n\r\n", b" C\r\nD E\r\n"),
    ("no final line end", b"text", b"text\r\n"),
    ("blanks at the end, and no line end", b"text \t", b"text\r\n"),
    ("empty lines within", b"a\r\n\r\n\r\nb\r\n", b"a\r\n\r\n\r\nb\r\n"),
    ("lines of blanks within", b"a\r\n \t\r\n\t\r\nb\r\n", b"a\r\n\r\n\r\nb\r\n"),
    ("lines of blanks at the end", b"a\r\n  \r\n \r\n", b"a\r\n"),
    ("a run of blanks of every kind", b"a \t \t b\r\n", b"a b\r\n"),
    ("a blank before the first word", b"  \ta\r\n", b" a\r\n"),
    ("an indented line after empty ones", b"a\r\n\r\n  b\r\n", b"a\r\n\r\n b\r\n"),
    ("other white space is text", b"a\x0b\x0c \xa0\r\n\x0c\r\n", b"a\x0b\x0c \xa0\r\n\x0c\r\n"),
    ("a long run of blanks", b"a" + b" " * 1000 + b"b\r\n", b"a b\r\n"),
]


def base64_sha256(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def digest(*pieces: bytes) -> str:
    body = RelaxedBody()
    for piece in pieces:
        body.feed(piece)
    return body.digest()


@pytest.mark.parametrize(("why", "body", "canonical"), CASES, ids=[case[0] for case in CASES])
def test_the_canonical_body_is_hashed(why: str, body: bytes, canonical: bytes) -> None:
    expected = base64_sha256(canonical)
    assert digest(body) == expected
    assert digest(*(body[at : at + 1] for at in range(len(body)))) == expected
    for at in range(min(len(body), 64)):
        assert digest(body[:at], body[at:]) == expected


def test_the_empty_body_has_the_hash_that_the_rfc_gives() -> None:
    assert digest() == digest(b"") == digest(b"\r\n") == EMPTY


def test_the_hash_may_be_asked_for_in_between() -> None:
    body = RelaxedBody()
    body.feed(b"a \r\n\r")
    assert body.digest() == base64_sha256(b"a\r\n")
    body.feed(b"\n b")
    assert body.digest() == base64_sha256(b"a\r\n\r\n b\r\n")


LINE = st.text(alphabet="ab \t\x0b\xa0", max_size=8).map(lambda text: text.encode("latin-1"))
BODIES = st.lists(LINE | st.just(b" " * 40), max_size=12).map(b"\r\n".join)


@settings(max_examples=100, deadline=None)
@given(body=BODIES, cuts=st.lists(st.integers(0, 120), max_size=8))
def test_it_is_what_dkimpy_hashes(body: bytes, cuts: list[int]) -> None:
    """dkimpy keeps blanks at the end of a body that lacks its last line end; none is sent like that."""
    sent = body if body.endswith(b"\r\n") or not body else body + b"\r\n"
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[begin:end] for begin, end in pairwise(places)]
    assert digest(*pieces) == base64_sha256(Relaxed.canonicalize_body(sent))


def test_empty_lines_that_are_kept_back_take_no_memory() -> None:
    lines = b"\r\n" * 32_000
    body = RelaxedBody()
    body.feed(b"a\r\n")
    tracemalloc.start()
    try:
        for _ in range(100):
            body.feed(lines)
        body.feed(b"b")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    assert body.digest() == base64_sha256(b"a\r\n" + lines * 100 + b"b\r\n")


def test_blanks_without_end_are_one_space() -> None:
    assert single_spaces(b"a" + b" \t" * 100_000 + b"b") == b"a b"
    assert digest(*[b" " * 1000] * 100, b"a") == base64_sha256(b" a\r\n")
