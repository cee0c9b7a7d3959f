"""Encodes and decodes the objects of a bucket: the keys, the head of each message, the leases.

    PREFIX queue/ID           a message: one line of JSON (`Head`), and behind it the body if it is small
    PREFIX body/ID-SESSION    a larger body
    PREFIX nodes/NN           the lease of the relay with that number
    PREFIX format             the version of all this, and the oldest that can work with it (`1 1`)
    PREFIX mark               by which relays know the queue again (common/queue_mark.py)
    PREFIX probe/…            objects that the start writes to learn which conditions the service has

A message exists when `queue/ID` does and has deliveries. A head without any is what a removal leaves for a
moment where the service cannot remove on a condition; or a *refusal*, which stands in the way of a write
that was given up and may come late. What cannot be read raises StoreCorruptError.

A head is written again with each change, perhaps by an older version than the one that wrote it: members
that this version does not know, of the head and of the message in it, are kept. An intent is carried out
and forgotten by the relay that finds it; what an older version could not carry out needs another format,
which is only written when no relay of an older version is alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from zonerelay.model.address import Mailbox
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId, is_message_id
from zonerelay.store.common import records
from zonerelay.store.contract import StoreCorruptError, StoreError

FORMAT = 1
OLDEST_FORMAT = 1
"""Relays of that version still work with what this one stores."""
VERSIONS = b"%d %d" % (FORMAT, OLDEST_FORMAT)
INLINE_LIMIT = 256 * 1024
"""Bodies up to this size lie behind their heads: one request less to take and to remove them, and nothing is
paid for the octets that a deferral writes again."""
HEAD_GUESS = 16 * 1024
"""Octets that are asked for when only a head is wanted."""


class DeliveryRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One delivery: its zone, its recipient as in every spool's keys, and its record."""

    zone: str
    recipient: str
    record: msgspec.Raw


GONE = msgspec.Raw(b"null")
"""A union of Raw and None cannot be decoded."""


