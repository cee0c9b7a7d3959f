"""Repairs a PostgreSQL spool whose relays are stopped, in one transaction: all of it, or nothing.

The tables are locked against every relay until it ends. What leaves them is in the salvage or in the file of
old records before that, durably; so a repair that is killed has changed nothing, and may be run again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from zonerelay.config.settings import PostgresSettings
from zonerelay.model.address import domain_of
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.check import Fault, Repaired, Salvage, Tell
from zonerelay.store.common import records
from zonerelay.store.common.repairs import Remains, SharedRepair, Troubled, recipient_in
from zonerelay.store.contract import StoreCorruptError, StoreError
from zonerelay.store.postgres import sql
from zonerelay.store.postgres.check import (
    HAS_TABLES,
    MESSAGES,
    STEP_TIMEOUT,
    PostgresWalk,
    differing_indexes,
    judge,
)
from zonerelay.store.postgres.driver import (
    BusyError,
    Columns,
    ConnectionLostError,
    DamagedFilesError,
    Fetch,
    Link,
)
from zonerelay.store.postgres.open import access_of
from zonerelay.store.postgres.rows import delivery_of, number, word
from zonerelay.store.postgres.schema import check_schema

_LOCK = "LOCK TABLE node, upload, message, chunk, delivery IN SHARE ROW EXCLUSIVE MODE"
_ALIVE = """
SELECT node, extract(epoch FROM expires - clock_timestamp())::float8 FROM node
WHERE session IS NOT NULL AND expires > clock_timestamp() ORDER BY node
"""
_DELIVERIES = """
SELECT zone, message_id, recipient, next_attempt, held, record, domain, created, alone FROM delivery
WHERE zone = ANY($1::text[]) AND message_id = $2 ORDER BY recipient, zone
"""
_SAME = "zone = $1 AND message_id = $2 AND recipient = $3"
_REMOVE = f"DELETE FROM delivery WHERE {_SAME}"  # noqa: S608
_CORRECT = f"UPDATE delivery SET domain = $4, created = $5, alone = $6 WHERE {_SAME}"  # noqa: S608
_REMOVE_BESIDE = """
DELETE FROM chunk USING message m WHERE message_id = $1 AND m.id = $1 AND m.body IS NOT NULL
"""
_REMOVE_ALL = "DELETE FROM delivery WHERE zone = ANY($1::text[]) AND message_id = $2"
_NUMBERS = "SELECT number FROM chunk WHERE message_id = $1 ORDER BY number"
_CHUNK = "SELECT data FROM chunk WHERE message_id = $1 AND number = $2"


async def repair(
    settings: PostgresSettings,
    salvage: Salvage,
    tell: Tell,
    *,
    kept: Path,
    carry_out: bool,
    environment: Mapping[str, str],
) -> Repaired:
    """`kept` is the file of old records. Raises StoreError in words, or OSError."""
    mending = SharedRepair(salvage, kept, carry_out=carry_out)
    link = await Link.open(access_of(settings, environment), reads=True)
    try:
        async with link.transaction(one_moment=not carry_out) as fetch:
            if not (await fetch(HAS_TABLES))[0][0]:
                return mending.repaired(0)  # no relay has been started here yet
            await check_schema(fetch, settings.schema)
            await _refuse_living(fetch)
            if carry_out:
                await fetch("SET LOCAL lock_timeout = '10s'")
                await fetch(_LOCK)
                await _refuse_living(fetch)  # one may have been faster
            return await _Repair(fetch, mending, tell).run()
    except DamagedFilesError as error:
        raise StoreError(
            f"{error}: files of the database itself are damaged, which its administrator repairs first."
            " The queue is as it was; what was salvaged until then is kept"
        ) from error
    finally:
        mending.close()
        await link.close()


async def living(settings: PostgresSettings, environment: Mapping[str, str]) -> int:
    """Returns how many relays have a session, without a migration's own. Raises StoreError."""
    link = await Link.open(access_of(settings, environment), reads=True)
    try:
        async with link.transaction(one_moment=True) as fetch:
            if not (await fetch(HAS_TABLES))[0][0]:
                return 0
            return sum(node != settings.node for node, _ in await fetch(_ALIVE))
    finally:
        await link.close()


async def _refuse_living(fetch: Fetch) -> None:
    """Raises StoreError while a relay has a session."""
    if alive := await fetch(_ALIVE):
        nodes = ", ".join(str(node) for node, _ in alive)
        raise StoreError(
            f"relays use the queue (node {nodes}): stop them on every machine; one that was killed counts for"
            f" {max(wait for _, wait in alive):.0f} s more. Nothing was changed"
        )


