"""Message bodies in BDAT.

Invariants: only a chunk's size ends it, and what is behind it comes back as it is; the same body comes out of
any cut into chunks and pieces, with CRLF line ends only, and bare ones counted as in DATA.
"""

from tests.fuzz.targets.bodies import CRLF, normalized
from tests.fuzz.targets.commands import refusal
from tests.support.feeding import cuttings, in_pieces
from zonerelay.smtp.client.stuffing import stuffed
from zonerelay.smtp.server.line_ends import ChunkReader, parse_bdat
from zonerelay.smtp.server.paths import CommandError

COMMAND = b"BDAT 1\r\n"


def bdat(data: bytes) -> None:
    """A first line is an argument of BDAT; the rest is a body in chunks, each with a command behind it."""
    argument, _, text = data.partition(b"\n")
    _argument(argument.decode("latin-1"))
    clean = normalized(text)
    expected = clean if clean.endswith(CRLF) or not clean else clean + CRLF
    crlf = text.count(CRLF)
    for chunks in cuttings(text):
        reader, out = ChunkReader(), b""
        for number, chunk in enumerate(chunks or [b""]):
            out += _read_chunk(reader, chunk, last=number >= len(chunks) - 1)
        assert out == expected
        assert reader.done
        assert (reader.bare_lf, reader.bare_cr) == (text.count(b"\n") - crlf, text.count(b"\r") - crlf)
        assert reader.has_bare is bool(reader.bare_lf or reader.bare_cr)
        if reader.is_plain:
            assert stuffed(out, plain=True) == stuffed(out, plain=False)


def _argument(text: str) -> None:
    try:
        size, _ = parse_bdat(text)
    except CommandError as error:
        refusal(error.reply)
        return
    assert 0 <= size < 10**20


def _read_chunk(reader: ChunkReader, chunk: bytes, *, last: bool) -> bytes:
    reader.begin(len(chunk), last)
    out = b""
    for piece in in_pieces(chunk + COMMAND):
        if reader.chunk_done:
            break
        out += reader.feed(piece)
    assert reader.chunk_done
    assert COMMAND.startswith(reader.rest)
    return out
