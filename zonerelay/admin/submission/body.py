"""Reads a JSON body incrementally, and moves its long strings to a temporary file. Long strings and uploaded
files are written to an unnamed temporary file; the rest stays in memory.

In the document that `finish` returns, a reference replaces each long string. A reference has a random part
that the client does not know, so it cannot be forged. At most `MAX_DOCUMENT` bytes and one chunk are in
memory, and at most `limit` bytes on disk until the reader is closed.
"""

import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import msgspec

from zonerelay.admin.problems import too_large
from zonerelay.message.compose import Base64Text

LONG = 64 * 1024
FEW = 1024
"""The size from which a string is long when the document is large."""
MAX_DOCUMENT = 2 * 1024 * 1024
WRITE = 256 * 1024
READ = 57 * 4096
"""A whole number of base64 lines of 57 bytes each."""
MAX_TEXT = 8 * 1024 * 1024
"""Bytes of a text or HTML, which is completely in memory when the message is composed."""

_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_OUTSIDE = re.compile(rb'[^"]*+')
_ESCAPE = re.compile(rb"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_HALF_ESCAPE = re.compile(
    rb"\\(?:u[0-9A-Fa-f]{0,3})?\Z|\\u[Dd][89ABab][0-9A-Fa-f]{2}(?:\\(?:u[0-9A-Fa-f]{0,3})?)?\Z"
)
_NO_TEXT = re.compile(
    rb"\\(?:(?!u[0-9A-Fa-f]{4}|[\"\\/bfnrt])"
    rb"|u[Dd][89ABab]..(?!\\u[Dd][C-Fc-f])|(?<!\\u[Dd][89ABab]..\\)u[Dd][C-Fc-f])"
)
_CONTROL = re.compile(rb"[\x00-\x1f]")
"""Characters that no JSON string may contain. `_NO_TEXT` has invalid escapes, including half surrogate
pairs.
"""


