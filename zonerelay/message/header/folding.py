"""Makes foreign text fit for a header field or a paragraph of a message of ours.

The result has no control characters and no line longer than RFC 5322 2.1.1 allows, for any input.
"""

from __future__ import annotations

import binascii
import re

WIDTH = 76
# A longer run without a space is broken: RFC 5322 2.1.1 allows 998 octets, and UTF-8 has up to 4 a character.
MAX_WORD = 900
MAX_WORD_UTF8 = 240

_ENCODED_EOL = re.compile(rb"\r\n|\r|\n")


def one_line(text: str, *, limit: int, ascii_only: bool = False) -> str:
    """Replaces white space and line ends by single spaces, unprintable characters by `?`; at most `limit`
    characters.
    """
    text = " ".join(text[: 4 * limit].split())
    if not text.isprintable() or (ascii_only and not text.isascii()):
        text = "".join(c if c.isprintable() and (not ascii_only or c.isascii()) else "?" for c in text)
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def wrap(text: str, width: int = WIDTH) -> list[str]:
    """Returns lines of whole words, at least one line. A word too long for any line is broken."""
    lines: list[str] = []
    line = ""
    for word in _breakable(text):
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]


def field(name: str, value: str) -> str:
    """Returns `Name: value`, folded (RFC 5322 2.2.3), with its final CRLF."""
    return "\r\n ".join(wrap(f"{name}: {value}")) + "\r\n"


def crlf(data: bytes) -> bytes:
    """Makes every line end CRLF and ends the last line."""
    data = _ENCODED_EOL.sub(b"\r\n", data)
    return data if data.endswith(b"\r\n") else data + b"\r\n"


def seven_bit(data: bytes) -> tuple[str, bytes]:
    """Returns the encoding and the lines with CRLF: unchanged, or quoted-printable when 7BIT cannot carry
    them.
    """
    if data.isascii() and b"\0" not in data and all(len(line) <= 998 for line in data.split(b"\r\n")):
        return "7bit", data
    return "quoted-printable", binascii.b2a_qp(data, istext=True)


def _breakable(text: str) -> list[str]:
    words: list[str] = []
    for word in text.split(" "):
        most = MAX_WORD if word.isascii() else MAX_WORD_UTF8
        words += [word[i : i + most] for i in range(0, len(word), most)]
    return words