class _Repair:
    def __init__(self, fetch: Fetch, mending: SharedRepair, tell: Tell) -> None:
        self._fetch = fetch
        self._mending = mending
        self._tell = tell
        self._zones: list[str] = []

    async def run(self) -> Repaired:
        if self._mending.carry_out:
            tables = {table async for _, table, _, _ in differing_indexes(self._fetch)}
            for table in sorted(tables):
                await self._fetch(f"REINDEX TABLE {table}", timeout=STEP_TIMEOUT)
        self._zones = [zone for (zone,) in await self._fetch(sql.ZONES)]
        troubled = Troubled()
        contents = await PostgresWalk(self._fetch, troubled.add, self._tell).walk()
        for identity in troubled.ids:
            await self._mend(identity)
        if self._mending.carry_out:
            left = Troubled()
            await PostgresWalk(self._fetch, left.add, self._tell).walk()
            if left.first:
                raise StoreError(f"the repaired spool would not be sound: {left.first}; nothing was changed")
        return self._mending.repaired(contents.deliveries)

    async def _mend(self, identity: str) -> None:
        key = number(MessageId(identity))
        rows = await self._attempt(_DELIVERIES, self._zones, key)
        found, unreadable = _read(rows)
        message, why, old = await self._message(identity, key)
        remains = Remains(
            identity,
            message,
            why or ("" if message is not None else "its record is missing"),
            tuple(found),
            tuple(recipient_in(row[2].encode("utf-8", "replace")) for row in unreadable),
            pieces=lambda: self._body(key),
            old={**old, **{f"delivery {row[0]} {identity} {row[2]}": bytes(row[5]) for row in rows}},
        )
        leaves = await self._mending.judge(remains)
        if not self._mending.carry_out:
            return
        if leaves:
            await self._fetch(_REMOVE_ALL, self._zones, key)
            await self._fetch(sql.REMOVE_MESSAGES, [key])
            await self._fetch("DELETE FROM upload WHERE message_id = $1", key)
            return
        await self._fetch(_REMOVE_BESIDE, key)
        for row in unreadable:
            await self._fetch(_REMOVE, *row[:3])
        alone = len(rows) - len(unreadable) == 1
        for row in rows:
            if row not in unreadable:
                delivery = delivery_of(row)
                domain = word(domain_of(delivery.recipient))
                await self._fetch(_CORRECT, *row[:3], domain, delivery.created, alone and row[8])

    async def _message(self, identity: str, key: int) -> tuple[Message | None, str, dict[str, bytes]]:
        """The message, what its record or its body lacks, and its record."""
        rows = await self._attempt("SELECT metadata FROM message WHERE id = $1", key)
        if not rows:
            return None, "", {}
        old = {f"message {identity}": bytes(rows[0][0])}
        try:
            message = records.decode_message(MessageId(identity), bytes(rows[0][0]))
        except StoreCorruptError as error:
            return None, str(error), old
        whole = await self._attempt(MESSAGES, key, "", key, 1)
        fault = (
            judge(whole[0], extra_chunks=False) if whole else (Fault.UNREADABLE, "its body cannot be read")
        )
        return message, "" if fault is None else fault[1], old

    async def _attempt(self, statement: str, *values: object) -> Sequence[Columns]:
        """The rows, none when the server cannot read them."""
        await self._fetch("SAVEPOINT look")
        rows: Sequence[Columns] = ()
        try:
            rows = await self._fetch(statement, *values, timeout=STEP_TIMEOUT)
        except (ConnectionLostError, BusyError):
            raise
        except StoreError:
            await self._fetch("ROLLBACK TO look")
        await self._fetch("RELEASE look")
        return rows

    async def _body(self, key: int) -> AsyncIterator[bytes]:
        """What can be read of it."""
        for (body,) in await self._attempt("SELECT body FROM message WHERE id = $1", key):
            if body is not None:
                yield bytes(body)
                return
        for (which,) in await self._attempt(_NUMBERS, key):
            for (data,) in await self._attempt(_CHUNK, key, which):
                yield bytes(data)


def _read(rows: Sequence[Columns]) -> tuple[list[Delivery], list[Columns]]:
    """The deliveries, and the rows that make no sense."""
    found: list[Delivery] = []
    unreadable: list[Columns] = []
    for row in rows:
        try:
            found.append(delivery_of(row))
        except (StoreCorruptError, ValueError):
            unreadable.append(row)
    return found, unreadable
