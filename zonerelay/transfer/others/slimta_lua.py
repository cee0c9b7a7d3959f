"""slimta-lua: reads its four Redis databases, as described by its documents and its `to_meta` functions.

The source is `redis://HOST:PORT/OFFSET`. Database OFFSET has the ids and the times of retries, the next one a
hash per message with its envelope, the next one its bytes, and the last one the locks of messages that are
being delivered. The import is refused while there is such a lock, or another client in one of the four
databases, because only slimta-lua uses them.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping

from zonerelay.model.envelope import Origin
from zonerelay.transfer.others.databases import Databases
from zonerelay.transfer.others.foreign import ForeignMessage, OpenRecipient, number_of, source_of
from zonerelay.transfer.stored import Source, TransferError


@contextlib.asynccontextmanager
async def reading_slimta_lua(place: str, now: float) -> AsyncIterator[Source]:
    """Open the queue of a stopped slimta-lua. Raise TransferError if it runs or cannot be read."""
    async with Databases.opened(place) as redis:
        ids, metas, contents, locks = (redis.first + number for number in range(4))
        for client in await redis.clients({ids, metas, contents, locks}):
            raise TransferError(
                f"slimta-lua is running: client {client['addr']} of {redis.url} uses "
                f"database {client['db']}; stop it"
            )
        await redis.select(locks)
        if locked := await redis.number("DBSIZE"):
            raise TransferError(
                f"slimta-lua is delivering {locked} messages; stop it, and wait until its locks in "
                f"database {locks} have expired"
            )
        await redis.select(ids)
        flat = await redis.texts("ZRANGE", "retry_queue", 0, -1, "WITHSCORES")
        due = {key: number_of(score) for key, score in zip(flat[::2], flat[1::2], strict=True)}
        names = sorted({each for each in (*await redis.texts("SMEMBERS", "message_ids"), *due) if each})
        await redis.select(contents)
        sizes = [await redis.number("STRLEN", name) for name in names]

        async def read(name: bytes) -> ForeignMessage | None:
            await redis.select(metas)
            flat = await redis.texts("HGETALL", name)
            await redis.select(contents)
            (octets,) = await redis.texts("MGET", name)
            if octets is None and not flat:
                return None  # an id that was reserved for a message that was never stored
            if octets is None or not flat:
                raise ValueError("some of its records are missing in the databases")
            meta = dict(zip(flat[::2], flat[1::2], strict=True))
            return _foreign(_identity(name), meta, octets, due.get(name, 0.0))

        yield source_of(names, read, name=_identity, octets=sum(sizes), now=now)


def _identity(name: bytes) -> str:
    return name.decode("ascii", "replace")


def _foreign(
    identity: str, meta: Mapping[bytes | None, bytes | None], octets: bytes, due: float
) -> ForeignMessage:
    def text(name: bytes) -> str:
        return (meta.get(name) or b"").decode("utf-8", "surrogateescape")

    attempts = int(number_of(meta.get(b"attempts")))

    async def body() -> AsyncIterator[bytes]:
        yield octets

    return ForeignMessage(
        key=f"slimta-lua {identity}",
        sender=text(b"sender"),
        # Each recipient ends with a NUL.
        recipients=[
            OpenRecipient(address=each, attempts=attempts, due=due)
            for each in text(b"recipients").split("\0")
            if each
        ],
        created=number_of(meta.get(b"timestamp")),
        body=body,
        weight=len(octets),
        eight_bit=not octets.isascii(),
        origin=Origin(
            client_address=text(b"ip"),
            helo=text(b"ehlo"),
            protocol=text(b"protocol") or "ESMTP",
            user=text(b"auth_info"),
        ),
    )
