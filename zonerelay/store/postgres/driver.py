"""Wraps asyncpg, the PostgreSQL driver. This is the only module that uses asyncpg, which it imports for the
first connection.

A `DatabaseConnection` is one connection that executes one statement at a time; other callers wait. Failures
are StoreErrors:

- `ConnectionLostError`: the connection was lost or does not respond. It is unknown whether the statement was
  executed.
- `StatementRejectedError`: the statement itself is refused (a duplicate, an impossible value) and always will
  be.
- `TransactionConflictError`: another transaction conflicted; the same statement may succeed at once.
- StoreFullError, and StoreError for all other errors of the server.

A commit whose wait for a standby was interrupted (`pg_cancel_backend`, a shutdown) ends with a warning and no
error. It counts as lost, and so do all later statements on that connection.

No text here contains a password. Of the server's error only the message is used, never the DETAIL, which
quotes rows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from zonerelay.process.files import in_words
from zonerelay.process.threads import FILES
from zonerelay.store.context import ReadSecret, driver
from zonerelay.store.contract import StoreCorruptError, StoreError, StoreFullError, StoreLostError
from zonerelay.store.keys.server import KeptConnection

if TYPE_CHECKING:
    import asyncpg

CONNECT_TIMEOUT = 10.0
COMMAND_TIMEOUT = 30.0
"""Seconds after which a server that does not respond counts as lost."""
CLOSE_TIMEOUT = 3.0
MOST_PATIENCE = 60.0
"""Seconds that the server waits at most for the next statement of a transaction."""

_POOL = (
    "If a connection pooler is used, its pool may be too small (default_pool_size): a relay requires four "
    "connections, and two more for each node that it takes over"
)
_STANDBY_SOURCE = "syncrep.c"
"""The source file of the server's warnings about synchronous standbys. Their texts are localized."""

# Any: only the author of a statement knows the types of its columns.
Columns = Sequence[Any]


class Fetch(Protocol):
    """A function that executes one SQL statement and returns its rows."""

    async def __call__(
        self, statement: str, *values: object, timeout: float | None = None
    ) -> Sequence[Columns]: ...


class ConnectionLostError(StoreLostError):
    """The connection to the database was lost. It is unknown whether it has executed the statement."""


class StatementRejectedError(StoreError):
    """The database rejected the statement, and would reject it again."""


class TransactionConflictError(StoreError):
    """Another transaction conflicted with this one."""


_KINDS: dict[tuple[str, ...], type[StoreError]] = {
    ("08", "57P"): ConnectionLostError,
    ("40001", "40P01"): TransactionConflictError,
    # Errors that one job may have caused: its data, a constraint, a limit of PostgreSQL (a row that is too
    # long for an index), memory. The jobs of the batch are then written one by one.
    ("22", "23", "54", "53200"): StatementRejectedError,
    ("53100",): StoreFullError,
    # Damaged files, or an internal error.
    ("XX00",): StoreCorruptError,
}
"""The kinds of errors by the beginning of their code."""


class DatabaseAccess(msgspec.Struct, frozen=True):
    """The database's address and login, and the duration of the writer's lease. `read_password` is called for
    each connection.
    """

    url: str
    read_password: ReadSecret
    schema: str
    name: str
    lease: float
    accepts_loss: bool = False

    def __repr__(self) -> str:
        return f"Access({self.url!r}, schema={self.schema!r})"

    def settings(self) -> dict[str, str]:
        """Return the PostgreSQL settings for a session that does not go through a pooler.

        A reload of the server does not change options that the session has set itself (`synchronous_commit`,
        see `_SETTINGS`). A relay that stops within a transaction keeps locks on rows that others must take
        over, so the server ends its session. It also ends it if the machine has died, and not two hours
        later, TCP's default, nor before. The statistics of a queue are always outdated, and a plan must never
        scan the whole table.
        """
        return {
            **({} if self.accepts_loss else {"synchronous_commit": "at least on"}),
            "idle_in_transaction_session_timeout": f"{min(self.lease, MOST_PATIENCE):.0f}s",
            "idle_session_timeout": "0",
            "enable_seqscan": "off",
            "jit": "off",
            "tcp_keepalives_idle": "10",
            "tcp_keepalives_interval": "5",
            "tcp_keepalives_count": "3",
        }


