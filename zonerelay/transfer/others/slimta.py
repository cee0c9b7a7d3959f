"""python-slimta: reads its Redis hashes and its disk storage, both of which contain pickled envelopes.

Sources are `redis://HOST:PORT/DB` (with `?prefix=…` unless the prefix is `slimta:`) and `DIR` or
`ENV_DIR:META_DIR`. Recipients that python-slimta has recorded as delivered are left out. Its disk storage of
version 5 fails to record them: python-slimta itself would send to all recipients again, and so does this
relay.

The import is refused while python-slimta runs. This is recognized by a client of the Redis database that
waits for the list of new messages, which its storage always does, or by a process that has loaded pyaio,
which its disk storage needs.
"""

from __future__ import annotations

import contextlib
import os
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from zonerelay.model.envelope import Origin
from zonerelay.transfer.others import pickles
from zonerelay.transfer.others.databases import Databases
from zonerelay.transfer.others.foreign import ForeignMessage, OpenRecipient, number_of, source_of
from zonerelay.transfer.others.pickles import InertObject, PickleError
from zonerelay.transfer.stored import Source, TransferError

PREFIX = "slimta:"
_META = ("attempts", "timestamp", "delivered_indexes")
LIBRARY = "pyaio"


@contextlib.asynccontextmanager
async def reading_slimta_redis(place: str, now: float) -> AsyncIterator[Source]:
    """Open the Redis queue of a stopped python-slimta. Raise TransferError if it runs or cannot be read."""
    url, _, query = place.partition("?")
    prefix = urllib.parse.parse_qs(query).get("prefix", [PREFIX])[-1].encode()
    async with Databases.opened(url) as redis:
        for client in await redis.clients({redis.first}):
            if client["cmd"] in ("blpop", "brpop"):
                raise TransferError(
                    f"python-slimta is running: client {client['addr']} of {redis.url} is waiting for "
                    "mail; stop it"
                )
        keys = sorted([key async for key in redis.keys(prefix) if await redis.is_hash(key)])
        sizes = [await redis.number("HSTRLEN", key, "envelope") for key in keys]

        def name(key: bytes) -> str:
            return key[len(prefix) :].decode("ascii", "replace")

        async def read(key: bytes) -> ForeignMessage | None:
            envelope, *meta = await redis.texts("HMGET", key, "envelope", *_META)
            if envelope is None:
                return None  # it belongs to another program, or was removed
            return _foreign(name(key), envelope, dict(zip(_META, meta, strict=True)))

        yield source_of(keys, read, name=name, octets=sum(sizes), now=now)


@contextlib.asynccontextmanager
async def reading_slimta_disk(place: str, now: float) -> AsyncIterator[Source]:
    """Open the disk queue of a stopped python-slimta. Raise TransferError if it runs, and OSError if the
    queue cannot be read.
    """
    first, _, second = place.partition(":")
    envelopes, metas = Path(first), Path(second or first)
    for directory in (envelopes, metas):
        if not directory.is_dir():
            raise TransferError(f"the directory {directory} does not exist")
    for process in _users():
        raise TransferError(f"process {process} has loaded {LIBRARY}, like python-slimta; stop it")
    files = sorted(path for path in envelopes.iterdir() if path.suffix == ".env")

    async def read(file: Path) -> ForeignMessage:
        return _foreign(file.stem, file.read_bytes(), _meta(metas / f"{file.stem}.meta"))

    octets = sum(file.stat().st_size for file in files)
    yield source_of(files, read, name=lambda file: file.stem, octets=octets, now=now)


def _users() -> Iterator[str]:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if maps.parts[2] != str(os.getpid()) and f"/{LIBRARY}." in maps.read_text(errors="replace"):
                yield maps.parts[2]


def _meta(path: Path) -> Mapping[Any, object]:
    """Read the metadata of an envelope. A power failure may have left none; the message is treated as new
    then.
    """
    try:
        meta = pickles.load(path.read_bytes())
    except FileNotFoundError:
        return {}
    if not isinstance(meta, dict):
        raise PickleError(f"{path.name} is not a record")
    return meta


def _foreign(identity: str, raw: bytes, meta: Mapping[Any, object]) -> ForeignMessage:
    """Read an envelope. Raise PickleError if it is not valid."""
    attempts, due = (int(number_of(meta.get("attempts"))), number_of(meta.get("timestamp")))
    delivered = meta.get("delivered_indexes") or ()
    if isinstance(delivered, bytes):
        delivered = pickles.load(delivered)
    envelope = pickles.load(raw)
    if not isinstance(envelope, InertObject):
        raise PickleError("it is not an envelope")
    facts = envelope.state
    recipients = facts.get("recipients")
    if not (isinstance(recipients, list) and isinstance(delivered, list | set | tuple)):
        raise PickleError("its recipients are not a list")
    content = (pickles.header(facts.get("headers")), pickles.octets(facts.get("message") or b""))

    async def body() -> AsyncIterator[bytes]:
        for part in content:
            yield part

    return ForeignMessage(
        key=f"slimta {identity}",
        sender=_text(facts.get("sender") or ""),
        recipients=[
            OpenRecipient(address=_text(each), attempts=attempts, due=due if attempts else 0.0)
            for index, each in enumerate(recipients)
            if index not in delivered
        ],
        created=number_of(facts.get("timestamp")),
        body=body,
        weight=sum(map(len, content)),
        eight_bit=not all(part.isascii() for part in content),
        origin=_origin(facts.get("client")),
    )


def _text(value: object) -> str:
    return pickles.octets(value).decode("utf-8", "surrogateescape")


def _origin(client: object) -> Origin:
    properties = client if isinstance(client, dict) else {}

    def fact(name: str) -> str:
        value = properties.get(name)
        return value if isinstance(value, str) and value.isprintable() else ""

    return Origin(
        client_address=fact("ip"), helo=fact("name"), protocol=fact("protocol") or "ESMTP", user=fact("auth")
    )
