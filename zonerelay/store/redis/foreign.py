"""Finds the queue of python-slimta under the relay's own prefix, which the relay does not read.

Policy: it is said at the start and in `zonerelay status`, and keeps no mail out. So many keys of a server are
looked at that a start is not delayed.
"""

from __future__ import annotations

import contextlib
import logging
import re

from zonerelay.store.contract import StoreError
from zonerelay.store.redis.connection import Argument, as_list
from zonerelay.store.redis.keeper import RedisKeeper

LOOKED_AT = 100_000
_PAGE = 1000

_log = logging.getLogger("zonerelay.store")


async def tell_foreign_queue(keeper: RedisKeeper, url: str) -> None:
    """The keeper's own look at the server tells of a server that fails meanwhile."""
    with contextlib.suppress(StoreError):
        if await _is_there(keeper):
            _tell(keeper, url)


def _tell(keeper: RedisKeeper, url: str) -> None:
    prefix = keeper.prefix.decode()
    text = (
        f"[redis] prefix {prefix}: there is mail of python-slimta, which the relay does not send;"
        f" zonerelay spool import --from slimta-redis '{url}?prefix={prefix}' takes it over"
    )
    keeper.health.note("foreign", text)
    _log.warning("%s", text)


async def _is_there(keeper: RedisKeeper) -> bool:
    message = re.compile(re.escape(keeper.prefix) + rb"[0-9a-f]{32}")
    cursor: Argument = "0"
    for _ in range(LOOKED_AT // _PAGE):
        found = as_list(await keeper.call("SCAN", cursor, "COUNT", _PAGE))
        for key in as_list(found[1]):
            if isinstance(key, bytes) and message.fullmatch(key) and await _is_envelope(keeper, key):
                return True
        if found[0] == b"0" or not isinstance(found[0], bytes):
            return False
        cursor = found[0]
    return False


async def _is_envelope(keeper: RedisKeeper, key: bytes) -> bool:
    return await keeper.call("TYPE", key) == b"hash" and await keeper.call("HEXISTS", key, "envelope") == 1
