"""A body that was plain on the way in goes out as it is: the same bytes as with stuffing, over any split."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zonerelay.smtp.client.stuffing import DotStuffer, stuffed
from zonerelay.smtp.server.line_ends import BodyReader

WIRE = st.text(alphabet="\r\n.x\x00", max_size=30).map(str.encode)


def read(wire: bytes, size: int) -> tuple[list[bytes], BodyReader]:
    reader = BodyReader()
    pieces = []
    for at in range(0, len(wire), size):
        pieces.append(reader.feed(wire[at : at + size]))
        if reader.done:
            break
    return pieces, reader


@settings(max_examples=150, deadline=None)
@given(body=WIRE, size=st.integers(1, 10))
def test_a_plain_body_needs_no_stuffing(body: bytes, size: int) -> None:
    pieces, reader = read(body + b"\r\n.\r\n", size)
    if not reader.is_plain:
        return
    plain, stuffer = DotStuffer(plain=True), DotStuffer()
    sent = b"".join([*map(plain.feed, pieces), plain.finish()])
    assert sent == b"".join([*map(stuffer.feed, pieces), stuffer.finish()])
    assert sent == stuffed(b"".join(pieces), plain=True)


def test_what_needs_stuffing_is_not_plain() -> None:
    for wire in (
        b"..\r\n.\r\n",
        b"a\r\n..b\r\n.\r\n",
        b"a\n.b\r\n.\r\n",
        b"a\rb\r\n.\r\n",
        b"a\nb\r\n.\r\n",
        b"\0\r\n.\r\n",
    ):
        for size in range(1, len(wire) + 1):
            _, reader = read(wire, size)
            assert reader.done
            assert not reader.is_plain, (wire, size)
    for wire in (b".\r\n", b"a\r\n.\r\n", b"a.\r\n\r\n.\r\n"):
        for size in range(1, len(wire) + 1):
            assert read(wire, size)[1].is_plain, (wire, size)