_SETTINGS = """
SELECT pg_backend_pid(), set_config(
    name,
    CASE WHEN value <> 'at least on' THEN value
        WHEN current_setting(name) = 'remote_apply' THEN 'remote_apply' ELSE 'on' END,
    false
) FROM unnest($1::text[], $2::text[]) AS s (name, value) WHERE current_setting(name, true) IS NOT NULL
"""
"""Options that an old server does not have are left out."""


class DatabaseConnection:
    """One connection to the database. `pid` is its process on the server. With `is_pooled` that process
    changes, and nothing may be left in its session.
    """

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.pid = 0
        self.is_pooled = False
        self._connection = connection
        self._lock = asyncio.Lock()
        self._doubt = ""
        connection.add_log_listener(self._hear_log)

    @classmethod
    async def open(cls, access: DatabaseAccess) -> DatabaseConnection:
        """Connect to the database. If the caller is cancelled, no incomplete connection remains. Raises
        StoreError.
        """
        return await _kept(cls._set_up(access, COMMAND_TIMEOUT))

    @classmethod
    async def plain(cls, access: DatabaseAccess, *, timeout: float = COMMAND_TIMEOUT) -> DatabaseConnection:
        """Connect, even through a pooler for transactions: the session is not changed, and no statement is
        prepared by name. Raises StoreError.
        """
        return await _kept(cls._plain(access, timeout))

    @classmethod
    async def _plain(cls, access: DatabaseAccess, timeout: float) -> DatabaseConnection:
        link = await cls._connect(access, timeout, prepared=0)
        with link.cut_on_error():
            try:
                ((pid,),) = await link.fetch("SELECT pg_backend_pid()", timeout=min(timeout, CONNECT_TIMEOUT))
            except ConnectionLostError as error:
                raise ConnectionLostError(f"{error}. {_POOL}") from error
        # A pooler invents the process number.
        link.is_pooled = pid != link.pid
        if link.is_pooled:
            return link
        await link.close()
        return await cls._set_up(access, timeout)

    @classmethod
    async def _set_up(cls, access: DatabaseAccess, timeout: float) -> DatabaseConnection:
        settings = access.settings()
        link = await cls._connect(access, timeout, prepared=100)
        # Not while connecting, because a pooler refuses unknown settings there, or silently drops them.
        with link.cut_on_error():
            ((link.pid, _), *_) = await link.fetch(_SETTINGS, list(settings), list(settings.values()))
        return link

    @classmethod
    async def _connect(cls, access: DatabaseAccess, timeout: float, *, prepared: int) -> DatabaseConnection:
        password = await FILES.run(access.read_password)
        with translated(password):
            connection = await load_driver().connect(
                access.url,
                password=password or None,
                timeout=CONNECT_TIMEOUT,
                command_timeout=min(timeout, COMMAND_TIMEOUT),
                statement_cache_size=prepared,
                server_settings={"application_name": access.name},
            )
        link = cls(connection)
        link.pid = connection.get_server_pid()
        return link

    async def fetch(self, statement: str, *values: object, timeout: float | None = None) -> Sequence[Columns]:
        async with self._lock:
            return await self._fetch(statement, *values, timeout=timeout)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Fetch]:
        """Run the block in a transaction. Commit it if the block succeeds, and roll it back otherwise."""
        async with self._lock:
            await self._run("BEGIN ISOLATION LEVEL READ COMMITTED")
            try:
                yield self._fetch
            except BaseException:
                with contextlib.suppress(StoreError):
                    await self._run("ROLLBACK")
                raise
            await self._run("COMMIT")
            self._check_doubt()

    async def _run(self, statement: str) -> None:
        """Execute a statement that begins or ends a transaction."""
        with self.cut_on_error(), translated():
            await self._connection.execute(statement)

    @contextlib.contextmanager
    def cut_on_error(self) -> Iterator[None]:
        """Close the connection if the block fails or is interrupted, because a transaction may still be
        open.
        """
        try:
            yield
        except BaseException:
            self.cut()
            raise

    async def _fetch(
        self, statement: str, *values: object, timeout: float | None = None
    ) -> Sequence[Columns]:
        try:
            with translated():
                # A Record is a sequence, but asyncpg only declares that in C.
                rows = cast(
                    "Sequence[Columns]", await self._connection.fetch(statement, *values, timeout=timeout)
                )
        except ConnectionLostError as error:
            self.cut()
            raise ConnectionLostError(f"{error}. {_POOL}") if self.is_pooled else error from None
        self._check_doubt()
        return rows

    def _hear_log(self, _connection: object, message: asyncpg.PostgresLogMessage) -> None:
        """Store a warning of the server for a later error message. Called in a loop iteration before the
        caller of the statement continues.
        """
        if getattr(message, "server_source_filename", None) == _STANDBY_SOURCE:
            self._doubt = str(message)

    def _check_doubt(self) -> None:
        if self._doubt:
            self.cut()
            raise ConnectionLostError(f"a commit did not wait for its standby: {self._doubt}")

    async def listen(self, channel: str, hear: Callable[[str], None]) -> None:
        """Subscribe to notifications on a channel. `hear(payload)` is called on the event loop."""
        async with self._lock:
            with self.cut_on_error(), translated():
                await self._connection.add_listener(channel, lambda _c, _pid, _channel, text: hear(text))

    def on_end(self, tell: Callable[[], None]) -> None:
        """Call `tell` when the connection has ended, whatever the reason."""
        self._connection.add_termination_listener(lambda _connection: tell())

    @property
    def is_over(self) -> bool:
        return self._connection.is_closed()

    async def close(self) -> None:
        """Close the connection, with a message to the server if it still responds. Raises nothing."""
        try:
            with translated():
                await self._connection.close(timeout=CLOSE_TIMEOUT)
        except StoreError:
            self._connection.terminate()
        await asyncio.sleep(0)  # the event loop releases the socket in its next iteration

    def cut(self) -> None:
        """Close the connection immediately. Active statements fail."""
        self._connection.terminate()


