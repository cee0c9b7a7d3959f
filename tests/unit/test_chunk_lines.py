"""What goes into chunks has CRLF line ends only and ends with one, over any split; nothing else changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zonerelay.smtp.client.stuffing import ChunkLines, as_chunk
from zonerelay.smtp.server.line_ends import crlf_only

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
    assert crlf_only(sent) == sent
    assert sent.endswith(b"\r\n")
    # Nothing but line ends was touched.
    assert sent.replace(b"\r\n", b"").replace(b" ", b"") == body.replace(b"\r", b"").replace(b"\n", b"")


@settings(max_examples=100, deadline=None)
@given(body=BODY.map(crlf_only), size=st.integers(1, 10))
def test_a_plain_body_goes_as_it_is(body: bytes, size: int) -> None:
    expected = body if body.endswith(b"\n") else body + b"\r\n"
    assert cut(body, size, plain=True) == expected
    assert cut(body, size, plain=False) == expected
    assert as_chunk(body, plain=True) == expected


@pytest.mark.parametrize("body", [b".\r\n", b"a\r\n.\r\nMAIL FROM:<x@y>\r\n", b"\r\n\0.\r\n", b"..\r\n"])
def test_dots_are_nobodys_framing_here(body: bytes) -> None:
    assert as_chunk(body, plain=False) == body
