"""Message bodies on the wire, in and out.

Invariants: what a plain model (split at CRLF, one dot off each line, bare line ends replaced) says of the
whole input is what comes out of any cut of it; only `<CR><LF>.<CR><LF>` ends a body; nothing that
comes out has a bare CR or LF; at most four octets are held back; what is stuffed comes back.
"""

import re
from dataclasses import dataclass

from tests.data.smuggling import END_OF_DATA
from tests.support.feeding import cuttings, in_pieces
from zonerelay.smtp.client.stuffing import DotStuffer, stuffed
from zonerelay.smtp.server.line_ends import BodyReader

CRLF = b"\r\n"


@dataclass(frozen=True)
class Read:
    body: bytes
    done: bool
    rest: bytes
    bare_lf: int
    bare_cr: int
    is_plain: bool


def body(data: bytes) -> None:
    for pieces in cuttings(data):
        found, unread = _read(pieces)
        no_bare_line_ends(found.body)
        if found.is_plain and found.done:
            assert stuffed(found.body, plain=True) == stuffed(found.body, plain=False)
        if found.done:
            assert found == _model(data)
            assert b"".join(pieces) == data[: len(data) - len(unread)] + unread
        else:
            assert END_OF_DATA not in CRLF + data
            whole = normalized(_unstuffed(CRLF + data)[len(CRLF) :])
            assert whole.startswith(found.body)
            assert len(CRLF + data) - len(found.body) <= 2 + len(END_OF_DATA) + data.count(b".")


def _read(pieces: list[bytes]) -> tuple[Read, bytes]:
    """What the reader made of the pieces up to the end of data, and the pieces it never saw."""
    reader, out = BodyReader(), bytearray()
    for number, piece in enumerate(pieces):
        out += reader.feed(piece)
        if reader.done:
            unread = b"".join(pieces[number + 1 :])
            break
    else:
        unread = b""
    assert reader.has_bare == (reader.bare_lf + reader.bare_cr > 0)
    rest = reader.rest + unread
    return Read(bytes(out), reader.done, rest, reader.bare_lf, reader.bare_cr, reader.is_plain), unread


def _model(data: bytes) -> Read:
    """What RFC 5321 4.5.2 and our rule about line ends make of a body that ends."""
    wire, _, rest = (CRLF + data).partition(END_OF_DATA)
    wire += CRLF
    crlf = wire.count(CRLF)
    bare_lf, bare_cr = wire.count(b"\n") - crlf, wire.count(b"\r") - crlf
    plain = not bare_lf and not bare_cr and b"\r\n." not in wire and b"\x00" not in wire
    text = normalized(_unstuffed(wire)[len(CRLF) :])
    return Read(text, True, rest, bare_lf, bare_cr, plain)


def _unstuffed(wire: bytes) -> bytes:
    first, *lines = wire.split(CRLF)
    return CRLF.join([first, *(line.removeprefix(b".") for line in lines)])


def normalized(text: bytes) -> bytes:
    """Bare LF is a line end, bare CR a blank."""
    return CRLF.join(line.replace(b"\r", b" ").replace(b"\n", CRLF) for line in text.split(CRLF))


def shielded(text: bytes) -> bytes:
    """What is sent: a dot behind NULs at the beginning of a line gets a space in front."""
    return CRLF.join(re.sub(rb"^(\x00+)\.", rb"\1 .", line) for line in normalized(text).split(CRLF))


def no_bare_line_ends(text: bytes) -> None:
    assert b"\n" not in text.replace(CRLF, b"")
    assert b"\r" not in text.replace(CRLF, b"")


def stuffing(data: bytes) -> None:
    for pieces in cuttings(data):
        stuffer = DotStuffer()
        wire = b"".join([stuffer.feed(piece) for piece in pieces]) + stuffer.finish()
        no_bare_line_ends(wire)
        _comes_back(wire, shielded(data))
    clean = shielded(data)
    _comes_back(stuffed(data, plain=False), clean)
    if clean != data or b"\r\n." in CRLF + data or b"\x00" in data:
        return
    assert stuffed(data, plain=True) == wire
    lines = DotStuffer(plain=True)
    assert b"".join([lines.feed(piece) for piece in in_pieces(data)]) + lines.finish() == wire


def _comes_back(wire: bytes, text: bytes) -> None:
    """A strict reader finds one body and nothing behind it: no second message, no command."""
    found, _ = _read([wire])
    assert found.done
    assert found.rest == b""
    assert not found.bare_lf
    assert not found.bare_cr
    assert found.body == (text if text.endswith(CRLF) or not text else text + CRLF)
