"""Reads the queues of python-slimta (Redis or disk, both with pickled envelopes) and of slimta-lua.

Sources are `redis://HOST:PORT/DB` (with `?prefix=…` unless the prefix is `slimta:`) and `DIR` or
`ENV_DIR:META_DIR`. Recipients that python-slimta has recorded as delivered are left out. Its disk storage of
version 5 fails to record them: python-slimta itself would send to all recipients again, and so does this
relay.

The import is refused while python-slimta runs. This is recognized by a client of the Redis database that
waits for the list of new messages, which its storage always does, or by a process that has loaded pyaio,
which its disk storage needs.

A pickle is a program. The names of the modules in python-slimta's pickles are mapped to `InertObject`, an
object that only stores what it is given; any other name ends the reading before anything is called. The
Python implementation of pickle is used, because the C implementation allocates as much memory as a hostile
number requests.
"""

import contextlib
import io
import os
import pickle
import re
import urllib.parse
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from zonerelay.config.problems import masked
from zonerelay.model.envelope import Origin
from zonerelay.store.redis.connection import foreign_client
from zonerelay.transfer.files import Source, TransferError
from zonerelay.transfer.others.foreign import ForeignMessage, OpenRecipient, number_of, source_of

_PAGE = 1000


@contextlib.asynccontextmanager
async def _opened(url: str) -> AsyncIterator[tuple[Any, int]]:  # Any: as `foreign_client` returns it
    """Connect to a Redis server. Yield its client and the number of the database in the URL. Raise
    TransferError with a message for the operator if that or a later command fails.
    """
    database = urlsplit(url).path.strip("/") or "0"
    if not database.isdigit():
        raise TransferError(f"{_shown(url)}: expected redis://HOST:PORT/DATABASE")
    async with foreign_client(url, lambda text: TransferError(f"{_shown(url)}: {text}")) as redis:
        yield redis, int(database)


async def _users_of(redis: Any, databases: Collection[int]) -> list[dict[str, str]]:  # Any: as above
    """Return the other clients of the Redis server that use one of these databases."""
    return [
        each
        for each in await redis.client_list()
        if each["cmd"].partition("|")[0] != "client" and int(each["db"]) in databases
    ]


def _shown(url: str) -> str:
    """Return a URL without user name and password."""
    scheme, mark, rest = url.partition("://")
    return masked(f"{scheme}{mark}{rest.rpartition('@')[2]}")


_MODULES = (
    *("slimta.envelope", "slimta.bounce", "email.message", "email.policy", "email._policybase"),
    # A header that was set by a program is stored with its parse tree.
    *("email.charset", "email.header", "email.headerregistry", "email._header_value_parser", "email.errors"),
)
"""The modules of the classes in python-slimta's pickles."""
_SETS = (("builtins", "set"), ("__builtin__", "set"))
_FOLD = re.compile(r"\r?\n(?![ \t])")
_FIELD_NAME = re.compile(r"[!-9;-~]+")


class PickleError(ValueError):
    """The pickle cannot be read as an object of python-slimta; contains the reason."""


class InertObject:
    """A placeholder for an object in a pickle, which executes no code. `state` has the attributes of the
    object.
    """

    def __new__(cls, *arguments: object) -> "InertObject":
        made = object.__new__(cls)
        made.arguments = arguments
        made.state = {}
        return made

    arguments: tuple[object, ...]
    state: dict[str, object]

    def __init__(self, *arguments: object) -> None:
        """Ignore the arguments, which `__new__` has stored."""

    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, dict) else {}

    def append(self, item: object) -> None:
        """Ignore an item of a parse tree, because the text of the message has the same content."""

    def extend(self, items: object) -> None:
        """Ignore the items of a parse tree, as `append` does."""


