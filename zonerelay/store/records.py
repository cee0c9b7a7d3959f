"""Defines the keys of the spool's records, and the JSON of their values.

Keys are ASCII, and one space separates their fields, so the scan of a prefix never reaches another zone,
domain or message. Characters that could break this (space, `%`, control and non-ASCII characters) are
percent-encoded. The order of keys is the order of work: message ids and due times have a fixed width.

Data that never changes (envelope, headers, size) is in `message {ID} *`. Data that changes is in small
delivery records; their values do not repeat the fields of the key. A record that cannot be read raises
StoreCorruptError with its key; no value is guessed. Members that this version does not know are kept when it
rewrites a record, because a newer version may share the store.
"""

import functools
import re
import urllib.parse

import msgspec
from msgspec import structs

from zonerelay.model.delivery import Delivery, DeliveryKey, QueueKind, QueueName, parse_queue, webhook_queue
from zonerelay.model.envelope import Mailbox, Message, MessageId, Notify
from zonerelay.model.reply import Attempt
from zonerelay.store.contract import StoreCorruptError, StoredKey, StoreError

FORMAT_VERSION = b"1"

META_FORMAT = b"meta format"
META_LAST_ID = b"meta last-id"
META_PROBE = b"meta probe"
# Keys below `meta`, because older releases count those neither as mail nor as damage.
ONCE_PREFIX = b"meta once "
ONCE_UNTIL_PREFIX = b"meta once-until "

MESSAGE_PREFIX = b"message "
DELIVERY_PREFIX = b"delivery-zone "
WEBHOOK_PREFIX = b"delivery-webhook "
"""The prefix sorts right before `DELIVERY_PREFIX`, so that both form one range."""
DEFERRED_PREFIX = b"deferred-zone "
DOMAIN_PREFIX = b"delivery-domain "
REQUEST_PREFIX, ANSWER_PREFIX = b"request ", b"answer "
"""Requests between nodes and their answers."""

_UNSAFE = re.compile("[^!-$&-~]")
_SAFE = frozenset(range(0x21, 0x7F)) - {ord("%")}
# Seven decimals distinguish any two floats of this century, so the index has exactly the order of the
# records.
_TIME_WIDTH = 18
_MAX_TIME = 9_999_999_999.0


@functools.lru_cache(maxsize=4096)
def field(text: str) -> bytes:
    """Encode a string as one field of a key. The cache pays off because a recipient is encoded at acceptance,
    at the end, and often in later messages.
    """
    if _UNSAFE.search(text) is None:
        return text.encode("ascii")
    raw = text.encode("utf-8", "surrogateescape")
    return b"".join(b"%c" % octet if octet in _SAFE else b"%%%02X" % octet for octet in raw)


def unfield(raw: bytes) -> str:
    if b"%" not in raw:
        return raw.decode("ascii")
    return urllib.parse.unquote_to_bytes(raw).decode("utf-8", "surrogateescape")


def after(prefix: bytes) -> bytes:
    """Return the first key after all keys that start with `prefix`, which ends in a space."""
    return prefix[:-1] + b"!"


# --- messages


def message_prefix(message_id: MessageId) -> bytes:
    return b"message %b " % message_id.encode("ascii")


def chunk_key(message_id: MessageId, number: int) -> bytes:
    """Return the key of one chunk of a body. The first chunk of a body is number 1."""
    return b"message %b %06d" % (message_id.encode("ascii"), number)


def message_keys(message_id: MessageId, chunks: int = 0) -> list[bytes]:
    """Return all keys of a message: its `exists_key`, its `metadata_key` and the keys of its chunks."""
    prefix = b"message %b " % message_id.encode("ascii")
    keys = [prefix + b"#", prefix + b"*"]
    for number in range(1, chunks + 1):
        keys.append(b"%b%06d" % (prefix, number))
    return keys


def exists_key(message_id: MessageId) -> bytes:
    return b"message %b #" % message_id.encode("ascii")


def metadata_key(message_id: MessageId) -> bytes:
    return b"message %b *" % message_id.encode("ascii")


def open_count_key(message_id: MessageId) -> bytes:
    """Return the key under which a message's number of open deliveries is stored. The record is absent while
    each recipient of the envelope has an open delivery.
    """
    return b"meta open %b" % message_id.encode("ascii")


