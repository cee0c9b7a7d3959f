"""Finds the queue of python-slimta under the relay's own prefix. The relay does not read that queue.

Policy: the queue is reported at the start and does not prevent mail. The number of keys that are examined is
limited, so that the start is not delayed.
"""

from __future__ import annotations

import contextlib
import logging
import re

from zonerelay.store.contract import StoreError
from zonerelay.store.redis.connection import Argument, RedisEndpoint, SharedConnection, as_list, open_wire

LOOKED_AT = 100_000
_PAGE = 1000

_log = logging.getLogger("zonerelay.store")


async def tell_foreign_queue(server: RedisEndpoint) -> None:
    """Report a queue of python-slimta. Raises nothing, because the engine reports a failing server."""
    url, prefix = server.settings.url, server.settings.prefix
    with contextlib.suppress(StoreError):
        wire = await open_wire(server)
        try:
            if await _is_there(wire, prefix.encode()):
                _log.warning(
                    "[redis] prefix %s: there is mail of python-slimta, which the relay does not send;"
                    " zonerelay spool import --from slimta-redis '%s?prefix=%s' takes it over",
                    *(prefix, url, prefix),
                )
        finally:
            await wire.close()


async def _is_there(wire: SharedConnection, prefix: bytes) -> bool:
    message = re.compile(re.escape(prefix) + rb"[0-9a-f]{32}")
    cursor: Argument = "0"
    for _ in range(LOOKED_AT // _PAGE):
        found = as_list(await wire.call("SCAN", cursor, "COUNT", _PAGE))
        for key in as_list(found[1]):
            if isinstance(key, bytes) and message.fullmatch(key) and await _is_envelope(wire, key):
                return True
        if found[0] == b"0" or not isinstance(found[0], bytes):
            return False
        cursor = found[0]
    return False


async def _is_envelope(wire: SharedConnection, key: bytes) -> bool:
    return await wire.call("TYPE", key) == b"hash" and await wire.call("HEXISTS", key, "envelope") == 1
