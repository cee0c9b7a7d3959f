"""Composes a message from its parts: text and HTML as alternatives, and attached files. Pure.

Equal drafts give equal bytes, so a second attempt sends what the first may have sent. The result is ASCII
except for addresses with another local part, which need SMTPUTF8. The caller has checked the draft: no line
end in a field, and every address is valid.

The module also writes the parts of any message (RFC 2045, RFC 2047): encoded words, parameters, bodies in
seven bits. All output ends its lines with CRLF. `Base64Text` decodes a file that came as text a piece at a
time, so that a large file is not in memory twice.
"""

import base64
import binascii
import hashlib
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from zonerelay.message.header import MAX_WORD, crlf, field, filled, fits_lines, rfc5322_date
from zonerelay.model.envelope import Mailbox

_LIKE_A_WORD = re.compile(r"=\?[^?]*\?[^?]*\?.*?\?=")
_FOLD = 76
_LONGEST = 990
_STRUCTURED = re.compile(
    r"list-.+|in-reply-to|references|archived-at|auto-submitted|precedence|importance|sensitivity"
    r"|(?:x-|x-msmail-|mt-)?priority|disposition-notification-.+|return-receipt-to|errors-to|original-.+"
    r"|require-recipient-valid-since|tls-required|authentication-results|arc-.+|autocrypt|.*-language"
    r"|expires|expiry-date|deferred-delivery|supersedes|feedback-id|x-auto-response-suppress"
)
_WORD_OCTETS = 42  # in base64 with its frame: at most the 75 characters that RFC 2047 2 allows
_SURROGATE = re.compile(r"[\udc80-\udcff]")
_PHRASE = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~ -]+")
# The characters of RFC 2231 are left out: readers misread a bare one, though RFC 2045 allows it.
_TOKEN = re.compile(r"[A-Za-z0-9!#$&+.^_`{|}~-]+")
_QUOTED = re.compile(r'(["\\])')
_MANY = 6
"""When more than one octet in this number is beyond ASCII, base64 is shorter than quoted-printable."""


def encoded(text: str) -> str:
    """Encode a string as folded encoded words (RFC 2047). Bytes that are not UTF-8 (surrogates) keep their
    values, as `unknown-8bit` (RFC 1428).
    """
    charset = "unknown-8bit" if _SURROGATE.search(text) else "utf-8"
    words: list[bytes] = [b""]
    for character in text:
        octets = character.encode("utf-8", "surrogateescape")
        if len(words[-1]) + len(octets) > _WORD_OCTETS:
            words.append(b"")
        words[-1] += octets
    return "\r\n ".join(f"=?{charset}?b?{base64.b64encode(word).decode()}?=" for word in words)


def unstructured(name: str, text: str) -> str:
    """Return an unstructured header field that readers decode to exactly `text`."""
    plain = text.isascii() and text.isprintable() and not _LIKE_A_WORD.search(text) and "  " not in text
    if plain and text == text.strip() and all(len(word) <= MAX_WORD for word in text.split(" ")):
        return field(name, text)
    return f"{name}: {encoded(text)}\r\n" if text else f"{name}:\r\n"


class FieldValueError(ValueError):
    """The text is not a valid value of a header field."""


def header(name: str, text: str) -> str:
    """Format a header field, with encoded words where the field allows them. Encoded words are allowed in
    unstructured text only, and would break a structured field (RFC 2047 5). Raise FieldValueError if the
    value is not valid.
    """
    if not _STRUCTURED.fullmatch(name.lower()):
        return unstructured(name, text)
    name_of_list, opening, rest = text.rpartition("<")
    if name.lower() == "list-id" and not name_of_list.isascii():
        text = f"{encoded(name_of_list.strip())} {opening}{rest}".replace("\r\n", "")
    if not text.isascii():
        raise FieldValueError("contains non-ASCII characters; encode those of a URL as %C3%A9")
    if any(len(word) > _LONGEST for word in text.split(" ")):
        text = re.sub(r"(?<=[>,])(?=<)", " ", text)
    words = re.findall(r" *[^ ]+", text)
    if name.lower().startswith("list-"):  # RFC 2369 2: blanks within angle brackets are ignored
        words = [part for word in words for part in re.findall(rf".{{1,{_LONGEST}}}", word)]
    if any(len(word) > _LONGEST for word in words):
        raise FieldValueError(f"has more than {_LONGEST} characters without a space")
    first, *others = [f"{name}:", *(word if word.startswith(" ") else f" {word}" for word in words)]
    if others and len(first) + len(others[0]) <= _LONGEST:
        first += others.pop(0)
    return "\r\n ".join(filled([first, *others], _FOLD)) + "\r\n"


