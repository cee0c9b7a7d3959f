"""Reads the databases of a Redis server with the queue of python-slimta or slimta-lua, for an import.

Every failure is a TransferError with a message for the operator.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Collection
from typing import Self
from urllib.parse import urlsplit

from zonerelay.config.problems import masked
from zonerelay.config.settings import RedisSettings
from zonerelay.store.contract import StoreError
from zonerelay.store.redis.connection import (
    Argument,
    RedisEndpoint,
    Reply,
    SharedConnection,
    as_list,
    open_wire,
)
from zonerelay.transfer.stored import TransferError

_PAGE = 1000


class Databases:
    """Reads several databases of a Redis server. `first` is the number in the URL; `url` is shown to
    people.
    """

    def __init__(self, wire: SharedConnection, url: str) -> None:
        self._wire = wire
        self.url = _shown(url)
        self.first = int(urlsplit(url).path.strip("/") or 0)

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, url: str) -> AsyncIterator[Self]:
        """Connect to the databases. Raise TransferError if that fails."""
        if not (urlsplit(url).path.strip("/") or "0").isdigit():
            raise TransferError(f"{_shown(url)}: expected redis://HOST:PORT/DATABASE")
        try:
            wire = await open_wire(RedisEndpoint(RedisSettings(url=url)), lambda _: None)
        except StoreError as error:
            raise TransferError(f"{_shown(url)}: {error}") from error
        try:
            yield cls(wire, url)
        finally:
            await wire.close()

    async def select(self, number: int) -> None:
        await self._ask("SELECT", number)

    async def _ask(self, *command: Argument) -> Reply:
        try:
            return await self._wire.call(*command)
        except StoreError as error:
            raise TransferError(f"{self.url}: {command[0]!s}: {error}") from error

    async def number(self, *command: Argument) -> int:
        reply = await self._ask(*command)
        return reply if isinstance(reply, int) else 0

    async def texts(self, *command: Argument) -> list[bytes | None]:
        """Return a list of strings, with `None` for those that do not exist."""
        reply = as_list(await self._ask(*command))
        return [each if isinstance(each, bytes) else None for each in reply]

    async def keys(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Yield the keys that begin with a prefix."""
        pattern = re.sub(rb"([*?\[\\])", rb"\\\1", prefix)
        cursor: Argument = "0"
        seen = set[bytes]()
        while True:
            reply = as_list(await self._ask("SCAN", cursor, "MATCH", pattern + b"*", "COUNT", _PAGE))
            for key in as_list(reply[1]):
                if isinstance(key, bytes) and key not in seen:
                    seen.add(key)
                    yield key
            found = reply[0]
            if found == b"0" or not isinstance(found, bytes):
                return
            cursor = found

    async def is_hash(self, key: bytes) -> bool:
        return await self._ask("TYPE", key) == b"hash"

    async def clients(self, databases: Collection[int]) -> list[dict[str, str]]:
        """Return the other clients of the server that use one of the databases."""
        client_list = await self._ask("CLIENT", "LIST")
        lines = client_list.decode("utf-8", "replace").splitlines() if isinstance(client_list, bytes) else []
        found = [dict(fact.partition("=")[::2] for fact in line.split()) for line in lines]
        return [
            each
            for each in found
            if each["cmd"].partition("|")[0] != "client" and int(each["db"]) in databases
        ]


def _shown(url: str) -> str:
    """Return a URL without user and password, wherever they are."""
    scheme, mark, rest = url.partition("://")
    return masked(f"{scheme}{mark}{rest.rpartition('@')[2]}")
