"""Scans key ranges of the spool. Every function blocks and runs in the store's reader thread.

Scans are split into pages, so a scan of a queue of millions delays other reads by some milliseconds at most.
An unreadable record is logged and skipped. It stays for the operator, who repairs the spool, and must not
stop the rest of the queue.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId, first_at, is_message_id
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common import records
from zonerelay.store.contract import (
    EveryNth,
    Kept,
    MessageNotFoundError,
    Once,
    QueueCounts,
    StoreCorruptError,
    Wanted,
    everybody,
)
from zonerelay.store.leveldb.damage.losses import Loss, identity_of
from zonerelay.store.leveldb.engine import Op, View
from zonerelay.store.leveldb.in_flight import Found, OpenMessage
from zonerelay.store.leveldb.spool import LevelDb

PAGE_ROWS = 1000
"""The number of rows in one page."""

SAMPLED_ROWS = 20_000
"""The number of rows that one page of a sample steps over."""

SEEKS = 100
"""The number of seeks in one page. A seek takes as long as ten rows or more."""

OLDEST_ROWS = 5000
"""The number of rows that are read to find the oldest delivery. The first ones may be held back by their
senders.
"""

_log = logging.getLogger("zonerelay.store")


class Page(NamedTuple):
    """Deliveries, and the first key after the read range (None if nothing follows)."""

    deliveries: list[Delivery]
    low: bytes | None
    keys: list[bytes]


def read_fresh(db: LevelDb, start: bytes, end: bytes, wanted: int) -> Page:
    """Return deliveries of a zone that were never deferred and are not held."""
    found: list[Delivery] = []
    for number, (key, value) in enumerate(db.rows(start, end, limit=PAGE_ROWS + 1)):
        if number == PAGE_ROWS or len(found) == wanted:
            return Page(found, key, [])
        try:
            status = records.decode_status(key, value)
            if not status.held and status.next_attempt <= 0:
                found.append(records.decode_delivery(key, value))
        except StoreCorruptError as error:
            _step_over(db, error)
    return Page(found, None, [])


def read_index(db: LevelDb, start: bytes, bound: bytes, end: bytes, wanted: int) -> Page:
    """Return the deliveries that index keys below `bound` refer to. Keys without a delivery are only
    listed.
    """
    keys: list[bytes] = []
    low = None
    for key, _ in db.rows(start, end, limit=wanted + 1):
        if key >= bound or len(keys) == wanted:
            low = key
            break
        keys.append(key)
    view = db.snapshot()
    try:
        found = read_deliveries(db, [key for _, key in _parsed(db, keys)], view)
    finally:
        view.close()
    return Page(found, low, keys)


def read_deliveries(db: LevelDb, keys: Sequence[DeliveryKey], view: View | None = None) -> list[Delivery]:
    """Return those deliveries that exist and can be read."""
    raw_keys = [records.delivery_key(key) for key in keys]
    return list(_decoded(db, zip(raw_keys, db.get_each(raw_keys, view), strict=True)))


def _decoded(
    db: LevelDb, rows: Iterable[tuple[bytes, bytes | StoreCorruptError | None]]
) -> Iterator[Delivery]:
    for key, value in rows:
        if isinstance(value, bytes):
            try:
                yield records.decode_delivery(key, value)
            except StoreCorruptError as error:
                _step_over(db, error)


def _step_over(db: LevelDb, error: StoreCorruptError) -> None:
    _log.error("stepped over: %s", unreadable(db, error))


def unreadable(db: LevelDb, error: StoreCorruptError) -> StoreCorruptError:
    """Report an invalid or missing record that LevelDB has read without an error."""
    db.on_unreadable(str(error))
    return error


def _parsed(db: LevelDb, keys: Iterable[bytes]) -> Iterator[tuple[bytes, DeliveryKey]]:
    for key in keys:
        try:
            yield key, records.parse_delivery_key(key)
        except StoreCorruptError as error:
            _step_over(db, error)


def read_keys(db: LevelDb, start: bytes, end: bytes) -> list[tuple[bytes, DeliveryKey]]:
    """Return a page of keys."""
    return list(_parsed(db, (key for key, _ in db.rows(start, end, limit=PAGE_ROWS))))


def scan_page(db: LevelDb, start: bytes, end: bytes, view: View, wanted: Wanted) -> Page:
    """Return a page of deliveries in any state. Values are only read if the recipient is `wanted`."""
    if isinstance(wanted, EveryNth):
        return _sample_page(db, start, end, view, wanted)
    rows = list(db.rows(start, end, limit=PAGE_ROWS, view=view))
    low = rows[-1][0] + b"\0" if len(rows) == PAGE_ROWS else None
    if wanted is not everybody:
        rows = [row for row in rows if wanted(records.unfield(row[0].rpartition(b" ")[2]))]
    return Page(list(_decoded(db, rows)), low, [])


def _sample_page(db: LevelDb, start: bytes, end: bytes, view: View, wanted: EveryNth) -> Page:
    # One more row than is returned, with which the next page begins.
    limit = max(1, SAMPLED_ROWS // wanted.every) + 1
    rows = list(db.sampled(start, end, wanted.gap, limit=limit, view=view))
    low = rows.pop()[0] if len(rows) == limit else None
    return Page(list(_decoded(db, rows)), low, [])


def read_messages(db: LevelDb, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
    """Return those messages that exist and can be read."""
    found: dict[MessageId, Message] = {}
    for message_id, raw in zip(ids, db.get_each(list(map(records.metadata_key, ids))), strict=True):
        if isinstance(raw, bytes):
            try:
                found[message_id] = records.decode_message(message_id, raw)
            except StoreCorruptError as error:
                _step_over(db, error)
    return found


def read_message(db: LevelDb, message_id: MessageId) -> tuple[Message, OpenMessage]:
    """Return a message's metadata and number of open deliveries. Raises MessageNotFoundError or
    StoreCorruptError.
    """
    (raw,) = db.get_many([records.metadata_key(message_id)])
    if raw is None:
        raise MessageNotFoundError(f"no message {message_id}")
    try:
        message = records.decode_message(message_id, raw)
    except StoreCorruptError as error:
        raise unreadable(db, error) from error
    recipients = len(message.envelope.recipients)
    # Most messages have one recipient and no count, and reading a missing key is expensive (`get_each`).
    try:
        count = None if recipients == 1 else db.get(records.open_count_key(message_id))
        if count is None:
            return message, OpenMessage(message, recipients)
        return message, OpenMessage(message, records.parse_count(message_id, count), count_stored=True)
    except StoreCorruptError as error:
        # The message stays after its last delivery. With too low a number it would be removed too early.
        unreadable(db, error)
        return message, OpenMessage(message, recipients, count_stored=True)


def read_message_and_body(db: LevelDb, message_id: MessageId) -> tuple[Message, OpenMessage, bytes | None]:
    """Return a message and, if it has one chunk, its body, which a delivery reads next."""
    message, count = read_message(db, message_id)
    if message.chunks != 1:
        return message, count, None
    (body,) = db.get_each([records.chunk_key(message_id, 1)])
    return message, count, body if isinstance(body, bytes) else None


def read_states(db: LevelDb, keys: Sequence[DeliveryKey]) -> Found:
    """Return the deliveries and open messages that a change of these keys needs, without unreadable
    messages.
    """
    found = Found()
    view = db.snapshot()
    try:
        found.deliveries = {delivery.key: delivery for delivery in read_deliveries(db, keys, view)}
    finally:
        view.close()
    for message_id in {key.message_id for key in keys}:
        try:
            found.messages[message_id] = read_message(db, message_id)[1]
        except (MessageNotFoundError, StoreCorruptError) as error:
            _log.error("deliveries without a readable message: %s", error)
    return found


def queues(db: LevelDb) -> set[QueueName]:
    """Return the queues that hold deliveries, with one seek each."""
    start, end = records.WEBHOOK_PREFIX, records.after(records.DELIVERY_PREFIX)
    keys = db.first_keys(start, end, lambda key: b"%b %b!" % tuple(key.split(b" ", 2)[:2]))
    return {key.queue for _, key in _parsed(db, keys)}


def left_over(db: LevelDb) -> str:
    """Return a record that is not internal bookkeeping, readable or not, or a file that does not belong to
    the database.
    """
    hints, meta, counts = records.DOMAIN_PREFIX, b"meta ", b"meta open "
    starts = (b"", records.after(hints), counts, records.after(meta))
    for start, stop in zip(starts, (hints, meta, records.after(counts), None), strict=True):
        for key, _ in db.rows(start, stop, limit=1):
            return f"records in {db.path}, the first is {key.decode('ascii', 'replace')!r}"
    foreign = db.foreign_files()
    return f"files in {db.path} that are not the database's: {', '.join(foreign[:3])}" if foreign else ""


def deliveries_of(
    db: LevelDb, message_id: MessageId, in_queues: Collection[QueueName] | None = None
) -> list[Delivery]:
    """Return the deliveries of a message. `in_queues` are the only queues with deliveries, if the caller
    knows them. Finding them steps over all rows that were removed before the first delivery of each.
    """
    found: list[Delivery] = []
    for queue in queues(db) if in_queues is None else in_queues:
        prefix = records.queue_prefix(queue) + message_id.encode("ascii", "replace") + b" "
        start: bytes | None = prefix
        while start is not None:
            rows = list(db.rows(start, records.after(prefix), limit=PAGE_ROWS))
            found += _decoded(db, rows)
            start = rows[-1][0] + b"\0" if len(rows) == PAGE_ROWS else None
    return sorted(found, key=lambda delivery: (delivery.recipient, delivery.queue))


def oldest(db: LevelDb, start: bytes, end: bytes, now: float) -> tuple[bytes, float | None] | None:
    """Return the key of the zone's first delivery from `start` on, and `created` of the first one whose
    `created` is not after `now`, or `None` if the first `OLDEST_ROWS` rows have none.
    """
    first = None
    for key, value in db.rows(start, end, limit=OLDEST_ROWS):
        try:
            created = records.decode_status(key, value).created
        except StoreCorruptError as error:
            _step_over(db, error)
            continue
        first = first or key
        if created <= now:
            return first, created
    return None if first is None else (first, None)


def last_message_id(db: LevelDb) -> MessageId | None:
    """Return the highest message id of this spool, including aborted uploads."""
    ids = [_noted_last_id(db)]
    last = db.last_key(records.MESSAGE_PREFIX, records.after(records.MESSAGE_PREFIX))
    if last is not None:
        ids.append(last.split(b" ")[1].decode("ascii", "replace"))
    return max((MessageId(text) for text in ids if is_message_id(text)), default=None)


def _noted_last_id(db: LevelDb) -> str:
    """Return the stored id. If it is unreadable, derive one from the time of the last run, so that no id is
    used twice.
    """
    try:
        raw = db.get(records.META_LAST_ID)
    except StoreCorruptError:
        return first_at(db.last_used)
    noted = (raw or b"").decode("ascii", "replace")
    if raw is None or is_message_id(noted):
        return noted
    instead = first_at(db.last_used)
    db.losses.tell(
        Loss(
            id=identity_of(b"last-id %b" % raw),
            what=f"the record of the last message id was unreadable ({noted[:20]!r}), {instead} was written"
            " in its place; no mail is in it, but what took it may have taken more",
        )
    )
    db.write([[(records.META_LAST_ID, instead.encode("ascii"))]])
    return instead


def count_page(db: LevelDb, start: bytes, view: View) -> tuple[dict[QueueName, QueueCounts], bytes | None]:
    """Count the deliveries in one page by queue and state, and return where the next page starts."""
    found: dict[QueueName, QueueCounts] = {}
    key, rows = b"", 0
    for key, value in db.rows(start, records.after(records.DELIVERY_PREFIX), limit=PAGE_ROWS, view=view):
        rows += 1
        try:
            counts = found.setdefault(records.queue_after(*key.split(b" ", 2)[:2]), QueueCounts())
            status = records.decode_status(key, value)
            counts.count(status.next_attempt, held=status.held)
        except (StoreCorruptError, ValueError) as error:
            db.on_unreadable(str(error))
    return found, key + b"\0" if rows == PAGE_ROWS else None


def aborted_uploads(db: LevelDb, start: bytes, last: MessageId) -> tuple[list[bytes], bytes | None]:
    """Return message prefixes up to `last` that have chunks but neither `#` nor `*`, and where the next page
    starts.

    `#` and `*` sort before the chunks, so one seek per message suffices. A message that is removed during the
    scan is removed as a whole. Raises StoreCorruptError if a `#` may be in damaged data.
    """
    aborted: list[bytes] = []
    end = records.after(records.message_prefix(last))
    keys = db.first_keys(start, end, lambda key: key.rpartition(b" ")[0] + b"!", strict=True)
    for number, key in enumerate(keys):
        if number == SEEKS:
            return aborted, key
        prefix, _, part = key.rpartition(b" ")
        if part.isdigit():
            aborted.append(prefix + b" ")
    return aborted, None


def drop_hints(db: LevelDb) -> None:
    """Empty the overflow index. After a start the cursor finds everything itself."""
    prefix = records.DOMAIN_PREFIX
    while keys := [key for key, _ in db.rows(prefix, records.after(prefix), limit=PAGE_ROWS)]:
        db.write([[(key, None) for key in keys]])


def keys_under(db: LevelDb, prefix: bytes) -> list[bytes]:
    """Return a page of the keys under a prefix without reading their values."""
    keys = db.first_keys(prefix, records.after(prefix), lambda key: key + b"\0")
    return list(itertools.islice(keys, PAGE_ROWS))


# --- idempotency keys


def once_ops(once: Once, message_id: MessageId) -> list[Op]:
    return [
        (records.once_key(once.identity), records.encode_kept(once, message_id)),
        (records.once_until_key(once.identity, once.until), b""),
    ]


def kept(db: LevelDb, identity: str) -> Kept | None:
    raw = db.get(records.once_key(identity))
    return None if raw is None else records.decode_kept(raw)


def kept_page(db: LevelDb, after: str) -> list[tuple[str, Kept]]:
    """Return the keys after an identity."""
    start = records.once_key(after) + b"\0" * bool(after)
    found: list[tuple[str, Kept]] = []
    for key, value in db.rows(start, records.after(records.ONCE_PREFIX), limit=PAGE_ROWS):
        try:
            found.append(
                (key[len(records.ONCE_PREFIX) :].decode("ascii", "replace"), records.decode_kept(value))
            )
        except StoreCorruptError as error:
            _step_over(db, error)
    return found


def expired(db: LevelDb, now: float, most: int) -> list[tuple[str, bytes, bool]]:
    """Return the expired identities, each with its key in the index and whether it was used again."""
    found: list[tuple[str, bytes, bool]] = []
    stop = records.once_until_key("", now)
    for key, _ in db.rows(records.ONCE_UNTIL_PREFIX, stop, limit=most):
        identity = key.rpartition(b" ")[2].decode("ascii", "replace")
        try:
            known = kept(db, identity)
        except StoreCorruptError as error:
            _step_over(db, error)
            known = None
        found.append((identity, key, known is not None and known.until > now))
    return found
