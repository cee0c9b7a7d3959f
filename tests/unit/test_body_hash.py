"""The hash of a body that is arriving is the one that DKIM's verifiers compute of what is stored."""

from __future__ import annotations

import base64
import hashlib

import dkim
import pytest
from dkim.canonicalization import Relaxed
from hypothesis import given
from hypothesis import strategies as st

from tests.support.feeding import cuts
from zonerelay.message.dkim.signature import BodyHash
from zonerelay.message.header.headers import HeaderScanner

OURS = b"Received: from x\r\n\tby y;\r\nMessage-ID: <z>\r\n"

MESSAGES = [
    (b"Subject: x\r\n\r\nbody\r\n", b"body\r\n", "the usual"),
    (b"Subject: x\r\n\r\n\r\n\r\nbody \t x\r\n\r\n", b"\r\n\r\nbody \t x\r\n\r\n", "empty lines around it"),
    (b"Subject: x\r\n\r\nno line end", b"no line end", "a last line without its end"),
    (b"Subject: x\r\n", b"", "a header and no body"),
    (b"Subject: x\r\n\r\n", b"", "an empty body"),
    (b"\r\nbody\r\n", b"body\r\n", "an empty header"),
    (b"just text\r\n\r\nmore\r\n", b"just text\r\n\r\nmore\r\n", "no header: ours is all there is"),
    (b" first\r\n\r\nmore\r\n", b" first\r\n\r\nmore\r\n", "a first line that would continue our field"),
    (b"Subject: x\r\nstray line\r\n\r\nmore\r\n", b"stray line\r\n\r\nmore\r\n", "a header that breaks off"),
    (b"From a b\r\nSubject: x\r\n\r\nbody\r\n", b"body\r\n", "an mbox line"),
    (b"", b"", "nothing"),
]


def hash_of(body: bytes) -> str:
    """By dkimpy's canonicalization, of what a peer gets: a last line without its end is given one."""
    if body and not body.endswith(b"\r\n"):
        body += b"\r\n"
    return base64.b64encode(hashlib.sha256(Relaxed.canonicalize_body(body)).digest()).decode()


def arriving(pieces: list[bytes]) -> tuple[str, bytes]:
    """As the intake feeds it: the hash, and what would be stored."""
    scanner, body_hash = HeaderScanner(10_000), BodyHash()
    stored = OURS
    header = None
    for at, piece in enumerate(pieces):
        if header is not None:
            body_hash.feed(piece)
            stored += piece
            continue
        scanner.feed(piece)
        header = scanner.finish() if at + 1 == len(pieces) else scanner.header
        if header is not None:
            body_hash.feed(header.lead + bytes(scanner.held))
            stored += header.lead + bytes(scanner.held)
    return body_hash.digest(), stored


@pytest.mark.parametrize(("message", "body", "why"), MESSAGES, ids=[why for _, _, why in MESSAGES])
def test_it_is_that_of_the_body_however_the_message_is_cut(message: bytes, body: bytes, why: str) -> None:
    for pieces in cuts(message):
        assert arriving(pieces or [b""])[0] == hash_of(body), pieces


@given(
    st.lists(
        st.sampled_from([b"\r\n", b"Subject: x\r\n", b"a", b" ", b"\t", b": ", b"\r\n\r\n", b"line\r\n"]),
        min_size=1,
    )
)
def test_dkimpy_finds_the_same_body_in_what_is_stored(pieces: list[bytes]) -> None:
    found, stored = arriving(pieces)
    try:
        _, body = dkim.rfc822_parse(stored)
    except dkim.MessageFormatError:  # a line in the header that is none: it does not look further
        body = stored.partition(b"\r\n\r\n")[2]
    assert found == hash_of(body)
