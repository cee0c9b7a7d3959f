"""The idempotency key of a message: where it comes from, and what it makes the same message. No I/O.

A client names it in the field `Idempotency-Key` of the header, or the Message-ID is the key where the
listener or the user says so. `identity` is about who submits and the envelope, `ContentDigest` about what is
submitted.

Compared are From, To, Cc, Reply-To and Subject, and the body without its MIME boundaries: lines that begin
with "--" and have the length of a boundary, and what stands behind "boundary=". An application that composes
the message again makes another Date, other boundaries and perhaps another Message-ID.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from zonerelay.inbound.state.context import IDEMPOTENCY_KEY
from zonerelay.inbound.state.transaction import mailboxes
from zonerelay.message.header.headers import Fields
from zonerelay.model.address import Mailbox
from zonerelay.model.envelope import Envelope

MAX_KEY = 255
COMPARED = frozenset({"from", "to", "cc", "reply-to", "subject"})
DIGEST_SIZE = 16
BLOCK = 16 * 1024
"""Octets that are looked at together. Blocks begin where the content alone says, however it arrives."""

_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY}}}")
# RFC 2046 5.1.1: a boundary has at most 70 characters; a line of it two dashes in front, perhaps two behind.
_BOUNDARY_LINE = re.compile(rb"^--[^\r\n]{1,72}[ \t]*(?=\r?$)", re.MULTILINE)
_BOUNDARY_VALUE = re.compile(rb"(boundary=)[^\r\n]{1,100}", re.IGNORECASE)


def key_in(fields: Fields) -> str | None:
    """The key that the field names; `None` when there is none that can be used."""
    found = [value.strip() for name, value in fields if name.lower() == IDEMPOTENCY_KEY]
    return found[0] if len(found) == 1 and is_key(found[0]) else None


def is_key(text: str) -> bool:
    """Whether a client may name it as a key."""
    return _KEY.fullmatch(text) is not None


def message_id_in(fields: Fields) -> str:
    """The Message-ID; "" when there is none, or several."""
    found = [value.strip() for name, value in fields if name.lower() == "message-id"]
    return found[0] if len(found) == 1 else ""


def identity(kind: str, key: str, envelope: Envelope, named: Sequence[Mailbox] = ()) -> str:
    """Of two submissions with the same identity the second is a repetition.

    All clients that have not logged in are one submitter: an application may try again from another of its
    machines, and at another node, whose listeners have other addresses. `named` are the recipients that the
    client has named, where the mode of its user has put others in their place.
    """
    recipients = sorted({*(named or mailboxes(envelope.recipients))})
    parts = (kind, key, envelope.origin.user, envelope.sender, *recipients)
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
    for part in parts:
        octets = part.encode("utf-8", "surrogateescape")
        digest.update(b"%d:%b" % (len(octets), octets))
    return digest.hexdigest()


class ContentDigest:
    """Takes the body in pieces of any size."""

    def __init__(self, fields: Fields) -> None:
        self._digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
        self._rest = bytearray()
        for name, value in fields:
            if (lower := name.lower()) in COMPARED:
                self._digest.update(f"{lower}:{value.strip()}\n".encode("utf-8", "surrogateescape"))
        self._digest.update(b"\n")

    def feed(self, piece: bytes) -> None:
        self._rest += piece
        start = 0
        while len(self._rest) - start >= BLOCK:
            end = self._rest.rfind(b"\n", start, start + BLOCK) + 1 or start + BLOCK
            self._add(self._rest[start:end])
            start = end
        del self._rest[:start]

    def hexdigest(self) -> str:
        """The digest; nothing may be fed after it."""
        self._add(self._rest)
        self._rest = bytearray()
        return self._digest.hexdigest()

    def _add(self, block: bytearray) -> None:
        self._digest.update(_BOUNDARY_VALUE.sub(rb"\1", _BOUNDARY_LINE.sub(b"--", block)))
