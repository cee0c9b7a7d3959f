"""Stores the limits that all relays on a Redis spool share, one key for each zone.

The limits have two separate connections, one for reads and writes and one for notifications, so that no limit
waits behind a body. All times use the server's clock. A key expires when its content no longer affects any
relay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from zonerelay.limits.shared import VersionedRecord
from zonerelay.limits.values import AuthorityError
from zonerelay.process.tasks import cancel_all
from zonerelay.store import records
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
    """Stores shared limits in Redis (a `RecordStore`)."""

    name = "the spool's Redis server"

    def __init__(self, server: connection.RedisEndpoint) -> None:
        self._server = server
        self._prefix = server.settings.prefix.encode()
        self._notices = self._prefix + b"limits"
        self._connection = connection.RedisConnection(server)  # the spool's own check the server
        self._channel: connection.Subscription | None = None
        self._broken = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

    async def open(self, on_notice: Callable[[str], None]) -> None:
        await self._hang_up()
        self._broken.clear()
        try:
            await self._connection.wire()
            channel = self._channel = await connection.open_channel(self._server, self._notices)
        except StoreError as error:
            await self._hang_up()
            raise AuthorityError(str(error)) from error
        self._listening = asyncio.get_running_loop().create_task(self._listen(channel, on_notice))

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

    async def ended(self) -> None:
        await self._broken.wait()

    async def close(self) -> None:
        await self._hang_up()
        await self._connection.close()

    async def _hang_up(self) -> None:
        listening, self._listening = self._listening, None
        await cancel_all(listening)
        await self._connection.give_up()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _ask(self, script: str, zone: str, *values: connection.Argument) -> connection.Reply:
        """Run a script on the current wire. A wire that the server has closed is replaced, without a report
        that limits are lost.
        """
        if self._channel is None:
            raise AuthorityError("not connected")
        try:
            key = self._prefix + b"limits:" + records.field(zone)
            return await (await self._connection.wire()).run(script, [key], *values)
        except StoreError as error:
            self._broken.set()
            raise AuthorityError(str(error)) from error

    async def _listen(self, channel: connection.Subscription, on_notice: Callable[[str], None]) -> None:
        try:
            while True:
                on_notice((await channel.next()).decode())
        except StoreError:
            self._broken.set()
