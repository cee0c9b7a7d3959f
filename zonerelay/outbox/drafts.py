"""Creates an envelope and a draft from the columns of a row, or raises BadRowError.

The values of an application are checked like the commands of an SMTP client. The constants below limit
lengths and counts. Error texts name the column but contain no value of the row, so they can be stored and
logged.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import msgspec

from zonerelay.message.compose import Address, AttachedFile, Base64Text, Draft, FieldValueError, header
from zonerelay.model.address_list import read_addresses
from zonerelay.model.envelope import Mailbox, domain_of
from zonerelay.routing.addresses import ascii_domain, is_literal
from zonerelay.smtp.server.paths import CommandError, forward_path

MAX_RECIPIENTS = 1000
MAX_NAME = 256
MAX_SUBJECT = 2000
MAX_HEADERS = 100
MAX_HEADER = 8000
MAX_FILES = 100
MAX_FILE_NAME = 255

_FIELD_NAME = re.compile(r"[!-9;-~]{1,76}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\u0085\u2028\u2029]")
_MESSAGE_ID = re.compile(r"<[!-;=?A-~]{1,200}@[!-;=?A-~]{1,200}>")
_CONTENT_ID = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~.@-]{1,200}")
_CONTENT_TYPE = re.compile(
    r"[A-Za-z0-9!#$&^_.+-]{1,64}/[A-Za-z0-9!#$&^_.+-]{1,96}"
    r"(?:; ?[A-Za-z0-9_-]{1,32}=(?:\"[ !#-\[\]-~]{0,80}\"|[A-Za-z0-9_.+-]{1,80})){0,4}"
)
# The relay sets these fields itself, or they would change the recipients or how the message is read.
_OURS = frozenset(
    (
        *("from", "to", "cc", "bcc", "subject", "date", "mime-version"),
        *("received", "return-path", "dkim-signature"),
    )
)
_OURS_IN_FRONT = ("content-", "resent-")


_SHAPE = '[{"filename": "a.pdf", "content_type": "application/pdf", "content": "base64…"}]'
_LOOK_AT = 64 * 1024


class BadRowError(Exception):
    """The row is invalid and can never be sent. The text names the column and the reason, without the
    value.
    """


class RowRecipients(msgspec.Struct, frozen=True):
    """The recipients of an outbox row. `everybody` has each of them once, in the order of the columns; `to`
    and `cc` are for the header.
    """

    author: Address
    sender: Mailbox
    to: tuple[Address, ...]
    cc: tuple[Address, ...]
    everybody: tuple[Mailbox, ...]


class RowContent(msgspec.Struct, frozen=True):
    """The content columns of an outbox row, unparsed, in the order of the SQL statements. `headers` and
    `attachments` are JSON, the latter in UTF-8.
    """

    subject: str | None = None
    text: str | None = None
    html: str | None = None
    headers: str | None = None
    attachments: bytes | None = None


class _RowFile(msgspec.Struct):
    """An attachment of an outbox row."""

    content: msgspec.Raw
    filename: str = ""
    content_type: str = "application/octet-stream"
    content_id: str = ""


def recipients_of(row: Mapping[str, object]) -> RowRecipients:
    """Return the author and the recipients of a row. Raises BadRowError."""
    author = address(_text(row.get("from_address")) or _text(row.get("mailbox_address")), "from_address")
    to = _addresses(row, "to_addresses")
    cc = _addresses(row, "cc_addresses")
    bcc = _addresses(row, "bcc_addresses")
    everybody = tuple(dict.fromkeys(each.mailbox for each in (*to, *cc, *bcc)))
    if not everybody:
        raise BadRowError("to_addresses, cc_addresses and bcc_addresses contain no recipient")
    if len(everybody) > MAX_RECIPIENTS:
        raise BadRowError(f"the message has more than {MAX_RECIPIENTS} recipients")
    sender = _text(row.get("sender"))
    return RowRecipients(
        author, address(sender, "sender").mailbox if sender else author.mailbox, to, cc, everybody
    )


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""


def _addresses(row: Mapping[str, object], column: str) -> tuple[Address, ...]:
    values = cast("Sequence[object] | None", row.get(column)) or ()  # text[] in the database
    if not all(value is None or isinstance(value, str) for value in values):
        raise BadRowError(f"{column} must be a one-dimensional list")
    texts = (value if isinstance(value, str) else "" for value in values)
    return tuple(each for text in texts for each in addresses(text, column))


def address(text: str, column: str) -> Address:
    """Parse `a@b.example` or `Name <a@b.example>`. Domains become A-labels. Raises BadRowError."""
    name, opening, _ = text.rpartition("<")
    if opening and "@" not in name and re.search("[,;:]", name) and '"' not in name:
        quoted = name.strip().replace("\\", r"\\")
        text = f'"{quoted}" <{text[len(name) + 1 :]}'  # a name that lacks its quotes
    found = addresses(text, column)
    if len(found) > 1:
        raise BadRowError(f"{column} must contain exactly one address, but has {len(found)}")
    return found[0]


def addresses(text: str, column: str) -> tuple[Address, ...]:
    """Parse a list of at least one address, separated by commas or semicolons. Raises BadRowError."""
    if _CONTROL.search(text):
        raise BadRowError(f"{column} contains a line end or another control character")
    entries = read_addresses(text).entries
    for at, entry in enumerate(entries, 1):
        if "@" not in entry.address:
            where = f"{column} contains no address" + (
                f" at position {at} of {len(entries)}" if at > 1 or len(entries) > 1 else ""
            )
            raise BadRowError(
                f'{where}: expected a@b.example, Name <a@b.example> or "Name, Title" <a@b.example>'
            )
    if not entries:
        raise BadRowError(f"{column} contains no address; expected a@b.example or Name <a@b.example>")
    if any(len(each.name) > MAX_NAME for each in entries):
        raise BadRowError(f"{column} contains a name of more than {MAX_NAME} characters")
    return tuple(Address(mailbox(each.address, column), each.name) for each in entries)


def mailbox(text: str, column: str) -> Mailbox:
    """Check the address `local@domain`, and return it for SMTP, with its domain as A-labels. Raises
    BadRowError.
    """
    try:
        found, behind = forward_path(f"<{text}>")
        if behind or "@" not in found:
            raise BadRowError(f"{column} contains no address; expected a@b.example or Name <a@b.example>")
        local, _, domain = found.rpartition("@")
        if not domain.isascii() and not is_literal(domain):
            found = Mailbox(f"{local}@{ascii_domain(domain)}")
    except (CommandError, ValueError) as error:
        words = error.reply.text if isinstance(error, CommandError) else str(error)
        raise BadRowError(f"{column} contains an invalid address: {words}") from None
    return found


def draft_of(row: int, created: float, people: RowRecipients, content: RowContent) -> Draft:
    """Create the draft of a row's message. Raises BadRowError. Invalid base64 of files is only found when the
    message is composed.
    """
    subject = checked_subject(content.subject or "")
    headers = dict(_headers(content.headers))
    given = headers.pop("Message-ID", None)
    stamp = f"{row:x}.{int(created * 1_000_000):x}.outbox"
    return Draft(
        message_id=given if isinstance(given, str) else f"<{stamp}@{domain_of(people.author.mailbox)}>",
        created=created,
        author=people.author,
        to=people.to,
        cc=people.cc,
        subject=subject,
        text=checked_text(content.text, "text"),
        html=checked_text(content.html, "html"),
        headers=tuple(headers.items()),
        files=tuple(_files(content.attachments)),
    )


def _headers(json: str | None) -> Iterator[tuple[str, str | Sequence[Address]]]:
    if json is None:
        return iter(())
    try:
        found = msgspec.json.decode(json, type=dict[str, str] | None) or {}
    except (msgspec.MsgspecError, RecursionError):
        raise BadRowError(
            'headers must be a JSON object of strings, such as {"Reply-To": "a@b.example"}'
        ) from None
    checked = HeaderFields().checked
    return (field for name, value in found.items() if (field := checked(name, value)) is not None)


class HeaderFields:
    """Checks the additional header fields of one message one by one, and rejects repeated ones."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def checked(self, name: str, value: str) -> tuple[str, str | Sequence[Address]] | None:
        """Return the checked field, or `None` if only the relay may set it. Raises BadRowError."""
        key = name.lower()
        _check_header(name, key, value)
        if key in self._seen:
            raise BadRowError("headers contains a field twice")
        self._seen.add(key)
        if len(self._seen) > MAX_HEADERS:
            raise BadRowError(f"the column headers contains more than {MAX_HEADERS} fields")
        where = f"headers: {name}"
        if key == "idempotency-key":
            return None
        if key == "message-id":
            if not _MESSAGE_ID.fullmatch(value):
                raise BadRowError("the column headers contains an invalid Message-ID; use <left@right>")
            return "Message-ID", value
        if key == "reply-to":
            return name, addresses(value, where)
        return name, [address(value, where)] if key == "sender" else value


