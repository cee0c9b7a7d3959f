"""Converts a message of any size, chunk by chunk, to a form that SMTP can transmit: lines of limited length,
and 7 bits if required.

The message is read once to find the parts that have lines which are too long or, for seven bits, bytes beyond
ASCII. The resulting `ConversionPlan` determines what an `Encoder` encodes. Both passes follow the boundaries
of the parts (RFC 2046 5.1), into messages within messages.

- Texts become quoted-printable, other parts base64. A part that needs nothing keeps every byte.
- A part that is base64 or quoted-printable already keeps its encoding and gets shorter lines
  (RFC 2045 6.7, 6.8).
- Header sections of every part and inner message are folded, and written in ASCII for seven bits (`fields`).
- A message without MIME fields gets them: UTF-8 if its body is that, `unknown-8bit` (RFC 1428) otherwise.
- What a signature covers (multipart/signed, multipart/encrypted), and a part that is encoded already and has
  bytes beyond ASCII all the same, or in another encoding, is not changed: NotConvertibleError.

Memory: one header section of at most `MAX_HEADER` bytes, and one piece.

Writes header fields in ASCII: encoded words (RFC 2047) and extended parameters (RFC 2231).

A field in ASCII keeps every byte. Text that is not UTF-8 keeps its bytes, under the name `unknown-8bit`
(RFC 1428).
"""

import binascii
import codecs
import re
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable
from email.message import Message
from email.parser import BytesHeaderParser

import msgspec

from zonerelay.message.compose import base64_lines, encoded
from zonerelay.message.header import wrap
from zonerelay.model.address_list import read_addresses
from zonerelay.smtp.server.line_ends import MAX_LINE

_FIELD = re.compile(rb"(?:\A|(?<=\r\n))([!-9;-~]++)[ \t]*+:((?:[^\r]++|\r(?!\n(?![ \t])))*+(?:\r\n)?)")
_FOLD = re.compile(rb"\r\n(?=[ \t])")
_PARAMETER = re.compile(r';\s*+([^\s=;"]++)\s*+=\s*+("(?:[^"\\]|\\.)*+"|[^;\s]*+)')
_ENCODED_WORD = re.compile(r"=\?[^\s?]++\?[bBqQ]\?[^\s?]*+\?=")
_QUOTED_PAIR = re.compile(r"\\(.)")
MAX_WIDTH = 78
"""Octets of a line (RFC 5322 2.1.1)."""
FOLD_AT = 900

_ADDRESSES = frozenset(
    b"from sender reply-to to cc bcc errors-to disposition-notification-to return-receipt-to "
    b"mail-followup-to resent-from resent-sender resent-reply-to resent-to resent-cc resent-bcc".split()
)
_PARAMETERS = frozenset((b"content-type", b"content-disposition"))
_TEXTS = re.compile(rb"subject|comments|keywords|organi[sz]ation|thread-topic|content-description|x-.*")
"""Fields whose value is text for people, or words. No other field may have encoded words."""


class NotConvertibleError(Exception):
    """The message cannot be converted to seven bits without loss. `str()` is the reason, for a log."""


def ascii_fields(block: bytes) -> bytes:
    """Return the header section with all fields in ASCII, in the same order. Raise NotConvertibleError if a
    field cannot be converted.
    """
    if block.isascii():
        return block
    if len(block) > MAX_ENCODED:
        raise NotConvertibleError("a header with non-ASCII characters is too long")
    written = _FIELD.sub(_ascii_field, block)
    if not written.isascii():
        raise NotConvertibleError("a header line that is not a field contains non-ASCII characters")
    return written


