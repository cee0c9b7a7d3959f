"""Parses a captured message: its text, HTML, attachments and links. Pure.

The message is untrusted and may be malformed, so nothing here raises: a header that cannot be decoded is
shown unchanged, and a message with too many parts is treated as text. The standard library decodes parts, but
does not find them, because its parser is slow and needs quadratic time for some messages.
Parts have Mailpit's numbers: "1", "2", "2.1", and "0" for a message with only one part.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.header import decode_header
from email.message import Message
from email.utils import parsedate_to_datetime
from html import unescape
from itertools import islice

from zonerelay.model.address_list import read_addresses
from zonerelay.model.charsets import text_of

MAX_PARTS = 200
MAX_LINKS = 200
MAX_WORDS = 64 * 1024
SNIPPET = 250
MAX_INLINE = 5_000_000
"""Octets of images that are put into the HTML itself."""

_HEADER = re.compile(rb"([!-9;-~]*)[ \t]*:([^\n]*(?:\n[ \t][^\n]*)*)(?:\n|\Z)")
_EMPTY = re.compile(rb"\r?\n|\Z")
_OF_PARTS = (b"content-type", b"content-disposition", b"content-transfer-encoding", b"content-id")
_MAX_FIELD = 4096
"""The standard library needs quadratic time for a field with parameters."""
_MAX_DEPTH = 20
_MAX_DECODED = 16 * 1024
"""Characters of a field whose encoded words are decoded: that takes the standard library quadratic time."""
_INVISIBLE = re.compile(r"<(style|script|head|title)\b.*?(?:</\1\s*>|\Z)|<!--.*?(?:-->|\Z)", re.S | re.I)
_TAG = re.compile(r"<[^>]*>?")
_HREF = re.compile(r"""\bhref\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]+))""", re.IGNORECASE)
_URL = re.compile(r"""https?://[^\s<>"'\\]+""", re.IGNORECASE)
_CID = re.compile(r"""(["'(=]\s*)cid:([^"')\s>]+)""", re.IGNORECASE)
_LINK = re.compile(r"<link\b[^>]*>?", re.IGNORECASE)

Person = tuple[str, str]
"""Name and address."""


@dataclass(frozen=True, slots=True)
class MimePart:
    """One MIME part of a captured message."""

    number: str
    file_name: str
    content_type: str
    content_id: str
    content: bytes = field(repr=False)


@dataclass(slots=True, kw_only=True)
class MimeParts:
    """The MIME parts of a captured message. `raw` are the header fields in order, unchanged; `headers` are
    the same, decoded.
    """

    raw: list[tuple[str, str]]
    headers: list[tuple[str, str]] = field(init=False)
    text: str = ""
    html: str = ""
    attachments: list[MimePart] = field(default_factory=list)
    inline: list[MimePart] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.headers = [(name, decoded(value)) for name, value in self.raw]

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    def people(self, name: str) -> list[Person]:
        """Return the names and addresses in all header fields with this name. Decoded names may contain
        commas.
        """
        values = [value for key, value in self.raw if key.lower() == name]
        found = [each for value in values for each in read_addresses(value).entries]
        return [(decoded(each.name), each.address) for each in found if each.address]

    @property
    def date(self) -> str:
        """The date of the message in ISO 8601, or "" if it has no valid Date field."""
        try:
            return parsedate_to_datetime(self.header("date")).astimezone().isoformat(timespec="seconds")
        except (ValueError, TypeError, IndexError, OverflowError):
            return ""

    @property
    def tags(self) -> list[str]:
        return [each.strip() for each in self.header("x-tags").split(",") if each.strip()][:20]

    def plain(self) -> str:
        """Return the plain text of the message, or else the visible text of its HTML."""
        return self.text if self.text.strip() else visible(self.html)

    def words(self) -> str:
        """Return the searchable text of the message in lower case: header values, file names and bodies."""
        named = [value for key, value in self.headers if key.lower() in _SEARCHED]
        named += [each.file_name for each in (*self.attachments, *self.inline)]
        return " ".join(" ".join([*named, self.text, visible(self.html)]).split()).lower()[:MAX_WORDS]

    def links(self) -> list[str]:
        html, text = self.html[: 4 * MAX_WORDS], self.text[: 4 * MAX_WORDS]
        found = [_without_references(next(filter(None, groups), "")) for groups in _HREF.findall(html)]
        found += _URL.findall(text)
        return list(dict.fromkeys(each.strip() for each in found if ":" in each))[:MAX_LINKS]

    def find(self, number: str) -> MimePart | None:
        return next((each for each in (*self.attachments, *self.inline) if each.number == number), None)

    def html_to_show(self) -> str:
        """Return the HTML with the images of the message embedded in it. External resources are blocked by
        the frame's policy; `<link>` elements are removed, because browsers follow them with DNS queries and
        connections before they apply a policy.
        """
        import base64  # noqa: PLC0415 - for pages alone

        room = MAX_INLINE
        shown: dict[str, str] = {}
        for each in (*self.inline, *self.attachments):
            if each.content_id and each.content_type.startswith("image/") and len(each.content) <= room:
                room -= len(each.content)
                encoded = base64.b64encode(each.content).decode()
                shown[each.content_id] = f"data:{each.content_type};base64,{encoded}"
        # An image that is referenced many times would multiply the size.
        html = _CID.sub(lambda found: found[1] + shown.pop(found[2], f"cid:{found[2]}"), self.html)
        return _LINK.sub("", html)