def parse_count(message_id: MessageId, raw: bytes) -> int:
    try:
        return int(raw)
    except ValueError as error:
        raise StoreCorruptError(f"message {message_id}: unreadable open count {_shown(raw[:20])}") from error


_encode = msgspec.json.Encoder().encode
_decode_message = msgspec.json.Decoder(Message).decode


def encoded(what: str, value: object) -> bytes:
    """Encode a value as JSON. Raises StoreError that names the value by `what`."""
    try:
        return _encode(value)
    except (UnicodeError, TypeError, msgspec.MsgspecError) as error:
        raise StoreError(f"{what} cannot be written as JSON: {error}") from error


def decode_message(message_id: MessageId, raw: bytes) -> Message:
    try:
        return _decode_message(raw)
    except (ValueError, msgspec.MsgspecError) as error:
        raise StoreCorruptError(f"message {message_id}: unreadable metadata: {error}") from error


# --- deliveries


class DeliveryRecord(msgspec.Struct, omit_defaults=True, frozen=True, gc=False):
    """A delivery as it is stored: the fields of `Delivery` between its key and `unknown`, in the same
    order.
    """

    created: float
    attempts: int = 0
    next_attempt: float = 0.0
    held: bool = False
    warned: bool = False
    notify: int = Notify.UNSET  # as in `Delivery`, because only the same object is omitted
    orcpt: str = ""
    last: Attempt | None = None
    act: str = ""