class StoredFile:
    """A part of a request body's temporary file: an uploaded file, or the raw content of a long string."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file = file
        self._start = start
        self._size = size

    def pieces(self) -> Iterator[bytes]:
        end = self._start + self._size
        for at in range(self._start, end, READ):
            yield os.pread(self._file.fileno(), min(READ, end - at), at)

    def text(self, pointer: str) -> str:
        """Decode the stored JSON string; `pointer` is the JSON pointer to it, for error messages. Raise
        ApiError or msgspec.DecodeError on failure.
        """
        if self._size > MAX_TEXT:
            raise too_large(f"a string exceeds {MAX_TEXT} bytes", pointer)
        return msgspec.json.decode(b'"' + b"".join(self.pieces()) + b'"', type=str)


class StoredBase64(Base64Text):
    """A base64 attachment whose long string is in the temporary file. PHP escapes the slashes in it, and .NET
    the plus signs.
    """

    def __init__(self, long: StoredFile, name: str) -> None:
        super().__init__(b"", name)
        self._long = long

    def _slices(self) -> Iterator[bytes]:
        """Yield the base64 text in chunks, without JSON escapes. Raise msgspec.DecodeError for invalid
        characters, as for a short string.
        """
        rest = b""
        for piece in self._long.pieces():
            text, rest = rest + piece, b""
            if b"\\" in text and (half := _HALF_ESCAPE.search(text)):
                text, rest = text[: half.start()], text[half.start() :]
            yield self._plain(text)
        if rest:
            yield self._plain(rest)

    def _plain(self, text: bytes) -> bytes:
        escaped = b"\\" in text
        if _CONTROL.search(text) or (escaped and _NO_TEXT.search(text)):
            raise msgspec.DecodeError(f"{self._name} contains bytes that are invalid in a JSON string")
        return _ESCAPE.sub(_unescaped, text) if escaped else text


def _unescaped(match: re.Match[bytes]) -> bytes:
    what = match[1]
    if len(what) > 1:
        return chr(int(what[1:], 16)).encode("utf-8", "replace")
    return b" " if what in b"nrt" else what


class JsonBody:
    """An incremental parser of a JSON body. Call `feed`, call `flush` in a thread while it is `full`, then
    `finish`. Close it when the message has been composed.
    """

    def __init__(self, limit: int, spool: Path) -> None:
        """Create a parser for the body of one request. The temporary file is created in the directory that
        contains the spool.
        """
        self._limit = limit
        self._spool = spool
        self._file: BinaryIO | None = None
        self._document = bytearray()
        self._string: bytearray | None = None  # the string that is being read
        self._rest = b""
        self._begun = -1  # the position in the file of the long string that is being read
        self._waiting = bytearray()
        self._written = self._size = 0

    @cached_property
    def _nonce(self) -> str:
        return secrets.token_hex(16)

    @property
    def full(self) -> bool:
        return len(self._waiting) >= WRITE

    @property
    def spills(self) -> bool:
        """Whether strings or files of the body have been moved to the temporary file."""
        return bool(self._waiting or self._written)

    def feed(self, piece: bytes) -> None:
        """Parse the next chunk of the body. Raise ApiError if a limit is exceeded."""
        self._count(len(piece))
        data, self._rest, at = self._rest + piece, b"", 0
        while at < len(data):
            at = self._outside(data, at) if self._string is None else self._inside(self._string, data, at)
        if len(self._document) > MAX_DOCUMENT:
            raise too_large(f"the body exceeds {MAX_DOCUMENT} bytes, not counting long strings")

    def _count(self, octets: int) -> None:
        self._size += octets
        if self._size > self._limit:
            raise too_large(f"the body exceeds {self._limit} bytes")

    def _outside(self, data: bytes, at: int) -> int:
        found = _OUTSIDE.match(data, at)
        assert found is not None
        self._document += found[0]
        if found.end() < len(data):
            self._string = bytearray()
        return found.end() + 1

    def _inside(self, string: bytearray, data: bytes, at: int) -> int:
        found = _STRING.match(data, at)
        assert found is not None
        end = found.end()
        string += found[0]
        ends = end < len(data) and data[end] == ord('"')
        if self._begun < 0 and len(string) > (LONG if len(self._document) < MAX_DOCUMENT // 4 else FEW):
            self._begun = self._written + len(self._waiting)
        if self._begun >= 0:
            self._waiting += string
            string.clear()
        if ends:
            if self._begun >= 0:
                size = self._written + len(self._waiting) - self._begun
                string += f"{self._nonce}:{self._begun}:{size}".encode()
            self._document += b'"' + string + b'"'
            self._string, self._begun = None, -1
            return end + 1
        self._rest = data[end:]  # a backslash; the next character is still missing
        return len(data)

    def begin_file(self) -> None:
        """Begin an uploaded file in the temporary file; `add` appends data to it until `end_file`. No string
        may be incomplete.
        """
        self._begun = self._written + len(self._waiting)

    def add(self, piece: bytes) -> None:
        """Append a chunk of data to the uploaded file in progress. Raise ApiError if a limit is exceeded."""
        self._count(len(piece))
        self._waiting += piece

    def end_file(self) -> StoredFile:
        """End the uploaded file in progress, and return it. Call `flush` before."""
        start, self._begun = self._begun, -1
        return self._stored(start, self._written - start)

    def flush(self) -> None:
        """Write the buffered bytes to the temporary file. This blocks. Raise OSError on failure."""
        if not self._waiting:
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._spool.parent, buffering=0)  # noqa: SIM115
        self._written += len(self._waiting)
        while self._waiting:
            del self._waiting[: self._file.write(self._waiting)]

    def finish(self) -> bytes:
        """Return the JSON document, with references in place of long strings. Call `flush` before."""
        if self._string is not None:
            self._document += b'"' + self._string  # an incomplete string, which the parser reports
        return bytes(self._document)

    def long(self, text: str) -> StoredFile | None:
        """Return the stored string to which this string refers, or None if it is an ordinary string."""
        if not self.spills or not text.startswith(self._nonce):
            return None
        _, start, size = text.split(":")
        return self._stored(int(start), int(size))

    def _stored(self, start: int, size: int) -> StoredFile:
        if self._file is None:  # nothing was ever written, so the file is empty
            self._file = tempfile.TemporaryFile(dir=self._spool.parent, buffering=0)  # noqa: SIM115
        return StoredFile(self._file, start, size)

    def refers(self, data: bytes) -> bool:
        """Return whether the data contains a reference to a long string."""
        return self.spills and self._nonce.encode() in data

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
