"""Stores the limits that all relays on a Redis spool share, one key for each zone.

The limits have two separate connections, one for reads and writes and one for notifications, so that no limit
waits behind a body. All times use the server's clock. A key expires when its content no longer affects any
relay.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from zonerelay.limits.shared import VersionedRecord
from zonerelay.process.tasks import cancel_all
from zonerelay.store import records
from zonerelay.store.context import authority_errors
from zonerelay.store.contract import StoreError
from zonerelay.store.redis import connection

_READ = "#!lua flags=no-writes\nlocal t = redis.call('TIME') return {redis.call('GET', KEYS[1]), t[1], t[2]}"
_REPLACE = """#!lua flags=allow-oom
local old, new = ARGV[1], ARGV[2]
if (redis.call('GET', KEYS[1]) or '') ~= old then return 0 end
if new == '' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], new, 'PX', ARGV[3]) end
for i = 5, #ARGV do redis.call('PUBLISH', ARGV[4], ARGV[i]) end
return 1
"""


class RedisRecordStore:
    """Stores shared limits in Redis (a `SharedRecordStore`)."""

    name = "the spool's Redis server"

    def __init__(self, server: connection.RedisEndpoint) -> None:
        self._server = server
        self._prefix = server.settings.prefix.encode()
        self._notices = self._prefix + b"limits"
        self._connection = connection.RedisConnection(server)  # the spool's own check the server

    @contextlib.asynccontextmanager
    async def listening(self, on_notice: Callable[[str], None]) -> AsyncIterator[asyncio.Event]:
        with authority_errors():
            await self._connection.wire()
            channel = await connection.open_channel(self._server, self._notices)
        ended = asyncio.Event()

        async def listen() -> None:
            with contextlib.suppress(StoreError):
                while True:
                    on_notice((await channel.next()).decode())
            ended.set()

        task = asyncio.get_running_loop().create_task(listen())
        try:
            yield ended
        finally:
            await cancel_all(task)
            await channel.close()

    async def read(self, zone: str) -> VersionedRecord:
        reply = connection.as_list(await self._ask(_READ, zone))
        data, seconds, microseconds = reply
        assert data is None or isinstance(data, bytes)
        assert isinstance(seconds, bytes)
        assert isinstance(microseconds, bytes)
        return VersionedRecord(data, 0, int(seconds) + int(microseconds) / 1e6)

    async def replace(
        self, zone: str, record: VersionedRecord, data: bytes | None, *, ttl: float, notices: Sequence[str]
    ) -> bool:
        old, new = record.data or b"", data or b""
        reply = await self._ask(_REPLACE, zone, old, new, int(ttl * 1000), self._notices, *notices)
        return reply == 1

    async def close(self) -> None:
        await self._connection.close()

    async def _ask(self, script: str, zone: str, *values: connection.Argument) -> connection.Reply:
        """Run a script on the current wire. A wire that the server has closed is replaced, without a report
        that limits are lost.
        """
        with authority_errors():
            key = self._prefix + b"limits:" + records.field(zone)
            return await (await self._connection.wire()).run(script, [key], *values)