class Step(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What an intent does to a delivery of another message, unless it has been tried since. `record` is the
    new one, or `GONE`.
    """

    message_id: str
    zone: str
    recipient: str
    attempts: int
    record: msgspec.Raw


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message that an intent makes. `inline` is its body, if it is not in an object of its own."""

    message: msgspec.Raw
    deliveries: tuple[DeliveryRow, ...]
    body: str = ""
    inline: bytes = b""

    @property
    def message_id(self) -> MessageId:
        return _decode_message(self.message).envelope.id

    def head(self, owner: str) -> Head:
        """Returns the first head of the message. Raises StoreCorruptError."""
        message = records.decode_message(self.message_id, bytes(self.message))
        return Head(
            format=FORMAT,
            owner=owner,
            rev=1,
            message=message,
            deliveries=self.deliveries,
            body=self.body,
            kept=_kept({"message": self.message}, message),
        )


class HeadIntent(msgspec.Struct, frozen=True, omit_defaults=True):
    """What else has been decided with the state of this message, and is to be done to its end."""

    reports: tuple[Report, ...] = ()
    steps: tuple[Step, ...] = ()


class _Known(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What this version reads in a head."""

    format: int = 0
    owner: str = ""
    rev: int = 0
    message: Message | None = None
    deliveries: tuple[DeliveryRow, ...] = ()
    body: str = ""
    intent: HeadIntent | None = None
    refused: float = 0.0

    @property
    def is_over(self) -> bool:
        return not self.deliveries and self.intent is None


class Head(_Known, frozen=True, omit_defaults=True, kw_only=True):
    """`owner` is the session of the relay that has it, "" when it is left to a relay with room. `rev` grows
    with each write, so that no two versions of it are alike. `refused` is when a refusal was written.
    `kept` is what a newer version has written (JSON): members of the head, and first of them `message`, if
    there is something unknown in that.
    """

    kept: bytes = b""


class LeaseRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a relay says of itself. `state` is live, ended (it has stopped) or dead (others have found so).

    `beat` grows with each renewal, `offers` with each message that was left to others. `counts` are ready,
    deferred, held by zone; `oldest` when the first of each was accepted.
    """

    session: str = ""
    state: str = "live"
    beat: int = 0
    offers: int = 0
    last_id: str = ""
    counts: dict[str, tuple[int, int, int]] = {}
    oldest: dict[str, float] = {}


_encode = msgspec.json.Encoder().encode
_decode_head = msgspec.json.Decoder(_Known).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_message = msgspec.json.Decoder(Message).decode
_MEMBERS = frozenset(_Known.__struct_fields__)
_MESSAGE_FIRST = b'{"message":'
_decode_lease = msgspec.json.Decoder(LeaseRecord).decode


class Keys:
    """The keys of all objects below one prefix."""

    def __init__(self, prefix: str) -> None:
        self.queue = f"{prefix}queue/"
        self.bodies = f"{prefix}body/"
        self.nodes = f"{prefix}nodes/"
        self.probes = f"{prefix}probe/"
        self.format = f"{prefix}format"
        self.mark = f"{prefix}mark"

    def message(self, message_id: MessageId) -> str:
        return self.queue + message_id

    def body(self, message_id: MessageId, session: str) -> str:
        return f"{self.bodies}{message_id}-{session}"

    def node(self, number: int) -> str:
        return f"{self.nodes}{number:02x}"

    def message_of(self, key: str) -> MessageId | None:
        """Returns the message of a key, `None` for an object that is no message."""
        name = key.removeprefix(self.queue)
        return MessageId(name) if is_message_id(name) else None

    def upload_of(self, key: str) -> tuple[MessageId, str] | None:
        """Returns the message and the session that a body belongs to."""
        name, _, session = key.removeprefix(self.bodies).partition("-")
        return (MessageId(name), session) if is_message_id(name) and session else None

    def number_of(self, key: str) -> int | None:
        name = key.removeprefix(self.nodes)
        return int(name, 16) if len(name) == 2 and set(name) <= set("0123456789abcdef") else None


def encode_head(head: Head) -> bytes:
    try:
        if not head.kept:
            return _encode(head) + b"\n"
        message = None if head.kept.startswith(_MESSAGE_FIRST) else head.message
        encoded = _encode(msgspec.structs.replace(head, message=message, kept=b""))
        return b"%b,%b\n" % (encoded[:-1], head.kept[1:])
    except (UnicodeError, TypeError, msgspec.MsgspecError) as error:
        raise StoreError(f"the message cannot be written as JSON: {error}") from error


def decode_head(name: str, line: bytes) -> Head:
    try:
        known = _decode_head(line)
        # Nearly always there is nothing else in it.
        kept = b"" if _encode(known) == line.rstrip(b"\n") else _kept(_decode_members(line), known.message)
        for report in known.intent.reports if known.intent is not None else ():
            report.head(known.owner)
    except (ValueError, msgspec.MsgspecError) as error:
        raise StoreCorruptError(f"{name}: unreadable: {error}") from error
    if known.format > FORMAT:
        raise StoreCorruptError(f"{name} has format {known.format}, this version reads up to {FORMAT}")
    return Head(**msgspec.structs.asdict(known), kept=kept)


def _kept(members: Mapping[str, msgspec.Raw], message: Message | None) -> bytes:
    kept = {name: value for name, value in members.items() if name not in _MEMBERS}
    raw = members.get("message")
    if message is not None and raw is not None and bytes(raw) != _encode(message):
        kept = {"message": raw, **kept}
    return _encode(kept) if kept else b""


def encode_lease(lease: LeaseRecord) -> bytes:
    return _encode(lease)


def decode_lease(data: bytes) -> LeaseRecord:
    """A lease that cannot be read belongs to no living relay."""
    try:
        return _decode_lease(data)
    except (ValueError, msgspec.MsgspecError):
        return LeaseRecord(state="dead")


def recipient_field(key: DeliveryKey) -> str:
    return records.field(key.recipient).decode("ascii")


def rows(deliveries: Iterable[Delivery]) -> tuple[DeliveryRow, ...]:
    """Raises StoreError."""
    return tuple(
        DeliveryRow(
            records.field(d.queue.text).decode("ascii"),
            records.field(d.recipient).decode("ascii"),
            msgspec.Raw(records.encode_delivery(d)),
        )
        for d in deliveries
    )


def key_of(message_id: str, row: DeliveryRow | Step) -> DeliveryKey:
    queue = records.queue_in(row.zone.encode("ascii"))
    recipient = records.unfield(row.recipient.encode("ascii"))
    return DeliveryKey(queue, MessageId(message_id), Mailbox(recipient))


def deliveries_of(message_id: MessageId, found: Iterable[DeliveryRow]) -> dict[DeliveryKey, Delivery]:
    """Raises StoreCorruptError."""
    keyed = ((key_of(message_id, row), row) for row in found)
    return {key: records.decode_record(key, bytes(row.record)) for key, row in keyed}