def phrase(text: str) -> str:
    """Encode a display name for an address field."""
    if not text.isascii() or _LIKE_A_WORD.search(text) or len(text) > MAX_WORD // 2:
        return encoded(text)
    if _PHRASE.fullmatch(text) and "  " not in text:
        return text
    return _quoted(text)


def _quoted(text: str) -> str:
    return '"' + _QUOTED.sub(r"\\\1", text) + '"'


def parameter(name: str, value: str) -> str:
    """Format a parameter of a MIME field, with the encoding of RFC 2231 if the value is not plain ASCII."""
    if _TOKEN.fullmatch(value):
        return f"; {name}={value}"
    if value.isascii() and len(value) < MAX_WORD // 4:
        return f"; {name}={_quoted(value)}"
    return f";\r\n {name}*=utf-8''{urllib.parse.quote(value, safe='')}"


def text_part(text: str, subtype: str) -> bytes:
    """Return a MIME text part with its header, and with CRLF at the end of the last line."""
    data = text.replace("\r\n", "\n").replace("\r", "\n").encode()
    if not data.endswith(b"\n"):
        data += b"\n"
    return part(f"text/{subtype}; charset=utf-8", data)


def part(content_type: str, data: bytes, *, description: str = "", transfer_encoding: str = "") -> bytes:
    """Return a MIME part with its header, with CRLF line ends. The data must be in `transfer_encoding` if
    that is given.
    """
    body = crlf(data)
    if not transfer_encoding:
        transfer_encoding, body = _seven_bit(data)
    about = f"Content-Description: {description}\r\n" if description else ""
    head = f"Content-Type: {content_type}\r\n{about}Content-Transfer-Encoding: {transfer_encoding}\r\n\r\n"
    return head.encode("ascii") + body


def _seven_bit(data: bytes) -> tuple[str, bytes]:
    lines = crlf(data)
    if data.isascii() and fits_lines(lines):
        return "7bit", lines
    if sum(octet > 0x7F for octet in data[: 64 * 1024]) * _MANY > min(len(data), 64 * 1024):
        return "base64", base64_lines(lines)
    return "quoted-printable", crlf(binascii.b2a_qp(data, istext=True))


def base64_lines(data: bytes) -> bytes:
    return base64.encodebytes(data).replace(b"\n", b"\r\n")