def _check_header(name: str, key: str, value: str) -> None:
    if not _FIELD_NAME.fullmatch(name):
        raise BadRowError("headers contains an invalid field name")
    if key in _OURS or key.startswith(_OURS_IN_FRONT):
        raise BadRowError(f"headers must not contain {name}, which the relay creates from the other columns")
    if _CONTROL.search(value):
        raise BadRowError(f"headers: {name} contains a line end or another control character")
    if len(value) > MAX_HEADER:
        raise BadRowError(f"headers: {name} is too long")
    try:
        header(name, value)
    except FieldValueError as error:
        raise BadRowError(f"headers: {name} {error}") from None


def _files(json: bytes | None) -> Iterator[AttachedFile]:
    if json is None:
        return
    try:
        found = msgspec.json.decode(json, type=list[_RowFile] | None) or []
    except (msgspec.MsgspecError, RecursionError):
        raise BadRowError(f"attachments must be a JSON list such as {_SHAPE}") from None
    if len(found) > MAX_FILES:
        raise BadRowError(f"attachments has more than {MAX_FILES} files")
    for at, file in enumerate(found):
        yield _file(file, f"attachments[{at}]")


def _file(file: _RowFile, where: str) -> AttachedFile:
    content = Base64Text(_text_of(file.content), f"{where}.content")
    return checked_file(AttachedFile(file.filename, file.content_type, content, file.content_id), where)