class DatabasePool:
    """A small connection pool. A broken connection is replaced at its next use. `opened` opens one."""

    def __init__(self, opened: Callable[[], Awaitable[DatabaseConnection]], links: int) -> None:
        self._links = [KeptConnection(opened) for _ in range(links)]
        self._idle: asyncio.LifoQueue[KeptConnection[DatabaseConnection]] = asyncio.LifoQueue()
        for link in self._links:
            self._idle.put_nowait(link)

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[DatabaseConnection]:
        """Yield an idle connection of the pool for the block. Raises ConnectionLostError if the database is
        unreachable.
        """
        link = await self._idle.get()
        try:
            yield await link.get()
        finally:
            self._idle.put_nowait(link)

    def cut(self) -> None:
        """Close all connections immediately, so that the next callers get new ones. Active statements
        fail.
        """
        for link in self._links:
            if link.connection is not None:
                link.connection.cut()

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links))


async def _kept(opening: Coroutine[None, None, DatabaseConnection]) -> DatabaseConnection:
    """Wait for a connection, which is closed if the caller is cancelled. The opening itself is not cancelled,
    because asyncpg would leave futures behind whose errors the event loop reports.
    """
    task = asyncio.get_running_loop().create_task(opening)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_discard)
        raise


def _discard(task: asyncio.Task[DatabaseConnection]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().cut()


def load_driver() -> ModuleType:
    """Import the PostgreSQL driver. Raises StoreOpenError with the command that installs it."""
    with driver("postgres", "asyncpg"):
        import asyncpg  # noqa: PLC0415 - the driver is an extra
    return asyncpg


@contextlib.contextmanager
def translated(password: str = "") -> Iterator[None]:
    """Convert every failure to a StoreError, except cancellation."""
    driver = load_driver()
    try:
        yield
    except StoreError:
        raise
    except driver.PostgresError as error:
        raise _refused(error.sqlstate or "", error.message or str(error), password) from None
    except (OSError, TimeoutError, driver.InterfaceError) as error:
        text = in_words(error) or type(error).__name__
        raise ConnectionLostError(f"the database does not respond: {_hide(text, password)}") from None
    except Exception as error:  # noqa: BLE001 - the driver's own trouble must not pass for the caller's
        text = f"{type(error).__name__}: {error}"
        raise ConnectionLostError(f"the database driver failed: {_hide(text, password)}") from None


def _refused(state: str, message: str, password: str) -> StoreError:
    kind = next((kind for prefixes, kind in _KINDS.items() if state.startswith(prefixes)), StoreError)
    return kind(f"PostgreSQL reported {state or '?'}: {_hide(message, password)}")


def _hide(text: str, password: str) -> str:
    first = text.partition("\n")[0]
    return first.replace(password, "…") if password else first