def multipart(subtype: str, digest: str, parts: Sequence[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield a multipart body in chunks. `digest` is a hash of the parts."""
    boundary = f"=_{subtype.partition(';')[0]}_{digest}"
    opening = f"--{boundary}\r\n".encode()
    yield f'Content-Type: multipart/{subtype};\r\n boundary="{boundary}"\r\n\r\n'.encode()
    for at, part in enumerate(parts):
        yield b"\r\n" + opening if at else opening
        yield from part
    yield f"\r\n--{boundary}--\r\n".encode()


LINE = 76
_SLICE = 1024 * LINE


class Base64Error(ValueError):
    """The text is not valid base64. The message names the text, not its value."""


class Base64Text:
    """Decodes base64 text in chunks. White space is skipped. `name` is its name in errors."""

    def __init__(self, text: bytes | memoryview, name: str = "text") -> None:
        self._text = memoryview(text)
        self._name = name

    def pieces(self) -> Iterator[bytes]:
        """Yield the decoded bytes in chunks; each call starts at the beginning. Every piece but the last
        holds whole lines. Raise Base64Error.
        """
        rest = b""
        for text in self._slices():
            rest += b"".join(text.split())
            # The end is held back, because only it may have padding.
            whole = (len(rest) - 1) // LINE * LINE
            if whole > 0:
                yield self._decode(rest[:whole], is_last=False)
                rest = rest[whole:]
        if rest:
            yield self._decode(rest, is_last=True)

    def _slices(self) -> Iterator[bytes]:
        for start in range(0, len(self._text), _SLICE):
            yield bytes(self._text[start : start + _SLICE])

    def _decode(self, text: bytes, *, is_last: bool) -> bytes:
        try:
            if not is_last and b"=" in text:
                raise ValueError("there is padding before the end")
            return base64.b64decode(text, validate=True)
        except ValueError:
            raise Base64Error(f"{self._name} is not base64") from None


class Address(msgspec.Struct, frozen=True):
    """An email address with a display name. `name` is the display name, `""` for none."""

    mailbox: Mailbox
    name: str = ""

    def __str__(self) -> str:
        return f"{phrase(self.name)} <{self.mailbox}>" if self.name else self.mailbox


class FileContent(Protocol):
    """Interface: the content of an attached file."""

    def pieces(self) -> Iterator[bytes]:
        """Yield the content in chunks; each call starts at the beginning. Every piece but the last holds
        whole lines of base64, of 57 bytes. Raise Base64Error.
        """


class AttachedFile(msgspec.Struct, frozen=True):
    """A file to attach to a message. `content_type` is checked. With a `content_id` the HTML can show it."""

    name: str
    content_type: str
    content: FileContent
    content_id: str = ""


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """The content from which a message is composed. `message_id` has its brackets, `created` is Unix time,
    `headers` keep their order.
    """

    message_id: str
    created: float
    author: Address
    to: tuple[Address, ...]
    cc: tuple[Address, ...] = ()
    subject: str = ""
    text: str | None = None
    html: str | None = None
    headers: tuple[tuple[str, str | Sequence[Address]], ...] = ()
    files: tuple[AttachedFile, ...] = ()


def compose(draft: Draft) -> bytes:
    return b"".join(compose_pieces(draft))


def compose_pieces(draft: Draft) -> Iterator[bytes]:
    """Compose a message, and yield it in chunks. Files are read in chunks, so that large ones need little
    memory. Raise Base64Error.
    """
    yield _header(draft).encode() + b"MIME-Version: 1.0\r\n"
    yield from _body(draft)


def _header(draft: Draft) -> str:
    date = rfc5322_date(draft.created)
    fields = [f"Date: {date}\r\n", f"Message-ID: {draft.message_id}\r\n", _addresses("From", [draft.author])]
    # RFC 5322 3.6 needs no destination field when only Bcc has recipients.
    fields += [_addresses(name, some) for name, some in (("To", draft.to), ("Cc", draft.cc)) if some]
    fields.append(unstructured("Subject", draft.subject))
    for name, value in draft.headers:
        fields.append(header(name, value) if isinstance(value, str) else _addresses(name, value))
    return "".join(fields)


def _addresses(name: str, addresses: Sequence[Address]) -> str:
    lines = filled([f"{name}:", *(f" {address}," for address in addresses)], _FOLD)
    return "\r\n ".join(lines).removesuffix(",") + "\r\n"


def _body(draft: Draft) -> Iterable[bytes]:
    shown = [file for file in draft.files if file.content_id and draft.html is not None]
    attached = [file for file in draft.files if file not in shown]
    is_single = not draft.files and (draft.text is None or draft.html is None)
    digest = "" if is_single else _digest(draft)
    content: Iterable[bytes] = [text_part(draft.text or "", "plain")]
    if draft.html is not None:
        html: Iterable[bytes] = [text_part(draft.html, "html")]
        if shown:
            html = multipart("related", digest, [html, *map(_attachment, shown)])
        content = html if draft.text is None else multipart("alternative", digest, [content, html])
    return multipart("mixed", digest, [content, *map(_attachment, attached)]) if attached else content


def _digest(draft: Draft) -> str:
    """Return a hash of all parts for the MIME boundaries, so that no part can contain a boundary."""
    digest = hashlib.blake2b(draft.message_id.encode(), digest_size=15)
    for text in (draft.text, draft.html):
        digest.update(b"\0" if text is None else text.encode())
    for file in draft.files:
        for piece in file.content.pieces():
            digest.update(piece)
    return digest.hexdigest()


def _attachment(file: AttachedFile) -> Iterator[bytes]:
    place = "inline" if file.content_id else "attachment"
    lines = [
        f"Content-Type: {file.content_type}",
        f"Content-Disposition: {place}{parameter('filename', file.name) if file.name else ''}",
        "Content-Transfer-Encoding: base64",
    ]
    if file.content_id:
        lines.append(f"Content-ID: <{file.content_id}>")
    yield "\r\n".join([*lines, "", ""]).encode()
    for piece in file.content.pieces():
        yield base64_lines(piece)