def checked_file(file: AttachedFile, where: str) -> AttachedFile:
    """Return the file if its type and name are valid in header fields. Raises BadRowError."""
    kind = file.content_type.lower()
    if not _CONTENT_TYPE.fullmatch(file.content_type) or kind.startswith(("multipart/", "message/")):
        raise BadRowError(f"{where}.content_type is not a media type such as application/pdf")
    if len(file.name) > MAX_FILE_NAME or _CONTROL.search(file.name):
        raise BadRowError(f"{where}.filename is too long or contains a control character")
    if file.content_id and not _CONTENT_ID.fullmatch(file.content_id):
        raise BadRowError(f"{where}.content_id contains invalid characters")
    return file


def checked_subject(subject: str) -> str:
    """Return the subject if it is valid in a header field. Raises BadRowError."""
    if _CONTROL.search(subject):
        raise BadRowError("subject contains a line end or another control character")
    if len(subject) > MAX_SUBJECT:
        raise BadRowError(f"subject has more than {MAX_SUBJECT} characters")
    return subject


def checked_text(text: str | None, column: str) -> str | None:
    """Check and return the text of a column. Raises BadRowError if it contains NUL, which is invalid in
    messages (RFC 5322 4) and which receivers reject.
    """
    if text is not None and "\0" in text:
        raise BadRowError(f"{column} contains a NUL, which is not allowed in messages")
    return text


def _text_of(json: msgspec.Raw) -> bytes | memoryview:
    """Return the content of a JSON string as bytes. It is a view of the input unless the string has
    escapes.
    """
    view = memoryview(json)
    if bytes(view[:1]) != b'"':
        raise BadRowError(f"attachments must be a JSON list such as {_SHAPE}")
    if any(b"\\" in bytes(view[at : at + _LOOK_AT]) for at in range(0, len(view), _LOOK_AT)):
        return msgspec.json.decode(json, type=str).encode()
    return view[1:-1]
