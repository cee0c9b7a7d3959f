"""One connection to a Redis server that any number of callers share. The only module that knows redis-py.

A wire sends commands as they come, without waiting for answers, which come back in the same order. While
`IN_FLIGHT` batches are under way, further commands gather for the next batch, so that concurrent sessions
share round trips. Scripts of one batch go between MULTI and EXEC, so that the server syncs its log once: it
syncs whenever it has read and carried out 16 KB of a client's commands.

A wire sends its `confirm` commands behind every batch, and the batch has failed when an answer is not good
enough.

Failure: when the connection ends, an answer takes longer than `timeout`, or the server says that it is not to
be used, every call fails with StoreError and `on_broken` is called once; a wire is never repaired but
replaced. Whether a command without an answer was carried out is not known.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from redis.asyncio.connection import AbstractConnection, Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from zonerelay.config.settings import RedisSettings
from zonerelay.process.threads import FILES
from zonerelay.store.common.write.replies import refuse
from zonerelay.store.contract import StoreError, StoreFullError, StoreOpenError, Unhealthy
from zonerelay.store.redis.scripts import DIGESTS, SOURCES
from zonerelay.store.surroundings import ReadSecret

Reply: TypeAlias = "bytes | int | list[Reply] | None"
Argument = bytes | str | int
Command = tuple[Argument, ...]
_Call = tuple[Command, "asyncio.Future[Reply]"]

IN_FLIGHT = 2
"""Batches: one that the server works on, one that it finds when it is done."""
TOGETHER = 100
"""Scripts between MULTI and EXEC: the server does nothing else meanwhile."""
_UNUSABLE: dict[type[ResponseError], str] = {
    NoScriptError: "NOSCRIPT",
    ReadOnlyError: "READONLY",
    MasterDownError: "MASTERDOWN",
    NoPermissionError: "NOPERM",
    ClusterDownError: "CLUSTERDOWN",
    MovedError: "MOVED",
}
_UNUSABLE_TEXTS = ("MISCONF", "NOREPLICAS")
"""Answers after which a connection is given up: a new one is checked from the beginning. redis-py takes the
code off the text where it has an exception for it. NOAUTH and LOADING end a connection by themselves."""

RULE = "docs/redis.md has the ACL rule of a user for the relay"
TURNS = 3
"""Turns of the event loop in which asyncio closes the socket of a TLS connection that was given up."""
GOODBYE = 0.5
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A command such as WAIT and the least that it must answer, number by number."""

    command: Command
    least: tuple[int, ...]

    def is_enough(self, reply: Reply) -> bool:
        numbers = reply if isinstance(reply, list) else [reply]
        return all(
            isinstance(number, int) and number >= least
            for number, least in zip(numbers, self.least, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Server:
    """The server that the settings name, and what reads the password, which they only point at."""

    settings: RedisSettings
    read_password: ReadSecret = str

    async def connection(self) -> AbstractConnection:
        settings = self.settings
        password = await FILES.run(self.read_password)
        try:
            known = dict(parse_url(settings.url))
        except ValueError as error:
            raise StoreOpenError(f"[redis] url: {error}") from error
        kind = known.pop("connection_class", Connection)
        known.update(
            protocol=2,
            socket_timeout=None,  # the wire has its own
            socket_connect_timeout=settings.timeout,
            retry=Retry(NoBackoff(), 0),
        )
        if password:
            known["password"] = password
        if settings.user:
            known["username"] = settings.user
        if settings.ca_file:
            known["ssl_ca_certs"] = str(settings.ca_file)
        made = kind(**known)  # type: ignore[operator]  # redis-py types the values of this mapping as objects
        assert isinstance(made, AbstractConnection)
        return made


@dataclass(slots=True, eq=False)
class _Batch:
    """Commands that were sent together."""

    groups: list[list[asyncio.Future[Reply]]]
    confirm: Sequence[Confirmation]


class Wire:
    """Opened by `open_wire`."""

    def __init__(
        self,
        connection: AbstractConnection,
        *,
        timeout: float,
        on_broken: Callable[[str], None],
    ) -> None:
        self.confirm: Sequence[Confirmation] = ()
        self._connection = connection
        self._writer = connection._writer
        self._timeout = timeout
        self._on_broken = on_broken
        self._broken: StoreError | None = None
        self._queue: list[_Call] = []
        self._sent: deque[_Batch] = deque()
        self._to_send = asyncio.Event()
        self._to_receive = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._progress = self._loop.time()
        self._watch = self._loop.call_later(timeout / 4, self._look)
        self._tasks = (self._loop.create_task(self._send()), self._loop.create_task(self._receive()))

    def call(self, *command: Argument) -> asyncio.Future[Reply]:
        """Sends a command and raises nothing. The future raises StoreError only, and needs no caller that
        awaits it.
        """
        future: asyncio.Future[Reply] = self._loop.create_future()
        if self._broken is not None:
            refuse(future, self._broken)
        else:
            self._queue.append((command, future))
            self._to_send.set()
        return future

    def run(self, script: str, prefix: bytes, *arguments: Argument) -> asyncio.Future[Reply]:
        return self.call("EVALSHA", DIGESTS[script], 1, prefix, *arguments)

    async def close(self) -> None:
        self._break("closed", tell=False)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await _hang_up(self._connection, self._writer)

    # --- inside

    async def _send(self) -> None:
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            if len(self._sent) >= IN_FLIGHT:
                continue  # until an answer has come
            queue, self._queue = self._queue, []
            if not queue:
                continue
            if not self._sent:
                self._progress = self._loop.time()
            groups = list(_groups(queue))
            batch = _Batch([[future for _, future in group] for group in groups], self.confirm)
            self._sent.append(batch)
            self._to_receive.set()
            commands = [command for group in groups for command in _wrapped(group)]
            commands += [asked.command for asked in batch.confirm]
            try:
                packed = self._connection.pack_commands(commands)
                await self._connection.send_packed_command(packed, check_health=False)
            except (RedisError, OSError) as error:
                self._break(str(error))
                return

    async def _receive(self) -> None:
        try:
            while True:
                while not self._sent:
                    self._to_receive.clear()
                    await self._to_receive.wait()
                await self._receive_batch(self._sent[0])
                self._sent.popleft()
                self._to_send.set()
        except (RedisError, OSError, StoreError) as error:
            self._break(str(error))

    async def _receive_batch(self, batch: _Batch) -> None:
        replies: list[tuple[asyncio.Future[Reply], Reply | StoreError]] = []
        for group in batch.groups:
            replies += zip(group, await self._read_group(len(group)), strict=True)
        for asked in batch.confirm:
            reply = await self._read()
            if isinstance(reply, StoreError) or not asked.is_enough(reply):
                raise StoreError(f"{asked.command[0]!r} was answered {reply!r}: not as durable as wanted")
        for future, reply in replies:
            if isinstance(reply, StoreError):
                refuse(future, reply)
            elif not future.done():
                future.set_result(reply)

    async def _read_group(self, size: int) -> Sequence[Reply | StoreError]:
        if size == 1:
            return [await self._read()]
        for _ in range(size + 1):
            await self._read()  # that it is queued
        replies = await self._read()
        if not isinstance(replies, list) or len(replies) != size:
            raise StoreError(f"EXEC was answered {replies!r}"[:200])
        return [_judged(reply) if isinstance(reply, ResponseError) else reply for reply in replies]

    async def _read(self) -> Reply | StoreError:
        try:
            # Decoding is off for the connection: bytes, numbers and lists of them.
            reply: Reply = await self._connection.read_response()
        except ResponseError as error:
            return _judged(error)
        self._progress = self._loop.time()
        return reply

    def _look(self) -> None:
        if self._sent and self._loop.time() - self._progress > self._timeout:
            self._break(f"no answer within {self._timeout:g} s")
        elif self._broken is None:
            self._watch = self._loop.call_later(self._timeout / 4, self._look)

    def _break(self, reason: str, *, tell: bool = True) -> None:
        if self._broken is not None:
            return
        self._broken = StoreError(f"{Unhealthy.SERVER_DOWN}: {reason}")
        self._watch.cancel()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for batch in self._sent:
            for future in itertools.chain.from_iterable(batch.groups):
                refuse(future, self._broken)
        for _, future in self._queue:
            refuse(future, self._broken)
        self._sent.clear()
        self._queue.clear()
        if tell:
            self._on_broken(reason)


def _groups(queue: list[_Call]) -> Iterator[list[_Call]]:
    """Groups scripts that follow each other; every other command is a group by itself."""
    for is_script, calls in itertools.groupby(queue, key=lambda call: call[0][0] == "EVALSHA"):
        some = list(calls)
        step = TOGETHER if is_script else 1
        for start in range(0, len(some), step):
            yield some[start : start + step]


def _wrapped(group: list[_Call]) -> list[Command]:
    commands = [command for command, _ in group]
    return commands if len(commands) == 1 else [("MULTI",), *commands, ("EXEC",)]


def _judged(error: ResponseError) -> StoreError:
    """Returns the error for the caller, or raises it when the connection must not be used any longer."""
    text = str(error)
    if (code := _UNUSABLE.get(type(error))) is not None:
        where = f" ({RULE})" if code == "NOPERM" else ""
        raise StoreError(f"{code} {text}{where}")
    if text.startswith(_UNUSABLE_TEXTS):
        raise StoreError(text)
    if "maxmemory" in text:
        return StoreFullError("the spool's server has no memory left")
    return StoreError(f"the spool's server: {text}")


async def _hang_up(connection: AbstractConnection, writer: asyncio.StreamWriter | None) -> None:
    """Closes a connection. TLS waits for the server's goodbye, at most `GOODBYE` seconds. redis-py forgets
    the writer when a read is cancelled and when the time is up, and TLS goes on waiting: the caller keeps it.
    """
    try:
        async with asyncio.timeout(GOODBYE):
            await connection.disconnect()
            if writer is not None:
                await writer.wait_closed()
    except (TimeoutError, RedisError, OSError):
        if writer is not None:
            writer.transport.abort()
    finally:
        # asyncio lets go of the socket in a later turn: after an abort, and when a handshake was cancelled.
        for _ in range(TURNS):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def _connected(server: Server) -> AsyncIterator[AbstractConnection]:
    """A new connection, which ends when the block fails. Raises StoreError."""
    connection, writer = await server.connection(), None
    disconnect = connection.disconnect

    async def noted(*args: Any, **given: Any) -> None:  # Any: redis-py's own parameters
        """Keeps the writer that redis-py forgets when it gives up a connection that it has just made."""
        nonlocal writer
        writer = connection._writer or writer
        await disconnect(*args, **given)

    connection.disconnect = noted  # type: ignore[method-assign]
    try:
        await connection.connect()  # type: ignore[no-untyped-call]  # redis-py's annotations have holes
        writer = connection._writer
        yield connection
    except (RedisError, OSError) as error:
        await _hang_up(connection, writer)
        raise StoreError(f"{Unhealthy.SERVER_DOWN}: {error}") from error
    except asyncio.CancelledError:
        await _hang_up(connection, writer)
        raise


async def open_wire(server: Server, on_broken: Callable[[str], None]) -> Wire:
    """Raises StoreError."""
    async with _connected(server) as connection:
        return Wire(connection, timeout=server.settings.timeout, on_broken=on_broken)


async def load_scripts(wire: Wire) -> None:
    """Loads the scripts on each new connection, because the server may have been started again."""
    answers = [wire.call("SCRIPT LOAD", source) for source in SOURCES.values()]
    if await asyncio.gather(*answers) != [digest.encode() for digest in DIGESTS.values()]:
        raise StoreError("the spool's server does not take scripts")


class Channel:
    """A connection of its own that hears what is published."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self._writer = connection._writer

    async def next(self) -> bytes:
        """Waits for the next message. Raises StoreError when the connection has ended."""
        try:
            while True:
                heard = await self._connection.read_response()
                if isinstance(heard, list) and heard[0] == b"message":
                    said: bytes = heard[2]
                    return said
        except (RedisError, OSError) as error:
            raise StoreError(f"{Unhealthy.SERVER_DOWN}: {error}") from error

    async def close(self) -> None:
        await _hang_up(self._connection, self._writer)


async def open_channel(server: Server, name: bytes) -> Channel:
    """Raises StoreError."""
    async with _connected(server) as connection:
        await connection.send_command("SUBSCRIBE", name)
        await connection.read_response()  # an error when it is connected and not allowed to listen
        return Channel(connection)


def pairs(reply: list[Reply]) -> list[tuple[bytes, bytes]]:
    """Returns a flat list of names and values in pairs."""
    return [
        (name, value)
        for name, value in zip(reply[::2], reply[1::2], strict=True)
        if isinstance(name, bytes) and isinstance(value, bytes)
    ]


def as_list(reply: Reply) -> list[Reply]:
    if not isinstance(reply, list):
        raise StoreError(f"the spool's server gave an answer that makes no sense: {reply!r}"[:200])
    return reply
