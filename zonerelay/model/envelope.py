"""Defines the envelope of a message: its sender, its recipients and its origin (RFC 5321 2.3.1).

An envelope is written once, at acceptance, and never changes. What changes for a recipient
(attempts, next attempt, last reply) is a `Delivery`.
"""

from __future__ import annotations

import enum

import msgspec

from zonerelay.model.address import Mailbox
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import Priority


class Notify(enum.IntFlag):
    """The NOTIFY parameter of RCPT (RFC 3461 4.1). `UNSET` means the client did not say: failures and delays
    are reported.
    """

    UNSET = 0
    NEVER = 1
    SUCCESS = 2
    FAILURE = 4
    DELAY = 8


class Ret(enum.StrEnum):
    """The RET parameter of MAIL (RFC 3461 4.3): how much of the message a failure report returns."""

    UNSET = ""
    FULL = "FULL"
    HDRS = "HDRS"


class BodyType(enum.StrEnum):
    """The BODY parameter of MAIL (RFC 6152)."""

    SEVEN_BIT = "7BIT"
    EIGHT_BIT = "8BITMIME"


TAG, METADATA = "tag=", "metadata."
"""How the notes of `Message.trace` begin that an application gave."""


class Recipient(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted recipient with its DSN parameters (`orcpt` is the raw `type;xtext`, `""` if absent)."""

    address: Mailbox
    notify: Notify = Notify.UNSET
    orcpt: str = ""


OUTBOX = "outbox"
"""`Origin.protocol` of messages that were rows."""


class Origin(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The origin of a message, for the Received header, the trace and routing, but never for metrics.

    `certificate` is the SHA-256 fingerprint of the client's, `""` when it showed none. `stranger`: a client
    that may not relay, whose mail was taken for a sender that SRS has made.
    """

    client_address: str = ""
    client_port: int = 0
    helo: str = ""
    protocol: str = "ESMTP"
    listener: str = ""
    user: str = ""
    tls: str = ""
    certificate: str = ""
    stranger: bool = False


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """The immutable envelope of one message. `created` is Unix time in seconds. `require_tls`: it is sent on
    over TLS alone, to servers that prove who they are.
    """

    id: MessageId
    sender: Mailbox
    recipients: tuple[Recipient, ...]
    created: float
    body: BodyType = BodyType.SEVEN_BIT
    smtputf8: bool = False
    ret: Ret = Ret.UNSET
    envid: str = ""
    origin: Origin = Origin()
    priority: Priority = Priority.NORMAL
    require_tls: bool = False


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A stored message: its envelope, and the properties of its body.

    `size` is the stored size in bytes (CRLF line ends, no dot-stuffing, our own header fields
    included); `headers` are the fields in order, values unfolded and decoded for people, capped;
    `plain_lines`: the body was seen to have CRLF line ends only, no line that begins with a dot and no
    NUL, so that it can be sent as it is; false when it is not known.
    `long_lines`: a line was seen to be longer than the 998 bytes that every host takes.
    `body_hash` is the base64 SHA-256 of the body in DKIM's relaxed form (RFC 6376 3.4.4), `""` when no zone
    computed it.
    `trace` are notes made at acceptance (`"listener=… bare_lf=3"`), for `queue trace`.
    """

    envelope: Envelope
    size: int
    chunks: int
    eight_bit: bool = False
    plain_lines: bool = False
    long_lines: bool = False
    body_hash: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    trace: tuple[str, ...] = ()

    @property
    def id(self) -> MessageId:
        return self.envelope.id

    @property
    def tags(self) -> list[str]:
        """Tags that the application has set for searching."""
        return [note.removeprefix(TAG) for note in self.trace if note.startswith(TAG)]

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata that the application has set and that is returned to it."""
        found = (
            note.removeprefix(METADATA).partition("=") for note in self.trace if note.startswith(METADATA)
        )
        return {name: value for name, _, value in found}

    def header(self, name: str) -> str:
        """Return the first value of a header field by case-insensitive name, `""` when absent."""
        wanted = name.lower()
        return next((value for key, value in self.headers if key.lower() == wanted), "")
