"""Makes a message from its parts: text and HTML as alternatives, files attached. Pure.

Equal drafts give equal bytes, so a second attempt sends what the first may have sent. The result is ASCII
except for addresses with another local part, which need SMTPUTF8. The caller has checked the draft: no line
end in a field, and every address is valid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Protocol

import msgspec

from zonerelay.message.compose import mime
from zonerelay.message.header.headers import rfc5322_date
from zonerelay.model.envelope import Mailbox

_FOLD = 76


class Address(msgspec.Struct, frozen=True):
    """An email address with a display name. `name` is the display name, `""` for none."""

    mailbox: Mailbox
    name: str = ""

    def __str__(self) -> str:
        return f"{mime.phrase(self.name)} <{self.mailbox}>" if self.name else self.mailbox


class FileContent(Protocol):
    """The content of an attached file."""

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes, from the beginning at each call. Every piece but the last holds whole lines of
        base64, of 57 bytes. Raise Base64Error.
        """


class AttachedFile(msgspec.Struct, frozen=True):
    """An attached file. `content_type` is checked. With a `content_id` the HTML can show it."""

    name: str
    content_type: str
    content: FileContent
    content_id: str = ""


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """The parts from which a message is composed. `message_id` has its brackets, `created` is Unix time,
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
    """Yield the message. Files come in pieces, so that large ones need little memory. Raise Base64Error."""
    yield _header(draft).encode() + b"MIME-Version: 1.0\r\n"
    yield from _MultipartBody(draft).whole()


def _header(draft: Draft) -> str:
    date = rfc5322_date(draft.created)
    fields = [f"Date: {date}\r\n", f"Message-ID: {draft.message_id}\r\n", _addresses("From", [draft.author])]
    # RFC 5322 3.6 needs no destination field when only Bcc has recipients.
    fields += [_addresses(name, some) for name, some in (("To", draft.to), ("Cc", draft.cc)) if some]
    fields.append(mime.unstructured("Subject", draft.subject))
    for name, value in draft.headers:
        fields.append(mime.header(name, value) if isinstance(value, str) else _addresses(name, value))
    return "".join(fields)


def _addresses(name: str, addresses: Sequence[Address]) -> str:
    lines = [f"{name}: "]
    for at, address in enumerate(addresses):
        text = str(address) + ("," if at + 1 < len(addresses) else "")
        if len(lines[-1]) + len(text) > _FOLD and lines[-1].strip(" "):
            lines.append(" " + text)
        else:
            lines[-1] += text if lines[-1].endswith(" ") else f" {text}"
    return "\r\n".join(lines) + "\r\n"


class _MultipartBody:
    """A multipart body that is being composed. A boundary is a hash of what it separates, so that no text can
    contain its own.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._count = 0

    @cached_property
    def _digest(self) -> str:
        draft = self._draft
        digest = hashlib.blake2b(draft.message_id.encode(), digest_size=15)
        for text in (draft.text, draft.html):
            digest.update(b"\0" if text is None else text.encode())
        for file in draft.files:
            for piece in file.content.pieces():
                digest.update(piece)
        return digest.hexdigest()

    def whole(self) -> Iterable[bytes]:
        draft = self._draft
        shown = [file for file in draft.files if file.content_id and draft.html is not None]
        attached = [file for file in draft.files if file not in shown]
        content = self._content(shown)
        if not attached:
            return content
        return self._multipart("mixed", [content, *map(_attachment, attached)])

    def _content(self, shown: Sequence[AttachedFile]) -> Iterable[bytes]:
        draft = self._draft
        if draft.html is None:
            return [mime.text_part(draft.text or "", "plain")]
        html: Iterable[bytes] = [mime.text_part(draft.html, "html")]
        if shown:
            html = self._multipart("related", [html, *map(_attachment, shown)])
        if draft.text is None:
            return html
        return self._multipart("alternative", [[mime.text_part(draft.text, "plain")], html])

    def _multipart(self, subtype: str, parts: Sequence[Iterable[bytes]]) -> Iterable[bytes]:
        self._count += 1
        return mime.multipart(subtype, f"=_{self._count}_{self._digest}", parts)


def _attachment(file: AttachedFile) -> Iterator[bytes]:
    place = "inline" if file.content_id else "attachment"
    lines = [
        f"Content-Type: {file.content_type}",
        f"Content-Disposition: {place}{mime.parameter('filename', file.name) if file.name else ''}",
        "Content-Transfer-Encoding: base64",
    ]
    if file.content_id:
        lines.append(f"Content-ID: <{file.content_id}>")
    yield "\r\n".join([*lines, "", ""]).encode()
    for piece in file.content.pieces():
        yield mime.base64_lines(piece)