class _Reader(pickle._Unpickler):
    """An unpickler that creates placeholders in place of objects."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) in _SETS:
            return set
        if module in _MODULES and name.isidentifier():
            return InertObject
        raise PickleError(f"it contains {module}.{name}, which no python-slimta queue uses")


def load_pickle(raw: bytes) -> object:
    """Load a pickle that contains only numbers, strings, containers and objects, which become `InertObject`
    objects. Raise PickleError if there is anything else.

    Texts of Python 2 are decoded as UTF-8, with surrogates for invalid bytes.
    """
    try:
        return _Reader(io.BytesIO(raw), encoding="utf-8", errors="surrogateescape").load()
    except PickleError:
        raise
    except Exception as error:  # a broken pickle may raise any exception
        raise PickleError(f"the pickle is truncated or invalid: {type(error).__name__}") from error


def octets(text: object) -> bytes:
    """Return a string from a pickle as bytes. Raise PickleError if it is not a string."""
    if isinstance(text, bytes):
        return text
    if isinstance(text, str):
        return text.encode("utf-8", "surrogateescape")
    raise PickleError("it contains another type where a text is expected")


def header(message: object) -> bytes:
    """Return the header of a pickled `email.message.Message`, followed by an empty line. Raise PickleError if
    it is not valid.
    """
    fields = message.state.get("_headers") if isinstance(message, InertObject) else None
    if not isinstance(fields, list):
        raise PickleError("it has no header")
    lines = []
    for field in fields:
        if not (isinstance(field, tuple) and len(field) == 2):
            raise PickleError("it contains an invalid header field")
        name, value = field
        if isinstance(value, InertObject) and len(value.arguments) > 2:
            value = value.arguments[2]  # the form in which email pickles a field that a program has set
        shown = octets(name).decode("ascii", "replace")
        if not _FIELD_NAME.fullmatch(shown):
            raise PickleError(f"it has a header field named {shown!r}")
        text = octets(value).decode("utf-8", "surrogateescape").rstrip("\r\n")
        lines.append(f"{shown}: {_FOLD.sub(chr(10) + ' ', text)}\n".encode("utf-8", "surrogateescape"))
    return b"".join(lines) + b"\n"


PREFIX = "slimta:"
_META = ("attempts", "timestamp", "delivered_indexes")
LIBRARY = "pyaio"


@contextlib.asynccontextmanager
async def reading_slimta_redis(place: str, now: float) -> AsyncIterator[Source]:
    """Open the Redis queue of a stopped python-slimta. Raise TransferError if it runs or cannot be read."""
    url, _, query = place.partition("?")
    prefix = urllib.parse.parse_qs(query).get("prefix", [PREFIX])[-1].encode()
    pattern = re.sub(rb"([*?\[\\])", rb"\\\1", prefix) + b"*"
    async with _opened(url) as (redis, database):
        for client in await _users_of(redis, {database}):
            if client["cmd"] in ("blpop", "brpop"):
                raise TransferError(
                    f"python-slimta is running: client {client['addr']} of {_shown(url)} is waiting for "
                    "mail; stop it"
                )
        found = {key async for key in redis.scan_iter(pattern, count=_PAGE)}
        keys = [key for key in sorted(found) if await redis.type(key) == b"hash"]
        sizes = [await redis.hstrlen(key, "envelope") for key in keys]

        def name(key: bytes) -> str:
            return key[len(prefix) :].decode("ascii", "replace")

        async def read(key: bytes) -> ForeignMessage | None:
            envelope, *meta = await redis.hmget(key, "envelope", *_META)
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
    """Read the metadata of an envelope on disk. If it is missing, because of a power failure, the message is
    treated as new.
    """
    try:
        meta = load_pickle(path.read_bytes())
    except FileNotFoundError:
        return {}
    if not isinstance(meta, dict):
        raise PickleError(f"{path.name} is not a record")
    return meta


def _foreign(identity: str, raw: bytes, meta: Mapping[Any, object]) -> ForeignMessage:
    """Convert a pickled envelope and its metadata to a `ForeignMessage`. Raise PickleError if it is not
    valid.
    """
    attempts, due = (int(number_of(meta.get("attempts"))), number_of(meta.get("timestamp")))
    delivered = meta.get("delivered_indexes") or ()
    if isinstance(delivered, bytes):
        delivered = load_pickle(delivered)
    envelope = load_pickle(raw)
    if not isinstance(envelope, InertObject):
        raise PickleError("it is not an envelope")
    facts = envelope.state
    recipients = facts.get("recipients")
    if not (isinstance(recipients, list) and isinstance(delivered, list | set | tuple)):
        raise PickleError("its recipients are not a list")
    content = (header(facts.get("headers")), octets(facts.get("message") or b""))

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
    return octets(value).decode("utf-8", "surrogateescape")


def _origin(client: object) -> Origin:
    properties = client if isinstance(client, dict) else {}

    def fact(name: str) -> str:
        value = properties.get(name)
        return value if isinstance(value, str) and value.isprintable() else ""

    return Origin(
        client_address=fact("ip"), helo=fact("name"), protocol=fact("protocol") or "ESMTP", user=fact("auth")
    )


# slimta-lua: reads its four Redis databases, as described by its documents and its `to_meta` functions.
#
# The source is `redis://HOST:PORT/OFFSET`. Database OFFSET has the ids and the times of retries, the next one
# a hash per message with its envelope, the next one its bytes, and the last one the locks of messages that
# are being delivered. The import is refused while there is such a lock, or another client in one of the four
# databases, because only slimta-lua uses them.


@contextlib.asynccontextmanager
async def reading_slimta_lua(place: str, now: float) -> AsyncIterator[Source]:
    """Open the queue of a stopped slimta-lua. Raise TransferError if it runs or cannot be read."""
    async with _opened(place) as (redis, first):
        ids, metas, contents, locks = (first + number for number in range(4))
        for client in await _users_of(redis, {ids, metas, contents, locks}):
            raise TransferError(
                f"slimta-lua is running: client {client['addr']} of {_shown(place)} uses "
                f"database {client['db']}; stop it"
            )
        await redis.select(locks)
        if locked := await redis.dbsize():
            raise TransferError(
                f"slimta-lua is delivering {locked} messages; stop it, and wait until its locks in "
                f"database {locks} have expired"
            )
        await redis.select(ids)
        due = dict(await redis.zrange("retry_queue", 0, -1, withscores=True))
        names = sorted({each for each in (*await redis.smembers("message_ids"), *due) if each})
        await redis.select(contents)
        sizes = [await redis.strlen(name) for name in names]

        async def read(name: bytes) -> ForeignMessage | None:
            await redis.select(metas)
            meta = await redis.hgetall(name)
            await redis.select(contents)
            (octets,) = await redis.mget(name)
            if octets is None and not meta:
                return None  # an id that was reserved for a message that was never stored
            if octets is None or not meta:
                raise ValueError("some of its records are missing in the databases")
            return _lua_message(_lua_name(name), meta, octets, number_of(due.get(name)))

        yield source_of(names, read, name=_lua_name, octets=sum(sizes), now=now)


def _lua_name(name: bytes) -> str:
    return name.decode("ascii", "replace")


def _lua_message(identity: str, meta: Mapping[bytes, bytes], octets: bytes, due: float) -> ForeignMessage:
    def text(name: bytes) -> str:
        return meta.get(name, b"").decode("utf-8", "surrogateescape")

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