class DeliveryStatus(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fields of a delivery record that determine its state and age. The others are skipped."""

    created: float
    next_attempt: float = 0.0
    held: bool = False


# A table, because calling an IntFlag class takes as long as the rest of the decoding.
_NOTIFY = tuple(Notify(value) for value in range(16))
_NOTIFY_MASK = 15

_decode_record = msgspec.json.Decoder(DeliveryRecord).decode
_KNOWN = frozenset(DeliveryRecord.__struct_fields__)
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_status = msgspec.json.Decoder(DeliveryStatus).decode


@functools.lru_cache(maxsize=1024)
def queue_prefix(queue: QueueName) -> bytes:
    if not queue.is_mail:
        name = queue.zone if queue.kind is QueueKind.WEBHOOK else queue.text
        return WEBHOOK_PREFIX + field(name) + b" "
    return DELIVERY_PREFIX + field(queue.text) + b" "


@functools.lru_cache(maxsize=1024)
def deferred_prefix(queue: QueueName) -> bytes:
    return DEFERRED_PREFIX + field(queue.text) + b" "


def domain_prefix(queue: QueueName, domain: str) -> bytes:
    return b"%b%b %b " % (DOMAIN_PREFIX, field(queue.text), field(domain))


def delivery_key(key: DeliveryKey) -> bytes:
    queue, message_id, recipient = key
    return b"%b%b %b" % (queue_prefix(queue), message_id.encode("ascii"), field(recipient))


def deferred_key(key: DeliveryKey, next_attempt: float) -> bytes:
    queue, message_id, recipient = key
    due = due_field(next_attempt)
    return b"%b%b %b %b" % (deferred_prefix(queue), due, message_id.encode("ascii"), field(recipient))


def domain_key(key: DeliveryKey, domain: str) -> bytes:
    queue, message_id, recipient = key
    return b"%b%b %b" % (domain_prefix(queue, domain), message_id.encode("ascii"), field(recipient))


@functools.lru_cache(maxsize=16)  # thousands of recipients of one message have the same
def due_field(when: float) -> bytes:
    """Format a due time so that it sorts as text and is readable as Unix seconds."""
    return b"%0*.7f" % (_TIME_WIDTH, min(max(when, 0.0), _MAX_TIME))


def _shown(raw: bytes) -> str:
    """Format a key for an error message, without the recipient at its end."""
    text = raw[:200].decode("ascii", "backslashreplace")
    head, blank, _ = text.rpartition(" ")
    return f"{head} …" if blank else text


@functools.lru_cache(maxsize=1024)
def queue_in(raw: bytes) -> QueueName:
    """Parse the name of a queue in a field of a key. Raises ValueError."""
    return parse_queue(unfield(raw))


@functools.lru_cache(maxsize=1024)
def queue_after(word: bytes, raw: bytes) -> QueueName:
    """Parse a queue's name in the second field of a key, whose first field is `word`. Raises ValueError."""
    if word != WEBHOOK_PREFIX[:-1]:
        return queue_in(raw)
    # Bins share the range of webhooks, whose names contain no slash.
    return parse_queue(name) if "/" in (name := unfield(raw)) else webhook_queue(name)


def parse_delivery_key(raw: bytes) -> DeliveryKey:
    """Parse a delivery's key, or any of its three index keys."""
    try:
        parts = raw.split(b" ")
        return DeliveryKey(
            queue_after(parts[0], parts[1]), MessageId(parts[-2].decode("ascii")), Mailbox(unfield(parts[-1]))
        )
    except (ValueError, IndexError) as error:
        raise StoreCorruptError(f"unreadable key {_shown(raw)}") from error


def parse_due(raw: bytes) -> float:
    """Parse the due time in a `deferred-zone` key."""
    try:
        return float(raw.split(b" ", 3)[2])
    except (ValueError, IndexError) as error:
        raise StoreCorruptError(f"unreadable key {_shown(raw)}") from error


def encode_delivery(delivery: Delivery) -> bytes:
    _, _, _, *fields, unknown = structs.astuple(delivery)
    raw = encoded(f"delivery {delivery.message_id}", DeliveryRecord(*fields))
    return b"%b,%b" % (raw[:-1], unknown[1:]) if unknown else raw


def _unknown(record: DeliveryRecord, raw: bytes) -> bytes:
    # Most records have no unknown members, and this comparison finds that out in half a microsecond.
    if len(_encode(record)) == len(raw):
        return b""
    members = {name: value for name, value in _decode_members(raw).items() if name not in _KNOWN}
    return _encode(members) if members else b""


def due_time(delivery: Delivery | None) -> float:
    """Return the time under which the delivery is in the `deferred-zone` index, or 0.0 if it is not in the
    index.
    """
    return 0.0 if delivery is None or delivery.held else max(delivery.next_attempt, 0.0)


def decode_delivery(raw_key: bytes, raw: bytes) -> Delivery:
    return decode_record(parse_delivery_key(raw_key), raw)


def decode_record(key: DeliveryKey, raw: bytes) -> Delivery:
    """Decode the record of a delivery whose key is known."""
    try:
        record = _decode_record(raw)
        unknown = _unknown(record, raw)
    except (ValueError, msgspec.MsgspecError) as error:
        raise StoreCorruptError(f"unreadable delivery {_shown(delivery_key(key))}: {error}") from error
    return Delivery(
        queue=key.queue,
        message_id=key.message_id,
        recipient=key.recipient,
        created=record.created,
        attempts=record.attempts,
        next_attempt=record.next_attempt,
        held=record.held,
        warned=record.warned,
        notify=_NOTIFY[int(record.notify) & _NOTIFY_MASK],
        orcpt=record.orcpt,
        last=record.last,
        act=record.act,
        unknown=unknown,
    )


def decode_status(raw_key: bytes, raw: bytes) -> DeliveryStatus:
    """Decode the fields of a delivery record that determine its state and age."""
    try:
        return _decode_status(raw)
    except (ValueError, msgspec.MsgspecError) as error:
        raise StoreCorruptError(f"unreadable delivery {_shown(raw_key)}: {error}") from error


# --- idempotency keys


def once_key(identity: str) -> bytes:
    return ONCE_PREFIX + identity.encode("ascii")


def once_until_key(identity: str, until: float) -> bytes:
    """Return the key of an idempotency key in the index of expiry times."""
    return b"%b%b %b" % (ONCE_UNTIL_PREFIX, due_field(until), identity.encode("ascii"))


_decode_kept = msgspec.json.Decoder(StoredKey).decode


def decode_kept(raw: bytes) -> StoredKey:
    try:
        return _decode_kept(raw)
    except (ValueError, msgspec.MsgspecError) as error:
        raise StoreCorruptError(f"unreadable idempotency key: {error}") from error
