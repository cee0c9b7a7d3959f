"""Reads the queue's key ranges in a partition. docs/store/spool-format.md describes the layout.

Ranges are read page by page, so that a scan of millions of deliveries delays other reads by a few
milliseconds at most. An unreadable record is logged, skipped and kept for the operator. A page shows one
moment; the window detects changes between two reads.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Self

from zonerelay.model.delivery import Delivery, DeliveryKey, QueueName
from zonerelay.model.envelope import Message, MessageId, is_message_id
from zonerelay.store import contract, records
from zonerelay.store.contract import MessageNotFoundError, StoreCorruptError, StoredKey, Wanted, everybody
from zonerelay.store.keys.port import KeyReader, Row, after, pages
from zonerelay.store.queue.in_flight import OpenMessage, ReadResult

PAGE_ROWS = 1000
"""The number of rows in a page."""

SEEKS = 100
"""The number of seeks in one page. In LevelDB a seek takes as long as ten rows or more."""

READ_CHUNKS = 4
"""The number of chunks that are read at once."""

OLDEST_ROWS = 5000
"""Rows that are read at most to find the oldest delivery: senders may hold back those in front of it."""

OLDEST_PAGE = 100
"""Rows that are read at once to find the oldest delivery, which is usually the first one."""

_log = logging.getLogger("zonerelay.store")


class DeliveryPage(NamedTuple):
    """A page of deliveries, and the key that follows (None at the end)."""

    deliveries: list[Delivery]
    low: bytes | None
    keys: list[bytes]


async def scanned(
    page_at: Callable[[bytes, bytes], Awaitable[DeliveryPage]],
    queue: QueueName | None,
    after: DeliveryKey | None,
) -> AsyncGenerator[Delivery, None]:
    """Yield the deliveries of a queue, or of all queues, page by page, after the key `after`."""
    prefix = records.DELIVERY_PREFIX if queue is None else records.queue_prefix(queue)
    start: bytes | None = prefix if after is None else records.delivery_key(after) + b"\0"
    while start is not None:
        page = await page_at(start, records.after(prefix))
        for delivery in page.deliveries:
            yield delivery
        start = page.low


class QueueReads:
    """Reads the deliveries and messages of one queue. `name` is the place in which `left_over` reports
    records.
    """

    name = "the spool"

    def __init__(self, keys: KeyReader, on_unreadable: Callable[[str], None] = lambda text: None) -> None:
        self.keys = keys
        self._on_unreadable = on_unreadable

    async def view(self) -> Self:
        """Return a reader of a snapshot of the queue, for a long scan; the caller must close it. Without
        snapshots, each page shows its own moment.
        """
        return self

    def close(self) -> None:
        """Do nothing, because no resource is held."""

    # --- keys

    async def _each(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """Return the values of keys that are expected to exist. An engine that knows which one is damaged
        returns None for it.
        """
        return await self.keys.get(keys)

    async def _look_up(self, key: bytes) -> bytes | None:
        """Return the value of a key that is often missing."""
        return (await self.keys.get([key]))[0]

    async def _rows(self, start: bytes, end: bytes, limit: int, *, values: bool = True) -> Iterable[Row]:
        """Return the first `limit` rows of a range."""
        found: list[Row] = []
        async for rows in pages(self.keys, start, end, rows=limit, values=values):
            found += rows
            if len(found) >= limit:
                break
        return found[:limit]

    # --- deliveries

    async def fresh(self, start: bytes, end: bytes, wanted: int) -> DeliveryPage:
        """Return deliveries of a zone that were never deferred and are not held."""
        found: list[Delivery] = []
        most = min(PAGE_ROWS, 2 * wanted)
        for number, (key, value) in enumerate(await self._rows(start, end, most + 1)):
            if number == most or len(found) == wanted:
                return DeliveryPage(found, key, [])
            try:
                status = records.decode_status(key, value)
                if not status.held and status.next_attempt <= 0:
                    found.append(records.decode_delivery(key, value))
            except StoreCorruptError as error:
                self._step_over(error)
        return DeliveryPage(found, None, [])

    async def index(self, start: bytes, bound: bytes, end: bytes, wanted: int) -> DeliveryPage:
        """Return the deliveries to which the index keys below `bound` refer. Keys without a delivery are only
        listed.
        """
        keys: list[bytes] = []
        low = None
        for key, _ in await self._rows(start, end, wanted + 1):
            if key >= bound or len(keys) == wanted:
                low = key
                break
            keys.append(key)
        return DeliveryPage(await self.deliveries([key for _, key in self._parsed(keys)]), low, keys)

    async def deliveries(self, keys: Sequence[DeliveryKey]) -> list[Delivery]:
        """Return those of these deliveries that exist and can be read."""
        raw = [records.delivery_key(key) for key in keys]
        found = zip(raw, await self._each(raw), strict=True)
        return list(self._decoded((key, value) for key, value in found if value is not None))

    async def page_of_keys(self, start: bytes, end: bytes) -> list[tuple[bytes, DeliveryKey]]:
        return list(self._parsed(key for key, _ in await self._rows(start, end, PAGE_ROWS, values=False)))

    async def scan_page(self, start: bytes, end: bytes, wanted: Wanted) -> DeliveryPage:
        """Return a page of deliveries in any state. Only the keys of unwanted recipients are decoded."""
        found = list(await self._rows(start, end, PAGE_ROWS + 1))
        cursor = found.pop()[0] if len(found) > PAGE_ROWS else None
        if wanted is not everybody:
            found = [row for row in found if wanted(records.unfield(row[0].rpartition(b" ")[2]))]
        return DeliveryPage(list(self._decoded(found)), cursor, [])

    async def scan(
        self, queue: QueueName | None = None, *, wanted: Wanted = everybody, after: DeliveryKey | None = None
    ) -> AsyncGenerator[Delivery, None]:
        """Yield deliveries in the order of their keys, as `QueueView.scan` does."""
        async for delivery in scanned(lambda start, end: self.scan_page(start, end, wanted), queue, after):
            yield delivery

    async def queues(self) -> set[QueueName]:
        """Return the queues that contain deliveries, using one seek for each queue."""
        found: list[bytes] = []
        start, end = records.WEBHOOK_PREFIX, records.after(records.DELIVERY_PREFIX)
        while rows := (await self.keys.page(start, end, rows=1, values=False)).rows:
            found.append(rows[0][0])
            start = b"%b %b!" % tuple(rows[0][0].split(b" ", 2)[:2])
        return {key.queue for _, key in self._parsed(found)}

    async def deliveries_of(
        self, message_id: MessageId, in_queues: Collection[QueueName] | None = None
    ) -> list[Delivery]:
        found: list[Delivery] = []
        for queue in await self.queues() if in_queues is None else in_queues:
            prefix = records.queue_prefix(queue) + message_id.encode("ascii", "replace") + b" "
            async for rows in pages(self.keys, prefix, records.after(prefix), rows=PAGE_ROWS):
                found += self._decoded(rows)
        return sorted(found, key=lambda delivery: (delivery.recipient, delivery.queue))

    async def oldest(self, start: bytes, end: bytes, now: float) -> tuple[bytes, float | None] | None:
        """Return the key of the first delivery at or after `start`, and the time at which the first delivery
        was created. Deliveries created after `now` are skipped for the time, which is None if the first
        `OLDEST_ROWS` contain no other.
        """
        first, left = None, OLDEST_ROWS
        cursor: bytes | None = start
        while cursor is not None and left > 0:
            rows, cursor = await self.keys.page(cursor, end, rows=min(left, OLDEST_PAGE))
            for key, value in rows:
                left -= 1
                try:
                    created = records.decode_status(key, value).created
                except StoreCorruptError as error:
                    self._step_over(error)
                    continue
                first = first or key
                if created <= now:
                    return first, created
        return None if first is None else (first, None)

    async def count_page(self, start: bytes) -> tuple[dict[QueueName, contract.QueueCounts], bytes | None]:
        """Count the deliveries in one page by queue and state, and return where the next page starts."""
        counted: dict[QueueName, contract.QueueCounts] = {}
        found, cursor = await self.keys.page(start, records.after(records.DELIVERY_PREFIX), rows=PAGE_ROWS)
        for key, value in found:
            try:
                counts = counted.setdefault(
                    records.queue_after(*key.split(b" ", 2)[:2]), contract.QueueCounts()
                )
                status = records.decode_status(key, value)
                counts.count(status.next_attempt, held=status.held)
            except (StoreCorruptError, ValueError) as error:
                self._on_unreadable(str(error))
        return counted, cursor

    # --- messages

    async def messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        """Return those of these messages that exist and can be read."""
        found: dict[MessageId, Message] = {}
        raw = await self._each(list(map(records.metadata_key, ids)))
        for message_id, value in zip(ids, raw, strict=True):
            if value is not None:
                try:
                    found[message_id] = records.decode_message(message_id, value)
                except StoreCorruptError as error:
                    self._step_over(error)
        return found

    async def message(self, message_id: MessageId) -> tuple[Message, OpenMessage]:
        """Return a message's metadata and number of open deliveries. Raises MessageNotFoundError or
        StoreCorruptError.
        """
        (raw,) = await self.keys.get([records.metadata_key(message_id)])
        if raw is None:
            raise MessageNotFoundError(f"message {message_id} does not exist")
        try:
            message = records.decode_message(message_id, raw)
        except StoreCorruptError as error:
            self._on_unreadable(str(error))
            raise
        recipients = len(message.envelope.recipients)
        # Most messages have one recipient and no count, and missing keys are expensive in LevelDB.
        try:
            count = None if recipients == 1 else await self._look_up(records.open_count_key(message_id))
            if count is None:
                return message, OpenMessage(message, recipients)
            return message, OpenMessage(message, records.parse_count(message_id, count), count_stored=True)
        except StoreCorruptError as error:
            # The message stays after its last delivery. With too low a number it would be removed too early.
            self._step_over(error)
            return message, OpenMessage(message, recipients, count_stored=True)

    async def message_and_body(self, message_id: MessageId) -> tuple[Message, OpenMessage, bytes | None]:
        """Return a message, its number of open deliveries and, if the body has only one chunk, the body."""
        message, count = await self.message(message_id)
        if message.chunks != 1:
            return message, count, None
        try:
            (body,) = await self.keys.get([records.chunk_key(message_id, 1)])
        except StoreCorruptError:
            body = None  # `chunks` raises when the body is needed
        return message, count, body

    async def states(self, keys: Sequence[DeliveryKey]) -> ReadResult:
        """Return the stored deliveries with these keys, and the states of their messages, as a change needs
        them.
        """
        found = ReadResult()
        found.deliveries = {delivery.key: delivery for delivery in await self.deliveries(keys)}
        existing = {key.message_id for key in found.deliveries}
        for message_id in {key.message_id for key in keys}:
            try:
                found.messages[message_id] = (await self.message(message_id))[1]
            except (MessageNotFoundError, StoreCorruptError) as error:
                if message_id in existing:
                    _log.error("deliveries have no readable message: %s", error)
        return found

    async def chunks(self, message_id: MessageId, first: int, last: int) -> list[bytes]:
        """Return the chunks of a body from number `first` to at most `last`. A chunk that is missing while
        its message exists is corruption; a chunk that is missing with its message was dropped by an operator.
        """
        numbers = range(first, min(first + READ_CHUNKS, last + 1))
        found: list[bytes] = []
        raw = await self._chunks([records.chunk_key(message_id, number) for number in numbers])
        for number, chunk in zip(numbers, raw, strict=True):
            if chunk is None:
                if await self._look_up(records.exists_key(message_id)) is None:
                    raise MessageNotFoundError(f"message {message_id} was removed while it was being read")
                text = f"message {message_id}: chunk {number} of {last} is missing"
                self._on_unreadable(text)
                raise StoreCorruptError(text)
            found.append(chunk)
        return found

    async def body(self, message: Message) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of a body in order."""
        for first in range(1, message.chunks + 1, READ_CHUNKS):
            for chunk in await self.chunks(message.id, first, message.chunks):
                yield chunk

    async def _chunks(self, keys: Sequence[bytes]) -> list[bytes | None]:
        try:
            return await self.keys.get(keys)
        except StoreCorruptError as error:
            self._on_unreadable(str(error))
            raise

    async def last_message_id(self) -> MessageId | None:
        """Return the highest message id of this queue, including aborted uploads."""
        texts = [await self._noted_last_id()]
        last = await self.keys.last_key(records.MESSAGE_PREFIX, records.after(records.MESSAGE_PREFIX))
        if last is not None:
            texts.append(last.split(b" ")[1].decode("ascii", "replace"))
        return max((MessageId(text) for text in texts if is_message_id(text)), default=None)

    async def _noted_last_id(self) -> str:
        (noted,) = await self.keys.get([records.META_LAST_ID])
        return (noted or b"").decode("ascii", "replace")

    async def aborted_uploads(self, start: bytes, last: MessageId) -> tuple[list[bytes], bytes | None]:
        """Return the key prefixes of aborted uploads up to `last` (chunks without `#` and `*`), and where the
        next page starts.

        `#` and `*` sort before the chunks, so one seek per message suffices. A message that is removed during
        the scan is removed as a whole.
        """
        keys = await self._first_keys(start, records.after(records.message_prefix(last)), SEEKS + 1)
        low = keys.pop() if len(keys) > SEEKS else None
        parts = (key.rpartition(b" ") for key in keys)
        return [prefix + b" " for prefix, _, part in parts if part.isdigit()], low

    async def _first_keys(self, start: bytes, end: bytes, most: int) -> list[bytes]:
        """Return the first key of each message in a range, using one seek for each message."""
        found: list[bytes] = []
        while len(found) < most and (rows := (await self.keys.page(start, end, rows=1, values=False)).rows):
            found.append(rows[0][0])
            start = found[-1].rpartition(b" ")[0] + b"!"
        return found

    async def keys_under(self, prefix: bytes) -> list[bytes]:
        """Return a page of the keys under a prefix."""
        return [key for key, _ in await self._rows(prefix, records.after(prefix), PAGE_ROWS, values=False)]

    async def left_over(self) -> str:
        """Describe the first record, readable or not, that is not internal bookkeeping, or return "" if there
        is none.
        """
        hints, meta, counts = records.DOMAIN_PREFIX, b"meta ", b"meta open "
        starts = (b"\x01", records.after(hints), counts, records.after(meta))
        for start, stop in zip(starts, (hints, meta, records.after(counts), b"\xff"), strict=True):
            for key, _ in await self._rows(start, stop, 1, values=False):
                return f"records in {self.name}, the first is {key.decode('ascii', 'replace')!r}"
        return ""

    # --- idempotency keys

    async def kept(self, identity: str) -> StoredKey | None:
        raw = await self._look_up(records.once_key(identity))
        return None if raw is None else records.decode_kept(raw)

    async def kept_page(self, identity: str) -> list[tuple[str, StoredKey]]:
        """Return a page of the idempotency keys that follow `identity`."""
        start = after(records.once_key(identity)) if identity else records.ONCE_PREFIX
        found: list[tuple[str, StoredKey]] = []
        for key, value in await self._rows(start, records.after(records.ONCE_PREFIX), PAGE_ROWS):
            try:
                name = key[len(records.ONCE_PREFIX) :].decode("ascii", "replace")
                found.append((name, records.decode_kept(value)))
            except StoreCorruptError as error:
                self._step_over(error)
        return found

    async def expired(self, start: bytes, now: float, most: int) -> list[tuple[str, bytes, bool]]:
        """Return the idempotency keys that have expired, from the index key `start` on. Each has its index
        key, and whether the key was used again.
        """
        found: list[tuple[str, bytes, bool]] = []
        stop = records.once_until_key("", now)
        for key, _ in await self._rows(start, stop, most):
            identity = key.rpartition(b" ")[2].decode("ascii", "replace")
            try:
                known = await self.kept(identity)
            except StoreCorruptError as error:
                self._step_over(error)
                known = None
            found.append((identity, key, known is not None and known.until > now))
        return found

    # --- unreadable records

    def _decoded(self, rows: Iterable[Row]) -> Iterator[Delivery]:
        for key, value in rows:
            try:
                yield records.decode_delivery(key, value)
            except StoreCorruptError as error:
                self._step_over(error)

    def _parsed(self, keys: Iterable[bytes]) -> Iterator[tuple[bytes, DeliveryKey]]:
        for key in keys:
            try:
                yield key, records.parse_delivery_key(key)
            except StoreCorruptError as error:
                self._step_over(error)

    def _step_over(self, error: StoreCorruptError) -> None:
        _log.error("skipped: %s", error)
        self._on_unreadable(str(error))