_SEARCHED = ("subject", "from", "to", "cc", "bcc", "reply-to", "message-id")


def take_apart(octets: bytes) -> MimeParts:
    fields, body = _fields(octets)
    # As text, because bytes beyond ASCII are surrogates in the standard library's fields (RFC 6532).
    parts = MimeParts(raw=[(_ascii(name), _ascii(value.strip(b" \t\r\n"))) for name, value in fields])
    try:
        leaves = list(islice(_leaves(octets, 0, len(octets), ()), MAX_PARTS + 1))
        if len(leaves) <= MAX_PARTS:
            for number, part in leaves:
                _put(parts, number, part)
            return parts
    except Exception:  # noqa: BLE001 - the standard library fails at some parts in ways of its own
        parts = MimeParts(raw=parts.raw)
    parts.text = octets[body : body + MAX_WORDS].decode("utf-8", "replace")
    return parts


def _ascii(octets: bytes) -> str:
    return octets.decode("ascii", "surrogateescape")


def _fields(octets: bytes, start: int = 0, end: int = sys.maxsize) -> tuple[list[tuple[bytes, bytes]], int]:
    """Return the fields of the header section that begins at `start`, and the position of the body."""
    found = list[tuple[bytes, bytes]]()
    while field := _HEADER.match(octets, start, end):
        found.append((field[1], field[2]))
        start = field.end()
    empty = _EMPTY.match(octets, start, end)
    return found, start if empty is None else empty.end()


def _leaves(octets: bytes, start: int, end: int, above: tuple[int, ...]) -> Iterator[tuple[str, Message]]:
    """Yield the leaf parts of the MIME entity between two positions, with part numbers such as `1.2`."""
    part, (fields, body) = Message(), _fields(octets, start, end)
    for name, value in fields:
        if name.lower() in _OF_PARTS and len(value) <= _MAX_FIELD:
            part.set_raw(_ascii(name), _ascii(value.strip(b" \t\r\n")))
    boundary = _parameter(part, "boundary").rstrip() if part.get_content_maintype() == "multipart" else ""
    number, begun = 0, 0
    for first, behind in _delimiters(octets, body, end, boundary) if len(above) < _MAX_DEPTH else ():
        if begun:
            number += 1
            yield from _leaves(octets, begun, first, (*above, number))
        begun = behind
    if not number:
        part.set_payload(_ascii(octets[body:end]))
        yield ".".join(map(str, above)) or "0", part


def _delimiters(octets: bytes, start: int, end: int, boundary: str) -> Iterator[tuple[int, int]]:
    """Yield the start of each boundary delimiter, with the line end before it, and of the line after it. The
    last one is the end (RFC 2046, section 5.1.1).
    """
    if not boundary:
        return
    delimiter = re.escape(b"--" + boundary.encode("utf-8", "surrogateescape"))
    line = re.compile(rb"\n%b(--)?[ \t]*\r?(?=\n|\Z)" % delimiter)
    for found in line.finditer(octets, start - 1, end):
        at = found.start()
        yield at - (octets[at - 1 : at] == b"\r"), found.end() + 1
        if found[1]:
            return
    yield end, end


def decoded(value: object) -> str:
    text = str(value).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    text = re.sub(r"\r?\n[ \t]*", " ", text)
    if len(text) > _MAX_DECODED:
        return text
    try:
        return "".join(
            # Text that is not encoded has the form that the standard library gives it.
            each if isinstance(each, str) else text_of(each, charset) if charset else _unescaped(each)
            for each, charset in decode_header(text)
        )
    except Exception:  # noqa: BLE001 - an unknown character set, a base64 that is none
        return text


def _put(parts: MimeParts, number: str, part: Message) -> None:
    kind = part.get_content_type()
    name = decoded(_parameter(part, "filename", "Content-Disposition") or _parameter(part, "name"))
    place = part.get_content_disposition()
    payload = part.get_payload(decode=True)
    content = payload if isinstance(payload, bytes) else b""
    if kind in ("text/plain", "text/html") and place != "attachment" and not name:
        text = text_of(content, _parameter(part, "charset") or "utf-8")
        if kind == "text/html":
            parts.html += text
        else:
            parts.text += text
        return
    content_id = decoded(part.get("Content-ID", "")).strip().strip("<>")
    found = MimePart(number, name, kind, content_id, content)
    (parts.inline if place == "inline" or (content_id and place is None) else parts.attachments).append(found)


def _parameter(part: Message, name: str, field_name: str = "Content-Type") -> str:
    """Return a parameter of a MIME field, or "" if it is missing. The standard library's functions for
    charsets and file names are not used, because they decode with any codec that the message names (RFC
    2231).
    """
    value = part.get_param(name, "", field_name)
    if not isinstance(value, tuple):
        return str(value)
    charset, _, text = value
    return text_of(text.encode("latin-1", "replace"), charset or "ascii").strip()


def _unescaped(octets: bytes) -> str:
    """Decode bytes that `decode_header` has escaped because they contain characters beyond Latin-1."""
    return octets.decode("raw-unicode-escape", "replace")


def visible(html: str) -> str:
    """Return the visible text of HTML, sufficient for searching and for a preview."""
    return _without_references(_TAG.sub(" ", _INVISIBLE.sub(" ", html[: 4 * MAX_WORDS])))


def _without_references(html: str) -> str:
    """Replace HTML character references, unless one contains a number that is too long for `int`."""
    try:
        return unescape(html)
    except ValueError:
        return html
