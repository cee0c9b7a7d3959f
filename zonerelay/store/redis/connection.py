"""Implements a pipelined connection to a Redis server for any number of callers. This is the only module that
uses redis-py.

A wire sends one batch of commands at a time. While it waits for the replies, further commands are gathered
for the next batch, so concurrent sessions share round trips. It sends its `confirm` commands after every
batch, and the batch fails if their replies are insufficient.

On failure: if the connection ends, a reply takes longer than `timeout`, or the server reports that it must
not be used, every call fails with StoreError. A wire is never repaired but
replaced. It is unknown whether a command without a reply was executed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias

import msgspec
from redis.asyncio import Redis
from redis.asyncio import connection as driver
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from zonerelay.config.settings import RedisSettings
from zonerelay.process.files import in_words
from zonerelay.process.tasks import cancel_all
from zonerelay.process.threads import FILES
from zonerelay.store.context import ReadSecret
from zonerelay.store.contract import StoreError, StoreFullError, StoreLostError, StoreOpenError, Unhealthy
from zonerelay.store.keys.group_commit import refuse

Reply: TypeAlias = "bytes | int | list[Reply] | None"
Argument = bytes | str | int
Command = tuple[Argument, ...]
_Call = tuple[Command, "asyncio.Future[Reply]"]

RULE = "see docs/store/redis.md for the ACL rule of the relay's user"
_UNUSABLE = {
    "NOPERM": f"the server's user lacks a privilege ({RULE})",
    "NOAUTH": "the server requires a login",
    "READONLY": "the server has become a read-only replica",
    "MASTERDOWN": "the server is a replica and has lost its primary",
    "NOREPLICAS": "the server has fewer replicas than min-replicas-to-write requires",
    "MISCONF": "the server cannot write to its disk",
    "CLUSTERDOWN": "the Cluster does not serve the slot of the key prefix",
    "MOVED": "the slot of the key prefix is on another node of the Cluster; set [redis] url to that node",
    "CROSSSLOT": "a Cluster requires a hash tag in [redis] prefix, such as {zonerelay}:",
}
"""Replies after which a connection is closed. A new one is checked from the beginning."""

TURNS = 3
"""The number of loop iterations in which asyncio closes the socket of an aborted TLS connection."""


class Confirmation(msgspec.Struct, frozen=True):
    """A command that is sent after each batch, such as WAIT, and the smallest acceptable number in its reply.
    `failure` describes the failure if the number is lower.
    """

    command: Command
    least: int
    failure: str

    def is_enough(self, reply: Reply) -> bool:
        number = reply[0] if isinstance(reply, list) else reply  # WAITAOF also counts replicas
        return isinstance(number, int) and number >= self.least


class RedisEndpoint(msgspec.Struct, frozen=True):
    """The configured Redis server, and a function that reads its password."""

    settings: RedisSettings
    read_password: ReadSecret = str

    async def connection(self) -> driver.AbstractConnection:
        settings = self.settings
        password = await FILES.run(self.read_password)
        try:
            known = dict(driver.parse_url(settings.url))
        except ValueError as error:
            raise StoreOpenError(f"[redis] url: {error}") from error
        kind = known.pop("connection_class", driver.Connection)
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
        assert isinstance(made, driver.AbstractConnection)
        return made


@dataclass(eq=False, repr=False)
class SharedConnection:
    """A Redis connection that any number of callers share. `open_wire` opens it."""

    connection: driver.AbstractConnection
    _: KW_ONLY
    timeout: float

    def __post_init__(self) -> None:
        self.confirm: Sequence[Confirmation] = ()
        self._writer = self.connection._writer
        self._broken: StoreError | None = None
        self._queue: list[_Call] = []
        self._sent: list[_Call] = []
        self._is_asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._work())

    def call(self, *command: Argument) -> asyncio.Future[Reply]:
        """Send a command and return a future of its reply. The future raises only StoreError and need not be
        awaited.
        """
        future: asyncio.Future[Reply] = self._loop.create_future()
        if self._broken is not None:
            refuse(future, self._broken)
        else:
            self._queue.append((command, future))
            self._is_asked.set()
        return future

    def run(self, script: str, names: Sequence[Argument], *values: Argument) -> asyncio.Future[Reply]:
        """Run a Lua script. Its text is sent each time, so nothing depends on what a server remembers."""
        return self.call("EVAL", script, len(names), *names, *values)

    async def close(self) -> None:
        self._break(_lost("closed"))
        await cancel_all(self._task)
        await _hang_up(self.connection, self._writer)

    # --- inside

    async def _work(self) -> None:
        try:
            while True:
                await self._is_asked.wait()
                self._is_asked.clear()
                await self._exchange()
        except StoreError as error:
            self._break(error)
        except TimeoutError:
            self._break(_lost(f"no answer within {self.timeout:g} s"))
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody must wait for a reply for ever
            self._break(_lost(error))

    async def _exchange(self) -> None:
        """Send all queued commands in one pipeline, and pass on the replies once the last one has arrived."""
        self._sent, self._queue = self._queue, []
        confirm = self.confirm
        commands = [command for command, _ in self._sent] + [asked.command for asked in confirm]
        async with asyncio.timeout(self.timeout) as patience:
            packed = self.connection.pack_commands(commands)
            await self.connection.send_packed_command(packed, check_health=False)
            replies: list[Reply | StoreError] = []
            for _ in commands:
                replies.append(await self._read())
                patience.reschedule(self._loop.time() + self.timeout)
        for asked, reply in zip(confirm, replies[len(self._sent) :], strict=True):
            if isinstance(reply, StoreError) or not asked.is_enough(reply):
                raise reply if isinstance(reply, StoreError) else StoreError(asked.failure)
        for (_, future), reply in zip(self._sent, replies, strict=False):
            if isinstance(reply, StoreError):
                refuse(future, reply)
            elif not future.done():
                future.set_result(reply)
        self._sent = []

    async def _read(self) -> Reply | StoreError:
        try:
            # Decoding is disabled for the connection: replies are bytes, numbers and lists of them.
            reply: Reply = await self.connection.read_response()
        except ResponseError as error:
            return _judged(error)
        return reply

    @property
    def is_over(self) -> bool:
        """Whether the connection is unusable. It is not reported when the server closes an idle connection
        (`timeout`), because no caller waits for a reply.
        """
        reader = self.connection._reader
        return self._broken is not None or reader is None or reader.at_eof()

    def _break(self, error: StoreError) -> None:
        if self._broken is None:
            self._broken = error
            for _, future in (*self._sent, *self._queue):
                refuse(future, error)


def _judged(error: ResponseError) -> StoreError:
    """Return the error for the caller of a command, or raise it if the whole connection must be closed."""
    text = str(error)
    # redis-py removes the code from the text if it has an exception for it.
    code = error.status_code or text.partition(" ")[0]
    if (meaning := _UNUSABLE.get(code)) is not None:
        raise StoreError(f"{meaning}: {text}")
    if code == "OOM":
        return StoreFullError("the spool's server is out of memory")
    return StoreError(f"the spool's server: {text}")


def _lost(reason: object) -> StoreError:
    return StoreLostError(f"{Unhealthy.SERVER_DOWN}: {_shown(reason)}")


def _shown(reason: object) -> str:
    if isinstance(reason, BaseException) and isinstance(reason.__context__, OSError):
        return in_words(reason.__context__)  # redis-py adds its own text
    return str(reason)


async def _hang_up(connection: driver.AbstractConnection, writer: asyncio.StreamWriter | None) -> None:
    """Close a connection to Redis. redis-py drops the writer if a read is cancelled or times out, while TLS
    continues to wait for the server's close message, so the caller keeps the writer.
    """
    if writer is not None:
        writer.transport.abort()
    with contextlib.suppress(RedisError, OSError):
        await connection.disconnect(nowait=True)
    # asyncio releases the socket in a later iteration, after an abort and after a cancelled handshake.
    for _ in range(TURNS):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def _connected(server: RedisEndpoint) -> AsyncIterator[driver.AbstractConnection]:
    """Yield a new connection, and close it if the block fails. `timeout` limits both. Raises StoreError."""
    connection, seconds = await server.connection(), server.settings.timeout
    try:
        async with asyncio.timeout(seconds):  # redis-py limits the connection, but not the first replies
            await connection.connect()  # type: ignore[no-untyped-call]  # redis-py's annotations have holes
            yield connection
    except BaseException as error:
        await _hang_up(connection, connection._writer)
        if isinstance(error, TimeoutError):
            raise _lost(f"no answer within {seconds:g} s") from error
        if not isinstance(error, RedisError | OSError):
            raise
        if isinstance(error.__cause__ or error, AuthenticationError):
            user = server.settings.user or "default"
            raise StoreOpenError(f"[redis] the server rejects the login of {user}: {error}") from error
        raise _lost(error) from error


async def open_wire(server: RedisEndpoint) -> SharedConnection:
    """Open a connection that any number of callers can share. Raises StoreError."""
    async with _connected(server) as connection:
        return SharedConnection(connection, timeout=server.settings.timeout)


@contextlib.asynccontextmanager
async def subscribed(
    server: RedisEndpoint, name: bytes, hear: Callable[[str], None]
) -> AsyncIterator[asyncio.Event]:
    """Call `hear` with each message of a channel during the block. Yield an event that is set when the
    connection has ended. Raises StoreError if it cannot subscribe.
    """
    async with _connected(server) as connection:
        await connection.send_command("SUBSCRIBE", name)
        await connection.read_response()  # raises if listening is not permitted
    writer, ended = connection._writer, asyncio.Event()

    async def listen() -> None:
        try:
            while True:
                heard = await connection.read_response()
                if isinstance(heard, list) and heard[0] == b"message":
                    hear(heard[2].decode())
        finally:
            ended.set()

    task = asyncio.get_running_loop().create_task(listen())
    try:
        yield ended
    finally:
        await cancel_all(task)
        await _hang_up(connection, writer)


@contextlib.asynccontextmanager
async def foreign_client(url: str, failed: Callable[[str], Exception]) -> AsyncIterator[Any]:
    """Yield redis-py's own client, which reads the queue of another program. `failed` returns the exception
    that is raised if that or a later command fails.
    """
    try:
        # Any: redis-py declares the results of its synchronous client as well
        client: Any = Redis.from_url(
            url, single_connection_client=True, protocol=2, retry=Retry(NoBackoff(), 0)
        )
    except ValueError as error:
        raise failed(str(error)) from error
    try:
        async with client:
            yield client
    except RedisError as error:
        raise failed(_shown(error)) from error


def as_list(reply: Reply) -> list[Reply]:
    if not isinstance(reply, list):
        raise StoreError(f"the spool's server returned an invalid reply: {reply!r}"[:200])
    return reply