class PartitionsView:
    """Reads several partitions of an engine, one after the other (implements `QueueView`)."""

    def __init__(self, readers: Sequence[QueueReads]) -> None:
        self._readers = readers

    async def scan(
        self, queue: QueueName | None = None, *, wanted: Wanted = everybody, after: DeliveryKey | None = None
    ) -> AsyncGenerator[Delivery, None]:
        for reads in self._readers:
            async for delivery in reads.scan(queue, wanted=wanted, after=after):
                yield delivery

    async def queues(self) -> set[QueueName]:
        return set[QueueName]().union(*[await reads.queues() for reads in self._readers])

    async def deliveries_of(self, message_id: MessageId, *, own: bool = False) -> list[Delivery]:
        return [each for reads in self._readers for each in await reads.deliveries_of(message_id)]

    async def read_message(self, message_id: MessageId) -> Message:
        return (await (await self._holder(message_id)).message(message_id))[0]

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        found: dict[MessageId, Message] = {}
        for reads in self._readers:
            found |= await reads.messages([each for each in ids if each not in found])
        return found

    async def read_body(self, message_id: MessageId) -> AsyncGenerator[bytes, None]:
        reads = await self._holder(message_id)
        async for chunk in reads.body((await reads.message(message_id))[0]):
            yield chunk

    async def kept_keys(self, cursor: str = "") -> tuple[contract.KeptKeys, str]:
        number, _, identity = (cursor or "0 ").partition(" ")
        if int(number) >= len(self._readers):
            return [], ""
        page = await self._readers[int(number)].kept_page(identity)
        return page, f"{number} {page[-1][0]}" if page else f"{int(number) + 1} "

    async def _holder(self, message_id: MessageId) -> QueueReads:
        for reads in self._readers:
            if await reads.keys.get([records.exists_key(message_id)]) != [None]:
                return reads
        raise MessageNotFoundError(f"message {message_id} does not exist")