def folded(block: bytes) -> bytes:
    """Fold overlong lines (RFC 5322 2.1.1) at white space, so that readers see the same values. A longer word
    stays as it is.
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


def _ascii_field(field: re.Match[bytes]) -> bytes:
    if field[0].isascii():
        return field[0]
    kind, label = field[1].lower(), field[1].decode("ascii")
    write: Callable[[str, str], str]
    if kind in _ADDRESSES:
        write = _addresses
    elif kind in _PARAMETERS:
        write = _parameters
    elif _TEXTS.fullmatch(kind):
        write = _text
    else:
        raise NotConvertibleError(f"the field {label} is not ASCII")
    text = _FOLD.sub(b"", field[2]).strip().decode("utf-8", "surrogateescape")
    return ("\r\n ".join(wrap(f"{label}: {write(label, text)}", MAX_WIDTH)) + "\r\n").encode("ascii")


def _words(text: str) -> str:
    """Encode a string as encoded words (RFC 2047), separated by spaces."""
    return encoded(text).replace("\r\n ", " ")


def _text(_label: str, text: str) -> str:
    """Replace each sequence of words with non-ASCII characters by encoded words. Readers drop the blank
    between two encoded words, so it is written within one of them.
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
            raise NotConvertibleError(f"an address in {label} is not ASCII or cannot be parsed")
        if entry.text.isascii():
            written.append(entry.text)
        else:
            written.append(f"{_words(entry.name)} <{entry.address}>")
    if not found.clear or ":" in text.partition("<")[0]:
        raise NotConvertibleError(f"the address list in {label} is ambiguous")
    return ", ".join(written)


def _parameters(_label: str, text: str) -> str:
    head = _PARAMETER.split(text, 1)[0]
    if not head.isascii():
        raise NotConvertibleError("the media type of a part is not ASCII")
    written = [head.rstrip("; ")]
    for name, value in _PARAMETER.findall(text):
        if not name.isascii():
            raise NotConvertibleError("a parameter's name is not ASCII")
        if value.isascii():
            written.append(f"{name}={value}")
            continue
        plain = _QUOTED_PAIR.sub(r"\1", value[1:-1]) if value.startswith('"') else value
        octets = plain.encode("utf-8", "surrogateescape")
        charset = "utf-8" if octets.decode("utf-8", "replace").encode() == octets else "unknown-8bit"
        written.append(f"{name}*={charset}''{urllib.parse.quote(octets, safe='')}")
    return "; ".join(written)


CRLF = b"\r\n"
MAX_HEADER = 1024 * 1024
"""Octets of the header section of a part. A longer one is not converted."""
MAX_ENCODED = 64 * 1024
"""Octets of a header section that is not ASCII: to convert one with many short addresses takes 75 ms."""
MAX_PARTS = 1000
"""Header sections, of which each is parsed. A message with more is not converted."""
MAX_PARAMETERS = 100
"""The maximum number of semicolons in a media type. For each one, the library reads everything before it."""
MAX_DEPTH = 64
"""Parts within parts. RFC 2046 knows no limit; what is deeper is not converted."""
_FRAGMENT = 16 * 1024
"""Octets of a line without an end that are held."""
_BASE64_LINE = 57
_ENCODED_LINE = 76
"""Characters of an encoded line (RFC 2045 6.7 and 6.8)."""
_CUT_OCTET = re.compile(rb"=[0-9A-Fa-f]?\Z")

_NO_ENCODING = frozenset(("", "7bit", "8bit", "binary"))
_LINES_CHANGE = frozenset(("base64", "quoted-printable"))
"""Encodings whose lines can be made shorter without changing the content."""
_MIME_FIELD = rb"(?i:(?:\A|(?<=\r\n))content-%b[ \t]*+:[^\r]*+(?:\r\n[ \t][^\r]*+)*+(?:\r\n)?)"
_ENCODING = re.compile(_MIME_FIELD % b"transfer-encoding")
_TYPE_AND_ENCODING = re.compile(_MIME_FIELD % b"(?:type|transfer-encoding)")
"""What the library parses: a whole header section of `MAX_HEADER` bytes would take it 340 ms."""


class PartNeeds(msgspec.Struct):
    """How to convert one leaf part: its encoding or only its long lines, and the charset to declare."""

    encoding: bool = False
    utf8: bool = True


class ConversionPlan(msgspec.Struct):
    """The plan for converting a message: what each leaf part needs, in order."""

    seven_bit: bool
    parts: list[PartNeeds] = msgspec.field(default_factory=list)
    folds: bool = False
    """True when a line of a header section is too long."""

    @property
    def needed(self) -> bool:
        """Whether the message has to be converted. Messages for 7-bit hosts always are."""
        return self.seven_bit or self.folds or any(part.encoding for part in self.parts)


