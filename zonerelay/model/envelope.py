"""Defines the envelope of a message: its id, its sender, its recipients and its origin (RFC 5321 2.3.1).

An envelope is written once, at acceptance, and never changes. What changes for a recipient
(attempts, next attempt, last reply) is a `Delivery`.

A `Mailbox` is text that has passed the RFC 5321 path parser in `zonerelay.smtp.server.params`
(`local@domain`, the local part in the form the client sent it, quotes included).
Nothing else may build one, so no other module checks one again. The null reverse-path is
`NULL_SENDER`, the empty string: RFC 5321 4.5.5 writes it `<>`, which `path()` restores.

Ids of messages have a fixed width, strictly increase, and can be sorted as text:

    019aa1f2b3c 01f 00        11 hex digits of milliseconds, 3 of sequence, 2 of worker (written together)

An id that begins with `f` is the number of a row of the outbox. Those of a spool get there in the year 2515.

The order of ids is the order of acceptance within one worker, so iterating a spool in key order
delivers the oldest mail first. Ids never go backwards: when the clock steps back the last
millisecond is kept and the sequence counts on; `last` carries that promise over a restart.
"""

import enum
from collections.abc import Iterable
from typing import NewType

import msgspec

from zonerelay.model.clock import Clock

Mailbox = NewType("Mailbox", str)

NULL_SENDER = Mailbox("")


def local_part(mailbox: Mailbox) -> str:
    """Return the part of an address before the last `@`, or the whole text of `postmaster` alone."""
    return mailbox.rpartition("@")[0] or mailbox


def domain_of(mailbox: Mailbox) -> str:
    """Return the domain of an address in lower case, as sent (U-label or A-label), or `""` if it has none.

    The last `@` is the right one: RFC 5321 4.1.2 lets a quoted local part hold others.
    """
    at = mailbox.rfind("@")
    return "" if at < 0 else mailbox[at + 1 :].lower()


def path(mailbox: Mailbox) -> str:
    """Return an address as an RFC 5321 path, in angle brackets."""
    return f"<{mailbox}>"


def recipient_key(mailbox: Mailbox) -> str:
    """Return the address with its domain in lower case, so that spellings of the same mailbox are equal."""
    local, at, domain = mailbox.rpartition("@")
    return f"{local}{at}{domain.lower()}"


MessageId = NewType("MessageId", str)

LENGTH = 16
MAX_WORKERS = 256
_SEQUENCE_BITS = 12
_ROW = "f"
MAX_ROW = 2**60 - 1


class MessageIdSource:
    """Generates message ids for one worker. It is not thread-safe: one event loop owns it."""

    def __init__(self, clock: Clock, worker: int = 0, last: MessageId | None = None) -> None:
        self._clock = clock
        self._counter = int(last[:-2], 16) if last else 0
        self.renumber(worker)

    def renumber(self, worker: int) -> None:
        """Generate ids with this worker number from now on."""
        if not 0 <= worker < MAX_WORKERS:
            raise ValueError(f"worker must be 0 to {MAX_WORKERS - 1}, not {worker}")
        self._suffix = f"{worker:02x}"

    def next(self) -> MessageId:
        # Milliseconds and sequence are one integer, so a full sequence carries into the next millisecond.
        self._counter = max(self._counter + 1, int(self._clock.now() * 1000) << _SEQUENCE_BITS)
        return MessageId(f"{self._counter:014x}{self._suffix}")


def first_at(now: float) -> MessageId:
    """Return the smallest possible message id of this Unix time: earlier ids are not larger, later ones not
    smaller.
    """
    return MessageId(f"{int(now * 1000) << _SEQUENCE_BITS:014x}00")


def row_id(row: int) -> MessageId:
    return MessageId(f"{_ROW}{row:0{LENGTH - 1}x}")


def is_row(message_id: MessageId) -> bool:
    return message_id.startswith(_ROW)


def row_of(message_id: MessageId) -> int:
    return int(message_id[1:], 16)


def is_message_id(text: str) -> bool:
    return len(text) == LENGTH and all(c in "0123456789abcdef" for c in text)


class Priority(enum.StrEnum):
    """The priority of a message."""

    HIGH = "high"
    NORMAL = "normal"
    BULK = "bulk"


class Notify(enum.IntFlag):
    """The NOTIFY parameter of RCPT (RFC 3461 4.1). `UNSET` means that the client did not specify it: failures
    and delays are reported.
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


def mailboxes(recipients: Iterable[Recipient]) -> tuple[Mailbox, ...]:
    return tuple(recipient.address for recipient in recipients)


OUTBOX = "outbox"
"""`Origin.protocol` of messages that were rows."""


class Origin(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The origin of a message, for the Received header, the trace and routing, but never for metrics.

    `certificate` is the SHA-256 fingerprint of the client's certificate, or `""`. With `stranger`, the client
    may not relay, and its mail was accepted because it is for an SRS address.
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
    """The immutable envelope of one message. `created` is Unix time in seconds. With `require_tls`, the
    message is sent only over TLS and to verified servers.
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

    `size` is the stored size in bytes (CRLF line ends, no dot-stuffing, our own header fields included);
    `headers` are the fields in order, with values unfolded, decoded for display and limited in length;
    `plain_lines` means that the body is known to have only CRLF line ends, no line that begins with a dot and
    no NUL, so that it can be sent unchanged. `long_lines` means that a line is longer than the 998 bytes that
    every host must accept. `body_hash` is the base64 SHA-256 of the body in DKIM's relaxed form (RFC 6376
    3.4.4), `""` when no zone computed it. `trace` are notes made at acceptance (`"listener=… bare_lf=3"`),
    for `queue trace`.
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
        """The tags that the application has set for searching."""
        return [note.removeprefix(TAG) for note in self.trace if note.startswith(TAG)]

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata that the application has set, which responses and webhook events return."""
        found = (
            note.removeprefix(METADATA).partition("=") for note in self.trace if note.startswith(METADATA)
        )
        return {name: value for name, _, value in found}

    def header(self, name: str) -> str:
        """Return the first value of a header field by its name, ignoring case, or `""` if there is none."""
        wanted = name.lower()
        return next((value for key, value in self.headers if key.lower() == wanted), "")
