"""Parses a captured message: its text, HTML, attachments and links. Pure.

The message is untrusted and may be malformed, so nothing here raises: a header that cannot be decoded is
shown unchanged, and a message with too many parts, too deep nesting or too many lines is treated as text.
Parts have Mailpit's numbers: "1", "2", "2.1", and "0" for a message with only one part.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.header import decode_header
from email.message import Message
from email.parser import BytesHeaderParser, BytesParser
from email.policy import compat32
from email.utils import parsedate_to_datetime
from html import unescape

from zonerelay.model.address_list import read_addresses
from zonerelay.model.charsets import text_of

MAX_PARTS = 200
MAX_LINKS = 200
MAX_WORDS = 64 * 1024
SNIPPET = 250
MAX_INLINE = 5_000_000
"""Octets of images that are put into the HTML itself."""

_MANY = re.compile(rb"^content-type:[ \t\r\n]*(?:multipart|message)/|^--", re.IGNORECASE | re.MULTILINE)
_CONTAINERS = re.compile(rb"^content-type:[ \t\r\n]*(?:multipart|message)/", re.IGNORECASE | re.MULTILINE)
_MAX_CONTAINERS = 20
_MAX_LINES = 5_000_000
"""Times containers: the parser looks at each line for each of them. 50 MB in base64 have 700,000 lines."""
_FIELD = re.compile(
    rb"^content-(?:type|disposition)[ \t]*:[^\n]*(?:\n[ \t][^\n]*)*", re.IGNORECASE | re.MULTILINE
)
_MAX_FIELD = 4096
"""The parser needs quadratic time for a field with parameters, and decodes a boundary by any codec."""
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
        """Return the text that searches look in, in lower case."""
        named = [value for key, value in self.headers if key.lower() in _SEARCHED]
        named += [each.file_name for each in (*self.attachments, *self.inline)]
        return " ".join(" ".join([*named, self.text, visible(self.html)]).split()).lower()[:MAX_WORDS]

    def links(self) -> list[str]:
        found = [unescape(next(filter(None, groups), "")) for groups in _HREF.findall(self.html)]
        found += _URL.findall(self.text)
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
    containers = len(_CONTAINERS.findall(octets))
    if (
        containers > _MAX_CONTAINERS
        or len(_MANY.findall(octets)) > 2 * MAX_PARTS
        or octets.count(b"\n") * (containers + 1) > _MAX_LINES
        or any(len(each[0]) > _MAX_FIELD for each in _FIELD.finditer(octets))
    ):
        return _as_text(octets)
    try:
        message = BytesParser(policy=compat32).parsebytes(octets)
        parts = MimeParts(raw=_headers(message))
        for number, part in _leaves(message):
            _put(parts, number, part)
    except Exception:  # noqa: BLE001 - the standard library fails at some messages in ways of its own
        return _as_text(octets)
    return parts


def _as_text(octets: bytes) -> MimeParts:
    head, _, rest = octets.partition(b"\r\n\r\n")
    try:
        headers = _headers(BytesHeaderParser(policy=compat32).parsebytes(head[: 64 * 1024]))
    except Exception:  # noqa: BLE001 - as above
        headers = []
    return MimeParts(raw=headers, text=rest[:MAX_WORDS].decode("utf-8", "replace"))


def _headers(message: Message) -> list[tuple[str, str]]:
    # Not `items`, which cannot represent bytes beyond ASCII (RFC 6532).
    return [(name, str(value)) for name, value in message.raw_items()]


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


def _leaves(message: Message, prefix: str = "") -> Iterator[tuple[str, Message]]:
    if message.get_content_maintype() == "multipart" and message.is_multipart():
        for at, part in enumerate(message.get_payload(), 1):
            if isinstance(part, Message):
                yield from _leaves(part, f"{prefix}{at}.")
    else:
        yield prefix.rstrip(".") or "0", message


def _put(parts: MimeParts, number: str, part: Message) -> None:
    kind = part.get_content_type()
    name = decoded(_parameter(part, "filename", "Content-Disposition") or _parameter(part, "name"))
    place = part.get_content_disposition()
    if part.is_multipart():  # message/rfc822, message/delivery-status
        content = b"".join(each.as_bytes() for each in part.get_payload() if isinstance(each, Message))
    else:
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
    return unescape(_TAG.sub(" ", _INVISIBLE.sub(" ", html[: 4 * MAX_WORDS])))