class _Entity(msgspec.Struct):
    """A MIME part that is being parsed. `delimiter` of a multipart: CRLF, `--` and its boundary without the
    CRLF.
    """

    is_text: bool = True
    encoding: str = ""
    is_covered: bool = False


class _PartWalker(ABC):
    """Visits each MIME part of a message, and joins the results of `_header`, `_begin`, `_content` and
    `_end`.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._at_line_start = True
        self._header: bytearray | None = bytearray()
        self._is_message = True
        self._delimiters: list[bytes] = []
        self._covered: list[bool] = []
        self._entity: _Entity | None = None
        self._leaf = -1
        self._parts = 0

    def feed(self, piece: bytes) -> bytes:
        """Process the next bytes of the message. Raise NotConvertibleError if it cannot be converted."""
        data = self._rest + piece if self._rest else piece
        *lines, rest = data.split(CRLF)
        written = [self._whole_line(line) for line in lines]
        # The cuts do not depend on the pieces: the bytes must be the same each time.
        while len(rest) >= _FRAGMENT + len(CRLF) and self._header is None:
            written.append(self._line(rest[:_FRAGMENT]))
            rest = rest[_FRAGMENT:]
        if self._header is not None and len(self._header) + len(rest) > MAX_HEADER:
            raise NotConvertibleError("a header is too long")
        self._rest = rest
        return b"".join(written)

    def finish(self) -> bytes:
        """Process the end of the message."""
        written = self._line(self._rest) if self._rest else b""
        if self._header is not None:
            written += self._header_ended(b"")
        return written + self._ended(by_delimiter=False)

    def _whole_line(self, line: bytes) -> bytes:
        """Process a line, given without its CRLF."""
        written = b""
        while len(line) > _FRAGMENT and self._header is None:
            written += self._line(line[:_FRAGMENT])
            line = line[_FRAGMENT:]
        return written + self._line(line + CRLF)

    def _line(self, line: bytes) -> bytes:
        """Process a line with its CRLF, or a fragment of a long line."""
        starts, self._at_line_start = self._at_line_start, line.endswith(CRLF)
        if starts and line.startswith(b"--") and self._delimiters:
            level = self._level(line)
            if level is not None:
                return self._delimited(line, *level)
        if self._header is None:
            return self._content(line)
        if starts and line == CRLF:
            return self._header_ended(CRLF)
        self._header += line
        if len(self._header) > MAX_HEADER:
            raise NotConvertibleError("a header is too long")
        return b""

    def _level(self, line: bytes) -> tuple[int, bool] | None:
        """Return the nesting level of the multipart that a delimiter line belongs to, and whether it ends the
        multipart.
        """
        plain = line.rstrip()
        if plain not in self._delimiters and plain.removesuffix(b"--") not in self._delimiters:
            return None
        level = max(at for at, each in enumerate(self._delimiters) if plain in (each, each + b"--"))
        return level, plain != self._delimiters[level]

    def _delimited(self, line: bytes, level: int, last: bool) -> bytes:
        written = self._header_ended(b"") if self._header is not None else b""
        written += self._ended(by_delimiter=True)
        kept = level if last else level + 1
        del self._delimiters[kept:], self._covered[kept:]
        if last:
            self._entity = None  # lines before the first part, or after the last one
        else:
            self._header, self._is_message = bytearray(), False
        return written + line

    def _header_ended(self, empty_line: bytes) -> bytes:
        assert self._header is not None
        block, self._header = bytes(self._header), None
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise NotConvertibleError("it has too many parts")
        fields = BytesHeaderParser().parsebytes(b"".join(_TYPE_AND_ENCODING.findall(block)))
        kind, encoding = fields.get_content_type(), str(fields.get("Content-Transfer-Encoding", ""))
        encoding = encoding.partition(";")[0].strip().lower()
        boundary = _boundary(fields) if fields.get_content_maintype() == "multipart" else None
        covered = bool(self._covered) and self._covered[-1]
        has_fields = "Content-Type" in fields
        if boundary and empty_line:
            if len(self._delimiters) >= MAX_DEPTH:
                raise NotConvertibleError("the parts are nested too deeply")
            self._delimiters.append(b"--" + boundary.encode("utf-8", "surrogateescape"))
            self._covered.append(covered or kind in ("multipart/signed", "multipart/encrypted"))
            self._entity = None  # lines before the first part, or after the last one
            return self._part(block, encoding, covered) + empty_line
        if kind in ("message/rfc822", "message/global") and encoding in _NO_ENCODING and empty_line:
            self._header, self._is_message = bytearray(), True
            return self._part(block, encoding, covered) + empty_line
        self._leaf += 1
        self._entity = _Entity(
            kind.startswith("text/"), "" if encoding in _NO_ENCODING else encoding, covered
        )
        return self._leaf_part(block, has_fields) + empty_line

    @abstractmethod
    def _part(self, block: bytes, encoding: str, covered: bool) -> bytes: ...

    @abstractmethod
    def _leaf_part(self, block: bytes, has_fields: bool) -> bytes: ...

    @abstractmethod
    def _content(self, line: bytes) -> bytes: ...

    @abstractmethod
    def _ended(self, *, by_delimiter: bool) -> bytes: ...


def _boundary(fields: Message) -> str | None:
    if str(fields["Content-Type"]).count(";") > MAX_PARAMETERS:
        raise NotConvertibleError("a media type has too many parameters")
    try:
        return fields.get_boundary()
    except (TypeError, ValueError) as error:  # the library's, for sections of a parameter (RFC 2231 3)
        raise NotConvertibleError("the parameters of a media type are invalid") from error


class ConversionSurvey(_PartWalker):
    """Reads a message and determines how to convert it."""

    def __init__(self, *, seven_bit: bool) -> None:
        super().__init__()
        self.plan = ConversionPlan(seven_bit)
        self.signed = False
        """True when the message has a DKIM signature of its author or of another relay."""
        self._line_length = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def _part(self, block: bytes, encoding: str, covered: bool) -> bytes:
        if self._is_message:
            self.signed = self.signed or b"\r\ndkim-signature:" in b"\r\n" + block.lower()
        if len(max(block.split(CRLF), key=len)) > MAX_LINE and not covered:
            self.plan.folds = True
        if covered and self.plan.seven_bit and not block.isascii():
            raise NotConvertibleError("a signature covers a header that is not ASCII")
        return b""

    def _leaf_part(self, block: bytes, has_fields: bool) -> bytes:
        self._line_length = 0
        self._decoder.reset()
        self.plan.parts.append(PartNeeds())
        return self._part(block, "", self._entity is not None and self._entity.is_covered)

    def _content(self, line: bytes) -> bytes:
        entity, has_end = self._entity, line.endswith(CRLF)
        length = self._line_length + len(line)
        self._line_length = 0 if has_end else length
        plain = length <= MAX_LINE + (len(CRLF) if has_end else 0)
        if self.plan.seven_bit:
            plain = plain and line.isascii() and b"\0" not in line
        if entity is None:
            self._unless(plain, "text outside the parts")
            return b""
        needs = self.plan.parts[-1]
        if not plain:
            self._unless(not entity.is_covered, "a part that a signature covers")
            can_be_shorter = entity.encoding in _LINES_CHANGE and line.isascii() and b"\0" not in line
            self._unless(can_be_shorter or not entity.encoding, "a part with an encoding")
            needs.encoding = True
        if needs.utf8:
            try:
                self._decoder.decode(line)
            except UnicodeDecodeError:
                needs.utf8 = False
        return b""

    def _unless(self, fits: bool, what: str) -> None:
        if not fits:
            raise NotConvertibleError(f"{what} is not ASCII, or has lines that are too long")

    def _ended(self, *, by_delimiter: bool) -> bytes:
        return b""


class Encoder(_PartWalker):
    """Converts a message according to a plan."""

    def __init__(self, plan: ConversionPlan) -> None:
        super().__init__()
        self._plan = plan
        self._encoding = ""
        self._is_encoded = False
        """True when the part has its encoding already, and needs shorter lines only."""
        self._held = b""

    def _part(self, block: bytes, encoding: str, covered: bool) -> bytes:
        if self._plan.seven_bit and not covered and encoding in ("8bit", "binary"):
            block = _with_encoding(block, b"7bit")
        return self._fields(block, covered)

    def _fields(self, block: bytes, covered: bool) -> bytes:
        if covered:
            return block
        return folded(ascii_fields(block) if self._plan.seven_bit else block)

    def _leaf_part(self, block: bytes, has_fields: bool) -> bytes:
        assert self._entity is not None
        needs = self._plan.parts[self._leaf]
        self._encoding, self._held = "", b""
        self._is_encoded = needs.encoding and bool(self._entity.encoding)
        if self._is_encoded:
            self._encoding = self._entity.encoding
        elif needs.encoding:
            self._encoding = "quoted-printable" if self._entity.is_text else "base64"
            block = _with_encoding(block, self._encoding.encode())
            if self._is_message and not has_fields:
                charset = b"utf-8" if needs.utf8 else b"unknown-8bit"
                block += b"Content-Type: text/plain; charset=" + charset + CRLF
            if self._is_message and b"\r\nmime-version" not in b"\r\n" + block.lower():
                block += b"MIME-Version: 1.0\r\n"
        elif self._plan.seven_bit and not (self._entity.encoding or self._entity.is_covered):
            block = _with_encoding(block, b"7bit", only_present=True)
        return self._fields(block, self._entity.is_covered)

    def _content(self, line: bytes) -> bytes:
        if self._entity is None or not self._encoding:
            return line
        if self._is_encoded:
            return self._shorter(line)
        if self._encoding == "base64":
            self._held += line
            # The last CRLF may belong to the delimiter that follows.
            whole = (len(self._held) - len(CRLF)) // _BASE64_LINE * _BASE64_LINE
            written, self._held = self._held[:whole], self._held[whole:]
            return base64_lines(written)
        has_end = line.endswith(CRLF)
        text = binascii.b2a_qp(line[:-2] if has_end else line, istext=True)
        return text.replace(b"=\n", b"=\r\n") + (CRLF if has_end else b"=\r\n")

    def _shorter(self, line: bytes) -> bytes:
        """Split an encoded line, or a part of it, into lines of at most `_ENCODED_LINE` characters."""
        if self._encoding == "base64":
            text = self._held + line.translate(None, b" \t\r\n")
            whole = len(text) // _ENCODED_LINE * _ENCODED_LINE
            self._held = text[whole:]
            return b"".join(text[at : at + _ENCODED_LINE] + CRLF for at in range(0, whole, _ENCODED_LINE))
        text, has_end = self._held + line.removesuffix(CRLF), line.endswith(CRLF)
        cut = _CUT_OCTET.search(text)
        self._held = cut[0] if cut and not has_end else b""
        soft_end = b"=" if not has_end or text.endswith(b"=") else b""
        text = text.removesuffix(soft_end if has_end else self._held)
        return _soft_lines(text) + soft_end + CRLF if text or has_end else b""

    def _ended(self, *, by_delimiter: bool) -> bytes:
        held, self._held = self._held, b""
        encoding, self._encoding = self._encoding, ""
        if self._is_encoded:
            return held + CRLF if held else b""
        if encoding != "base64":
            return b""
        return base64_lines(held.removesuffix(CRLF) if by_delimiter else held) or CRLF


def _with_encoding(block: bytes, encoding: bytes, *, only_present: bool = False) -> bytes:
    new = b"Content-Transfer-Encoding: " + encoding + CRLF
    changed, count = _ENCODING.subn(b"", block)
    return changed + new if count or not only_present else block


def _soft_lines(text: bytes) -> bytes:
    """Insert soft line breaks into a quoted-printable line, but not within an encoded byte or after a stray
    equals sign, which readers would combine with the break.
    """
    lines = []
    while len(text) >= _ENCODED_LINE:
        at = text.find(b"=", _ENCODED_LINE - 3, _ENCODED_LINE - 1)
        at = at if at >= 0 else _ENCODED_LINE - 1
        at = len(text[:at].rstrip(b"=")) or at
        lines.append(text[:at])
        text = text[at:]
    return b"=\r\n".join([*lines, text])
