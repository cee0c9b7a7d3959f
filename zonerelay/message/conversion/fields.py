"""Writes header fields in ASCII: encoded words (RFC 2047) and extended parameters (RFC 2231).

A field in ASCII keeps every octet. Text that is not UTF-8 keeps its octets, under the name `unknown-8bit`
(RFC 1428).
"""

from __future__ import annotations

import base64
import re
import urllib.parse

from zonerelay.message.compose.mime import encoded
from zonerelay.message.header.headers import wrap
from zonerelay.model.address_list import read_addresses
from zonerelay.smtp.server.line_ends import MAX_LINE

_FIELD = re.compile(rb"([!-9;-~]++)[ \t]*+:((?:[^\r]++|\r(?!\n(?![ \t])))*+(?:\r\n)?)")
_FOLD = re.compile(rb"\r\n(?=[ \t])")
_PARAMETER = re.compile(r';\s*+([^\s=;"]++)\s*+=\s*+("(?:[^"\\]|\\.)*+"|[^;\s]*+)')
_ENCODED_WORD = re.compile(r"=\?[^\s?]++\?[bBqQ]\?[^\s?]*+\?=")
_QUOTED_PAIR = re.compile(r"\\(.)")
MAX_WIDTH = 78
"""Octets of a line (RFC 5322 2.1.1)."""
FOLD_AT = 900
_WORD_OCTETS = 42
"""Octets in one encoded word, in base64 with its frame within the 75 characters of RFC 2047 2."""

_ADDRESSES = frozenset(
    b"from sender reply-to to cc bcc errors-to disposition-notification-to return-receipt-to "
    b"mail-followup-to resent-from resent-sender resent-reply-to resent-to resent-cc resent-bcc".split()
)
_PARAMETERS = frozenset((b"content-type", b"content-disposition"))
_TEXTS = re.compile(rb"subject|comments|keywords|organi[sz]ation|thread-topic|content-description|x-.*")
"""Fields whose value is text for people, or words. No other field may have encoded words."""


class NotConvertibleError(Exception):
    """The message has no form in seven bits that loses nothing. `str()` is the reason, for a log."""


def ascii_fields(block: bytes) -> bytes:
    """Returns the header section in ASCII, its fields in their order. Raises NotConvertibleError."""
    if block.isascii():
        return block
    written: list[bytes] = []
    position = 0
    while position < len(block):
        match = _FIELD.match(block, position)
        end = match.end() if match is not None else _line_end(block, position)
        octets = block[position:end]
        if octets.isascii():
            written.append(octets)
        elif match is None:
            raise NotConvertibleError("a line of the header that is no field is not ASCII")
        else:
            written.append(_ascii_field(match[1], match[2]))
        position = end
    return b"".join(written)


def folded(block: bytes) -> bytes:
    """Folds the lines that are too long (RFC 5322 2.1.1) at blanks, so that readers find the same values, and
    between two identifiers. A longer word stays as it is.
    """
    lines = block.split(b"\r\n")
    if len(max(lines, key=len)) <= MAX_LINE:
        return block
    written: list[bytes] = []
    for line in lines:
        rest = line
        while len(rest) > MAX_LINE:
            at = max(rest.rfind(b" ", 1, FOLD_AT), rest.rfind(b"\t", 1, FOLD_AT))
            if at <= 0 or not rest[:at].strip():
                at = rest.rfind(b"><", 1, FOLD_AT) + 1
                rest = rest[:at] + b" " + rest[at:] if at else rest
            if at <= 0:
                break
            written.append(rest[:at])
            rest = rest[at:]
        written.append(rest)
    return b"\r\n".join(written)


def _line_end(block: bytes, position: int) -> int:
    return block.find(b"\r\n", position) + 2 or len(block)


def _ascii_field(name: bytes, value: bytes) -> bytes:
    kind = name.lower()
    write = (
        _addresses
        if kind in _ADDRESSES
        else _parameters
        if kind in _PARAMETERS
        else _text
        if _TEXTS.fullmatch(kind)
        else None
    )
    label = name.decode("ascii")
    if write is None:
        raise NotConvertibleError(f"the field {label} is not ASCII")
    text = _FOLD.sub(b"", value).strip().decode("utf-8", "surrogateescape")
    return ("\r\n ".join(wrap(f"{label}: {write(label, text)}", MAX_WIDTH)) + "\r\n").encode("ascii")


def _words(text: str) -> str:
    """Returns the text as encoded words, with a space between two of them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        octets = text.encode("utf-8", "surrogateescape")
        return " ".join(
            f"=?unknown-8bit?b?{base64.b64encode(octets[at : at + _WORD_OCTETS]).decode()}?="
            for at in range(0, len(octets), _WORD_OCTETS)
        )
    return encoded(text).replace("\r\n ", " ")


def _text(_label: str, text: str) -> str:
    """Encodes each run of words beyond ASCII. Readers drop the blank between two encoded words, so it is
    written within one of them.
    """
    runs: list[str] = []
    for word in text.split(" "):
        if runs and not (word.isascii() or runs[-1].isascii()):
            runs[-1] = f"{runs[-1]} {word}"
        else:
            runs.append(word)
    written = []
    for at, run in enumerate(runs):
        if run.isascii():
            written.append(run)
            continue
        before = " " if at and _ENCODED_WORD.fullmatch(runs[at - 1]) else ""
        behind = " " if at + 1 < len(runs) and _ENCODED_WORD.fullmatch(runs[at + 1]) else ""
        written.append(_words(f"{before}{run}{behind}"))
    return " ".join(written)


def _addresses(label: str, text: str) -> str:
    found = read_addresses(text)
    written = []
    for entry in found.entries:
        if not entry.address.isascii() or not entry.address:
            raise NotConvertibleError(f"an address in {label} is not ASCII or cannot be read")
        if entry.text.isascii():
            written.append(entry.text)
        else:
            written.append(f"{_words(entry.name)} <{entry.address}>")
    if not found.clear or ":" in text.partition("<")[0]:
        raise NotConvertibleError(f"{label} is not clear")
    return ", ".join(written)


def _parameters(_label: str, text: str) -> str:
    head = _PARAMETER.split(text, 1)[0]
    if not head.isascii():
        raise NotConvertibleError("a type of a part is not ASCII")
    written = [head.rstrip("; ")]
    for name, value in _PARAMETER.findall(text):
        if not name.isascii():
            raise NotConvertibleError("a parameter's name is not ASCII")
        if value.isascii():
            written.append(f"{name}={value}")
            continue
        plain = _QUOTED_PAIR.sub(r"\1", value[1:-1]) if value.startswith('"') else value
        octets = plain.encode("utf-8", "surrogateescape")
        charset = "utf-8" if _is_utf8(octets) else "unknown-8bit"
        written.append(f"{name}*={charset}''{urllib.parse.quote(octets, safe='')}")
    return "; ".join(written)


def _is_utf8(octets: bytes) -> bool:
    try:
        octets.decode()
    except UnicodeDecodeError:
        return False
    return True
