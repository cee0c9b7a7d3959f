# What zonerelay uses of asyncpg, which comes without types.
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

class PostgresError(Exception):
    sqlstate: str | None
    message: str | None

class InterfaceError(Exception): ...

class Record:
    # A row is a sequence of what the database's types become; its reader knows which.
    def __getitem__(self, key: int | str) -> object: ...

class Connection:
    async def execute(self, query: str, *args: object, timeout: float | None = None) -> str: ...
    async def fetch(self, query: str, *args: object, timeout: float | None = None) -> list[Record]: ...
    def transaction(
        self, *, isolation: str | None = None, readonly: bool = False
    ) -> AbstractAsyncContextManager[None]: ...
    async def add_listener(
        self, channel: str, callback: Callable[[Connection, int, str, str], None]
    ) -> None: ...
    def add_termination_listener(self, callback: Callable[[Connection], None]) -> None: ...
    def is_closed(self) -> bool: ...
    async def close(self, *, timeout: float | None = None) -> None: ...
    def terminate(self) -> None: ...

async def connect(
    dsn: str,
    *,
    password: str | None = None,
    timeout: float = 60,
    command_timeout: float | None = None,
    server_settings: Mapping[str, str] | None = None,
    target_session_attrs: str | None = None,
) -> Connection: ...
