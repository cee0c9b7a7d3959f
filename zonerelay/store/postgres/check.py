"""Checks a PostgreSQL spool, beside running relays, as one snapshot shows it.

Every row is read once, in the order of the primary keys, in pages of a bounded number of rows: records are
decoded here, and bodies are read by the server, which makes hashes of them. Each partial index is compared
with its table by the number of its rows. A page that the server cannot read is halved until the rows are
found that are damaged.

Memory: eight octets for each delivery, and one page.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import AsyncIterator, Callable
from itertools import groupby

from zonerelay.config.settings import PostgresSettings
from zonerelay.model.address import domain_of
from zonerelay.model.message_id import MessageId
from zonerelay.store.check import KEPT, Contents, Examination, Fault, Tell
from zonerelay.store.common import records
from zonerelay.store.common.repairs import Report, body_fault
from zonerelay.store.contract import StoreCorruptError, StoreError
from zonerelay.store.postgres import sql
from zonerelay.store.postgres.driver import BusyError, Columns, ConnectionLostError, Fetch, Link
from zonerelay.store.postgres.open import access_of
from zonerelay.store.postgres.rows import delivery_of, identity, word
from zonerelay.store.postgres.schema import check_schema

PAGE = 500
STEP_TIMEOUT = 600.0
"""Seconds: a page may be of large bodies, and a count of a long queue."""
_HIGHEST = 2**63 - 1

HAS_TABLES = "SELECT to_regclass('message') IS NOT NULL"
_SIZE = "SELECT pg_table_size('message') + pg_table_size('chunk') + pg_table_size('delivery')"

_DELIVERIES = """
SELECT zone, message_id, recipient, next_attempt, held, record, domain, created, alone FROM delivery
WHERE zone = $4 AND (message_id, recipient) > ($1, $2) AND message_id <= $3
ORDER BY message_id, recipient LIMIT $5
"""
# The hash makes the server read every octet. A short chunk may only be the last.
MESSAGES = """
SELECT m.id, m.metadata, octet_length(m.body), octet_length(sha256(m.body)), c.*
FROM (
    SELECT id, metadata, body FROM message WHERE id BETWEEN $1 AND $3 AND $2 = '' ORDER BY id LIMIT $4
) m CROSS JOIN LATERAL (
    SELECT count(*), coalesce(max(number), 0), coalesce(sum(octet_length(data)), 0)::bigint,
        (array_agg(number ORDER BY number) FILTER (WHERE octet_length(data) <> 65536))[1],
        count(sha256(data))
    FROM chunk WHERE message_id = m.id
) c ORDER BY m.id
"""
_CHUNKS_ALONE = """
SELECT message_id, count(*) FROM chunk c
WHERE message_id > $1 AND NOT EXISTS (SELECT FROM message WHERE id = message_id) AND NOT EXISTS (
    SELECT FROM upload u JOIN node USING (session) WHERE u.message_id = c.message_id
)
GROUP BY message_id ORDER BY message_id LIMIT $2
"""
_INDEXES = """
SELECT c.relname, t.relname, pg_get_expr(i.indpred, i.indrelid) FROM pg_index i
JOIN pg_class c ON c.oid = indexrelid JOIN pg_class t ON t.oid = indrelid
WHERE indrelid = ANY(ARRAY['message', 'chunk', 'delivery']::regclass[]) ORDER BY 2, 1
"""


async def check(settings: PostgresSettings, examination: Examination) -> Contents:
    """Raises StoreError when the database cannot be asked."""
    link = await Link.open(access_of(settings, examination.environment), reads=True)
    try:
        async with link.transaction(one_moment=True) as fetch:
            if not (await fetch(HAS_TABLES))[0][0]:
                return Contents(0, 0, 0)  # no relay has been started here yet
            await check_schema(fetch, settings.schema)
            return await PostgresWalk(fetch, examination.findings.add, examination.tell).walk()
    finally:
        await link.close()


async def differing_indexes(fetch: Fetch) -> AsyncIterator[tuple[str, str, int, int]]:
    """Indexes that have another number of rows than their tables: index, table, and both numbers."""
    await fetch("SET LOCAL enable_bitmapscan = off")
    for index, table, condition in await fetch(_INDEXES):
        counts = []
        for way, other in (("seqscan", "indexscan"), ("indexscan", "seqscan")):
            await fetch(f"SET LOCAL enable_{way} = on")
            await fetch(f"SET LOCAL enable_{other} = off")
            await fetch(f"SET LOCAL enable_indexonlyscan = {'off' if way == 'seqscan' else 'on'}")
            # A plan belongs to the text of a statement: the other way is another text.
            statement = f"SELECT count(*) /* {way} */ FROM {table} WHERE {condition or 'true'}"  # noqa: S608
            ((count,),) = await fetch(statement, timeout=STEP_TIMEOUT)
            counts.append(count)
        if counts[0] != counts[1]:
            yield index, table, counts[1], counts[0]


class PostgresWalk:
    """One walk over all rows, in a transaction that sees one moment."""

    def __init__(self, fetch: Fetch, report: Report, tell: Tell) -> None:
        self._fetch = fetch
        self._report = report
        self._tell = tell
        self._ids: list[array[int]] = []
        """Of each zone, in order: twice the message's id, one more for a delivery that counts as alone."""
        self._damaged: list[tuple[int, int]] = []
        """First and last ids of what cannot be read."""
        self._octets = self._total = 0

    async def walk(self) -> Contents:
        """Raises StoreError."""
        ((self._total,),) = await self._fetch(_SIZE)
        async for index, table, inside, wanted in differing_indexes(self._fetch):
            fault = Fault.INDEX_MISSING if inside < wanted else Fault.INDEX_STRAY
            self._report(fault, index, f"it has {inside:,} rows of {table}, and that has {wanted:,}", "")
        for (zone,) in await self._fetch(sql.ZONES):
            self._ids.append(array("Q"))
            async for row in self._rows(f"delivery {zone}", lambda row: (row[1], row[2]), _DELIVERIES, zone):
                self._check_delivery(row, self._ids[-1])
        messages = await self._check_messages()
        await self._check_chunks()
        self._tell(self._total, self._total)
        return Contents(messages, sum(map(len, self._ids)), self._octets)

    async def _rows(
        self, where: str, after: Callable[[Columns], tuple[int, str]], statement: str, *values: str
    ) -> AsyncIterator[Columns]:
        """The rows of a statement from one id on to another, in order; those that are damaged are told."""
        ranges: list[tuple[int, str, int]] = [(0, "", _HIGHEST)]
        while ranges:
            low, text, high = ranges.pop()
            await self._fetch("SAVEPOINT page")
            try:
                rows = await self._fetch(statement, low, text, high, *values, PAGE, timeout=STEP_TIMEOUT)
            except (ConnectionLostError, BusyError):
                raise
            except StoreError as error:
                await self._fetch("ROLLBACK TO page")
                await self._fetch("RELEASE page")
                if low < high and len(self._damaged) < KEPT:
                    middle = (low + high) // 2
                    ranges += [(middle + 1, "", high), (low, text, middle)]
                else:
                    self._damaged.append((low, high))
                    shown = where if low == high else f"{where} {identity(low)} to"
                    name = identity(high)
                    self._report(Fault.UNREADABLE, f"{shown} {name}", str(error), name)
                continue
            await self._fetch("RELEASE page")
            if len(rows) == PAGE:
                ranges.append((*after(rows[-1]), high))
            for row in rows:
                yield row

    def _check_delivery(self, row: Columns, ids: array[int]) -> None:
        zone, key, recipient, _, _, record, domain, created, alone = row
        ids.append(key * 2 + alone)
        self._saw(len(record) + len(recipient))
        where = f"delivery {zone} {identity(key)} …"
        try:
            delivery = delivery_of(row)
            if domain != word(domain_of(delivery.recipient)) or created != delivery.created:
                self._report(
                    Fault.BAD_RECORD, where, "its columns are not what its record says", identity(key)
                )
        except (StoreCorruptError, ValueError) as error:
            self._report(Fault.BAD_RECORD, where, str(error), identity(key))

    async def _check_messages(self) -> int:
        owed = groupby(heapq.merge(*self._ids), key=lambda number: number >> 1)
        waiting = next(owed, None)
        count = 0
        async for row in self._rows("message", lambda row: (row[0] + 1, ""), MESSAGES):
            key = row[0]
            while waiting is not None and waiting[0] < key:
                self._alone(waiting[0])
                waiting = next(owed, None)
            count += 1
            name = identity(key)
            self._saw(len(row[1]) + (row[2] or 0) + row[6])
            trouble = judge(row)
            if trouble is not None:
                self._report(trouble[0], f"message {name}", trouble[1], name)
            if waiting is None or waiting[0] != key:
                if not self._is_damaged(key):
                    self._report(Fault.MESSAGE_ALONE, f"message {name}", "no delivery belongs to it", name)
                continue
            flags = [number & 1 for number in waiting[1]]
            if len(flags) > 1 and any(flags):
                what = f"{sum(flags):,} of its {len(flags):,} deliveries count as its only one"
                self._report(Fault.WRONG_COUNT, f"delivery … {name} …", what, name)
            waiting = next(owed, None)
        while waiting is not None:
            self._alone(waiting[0])
            waiting = next(owed, None)
        return count

    def _alone(self, key: int) -> None:
        if not self._is_damaged(key):
            name = identity(key)
            self._report(Fault.DELIVERY_ALONE, f"delivery … {name} …", "its message has no record", name)

    def _is_damaged(self, key: int) -> bool:
        return any(low <= key <= high for low, high in self._damaged)

    async def _check_chunks(self) -> None:
        last = -1
        while rows := await self._fetch(_CHUNKS_ALONE, last, PAGE, timeout=STEP_TIMEOUT):
            for last, count in rows:
                name = identity(last)
                self._report(Fault.CHUNKS_ALONE, f"chunk {name}", f"{count:,} chunks of a body", name)

    def _saw(self, octets: int) -> None:
        self._octets += octets
        self._tell(min(self._octets, self._total), self._total)


def judge(row: Columns, *, extra_chunks: bool = True) -> tuple[Fault, str] | None:
    """Return what is wrong with a row of `MESSAGES`; `extra_chunks`: also chunks next to a whole body."""
    key, metadata, size, _, chunks, last, octets, short, _ = row
    try:
        message = records.decode_message(MessageId(identity(key)), bytes(metadata))
    except StoreCorruptError as error:
        return Fault.BAD_RECORD, str(error)
    if size is None:
        uneven = short is not None and short != last
        return body_fault(message, chunks, last, octets, uneven=uneven)
    if size != message.size or message.chunks > 1:
        return Fault.WRONG_SIZE, f"its body has {size:,} octets, not {message.size:,}"
    return (Fault.WRONG_SIZE, "chunks beside a body that is whole") if chunks and extra_chunks else None
