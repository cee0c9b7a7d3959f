"""Imports the queues of other mail systems. Each module reads the queue of one system and changes nothing in
it.

Policy: recipients who have received the message are not imported. Age, attempts, due times and DSN options
are kept as far as the other system stores them. A source whose system is running is refused.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractAsyncContextManager

from zonerelay.transfer.stored import Source, TransferError

_READERS = {
    "postfix": ("postfix", "reading_postfix"),
    "exim": ("exim", "reading_exim"),
    "zonemta": ("zonemta", "reading_zonemta"),
    "slimta-redis": ("slimta", "reading_slimta_redis"),
    "slimta-disk": ("slimta", "reading_slimta_disk"),
    "slimta-lua": ("slimta_lua", "reading_slimta_lua"),
}


def reading(system: str, place: str, now: float) -> AbstractAsyncContextManager[Source]:
    """Return the queue of another system. Entering it raises TransferError or OSError if it cannot be
    read.
    """
    module, reader = _READERS[system]
    try:
        found = getattr(importlib.import_module(f"{__name__}.{module}"), reader)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "redis":
            raise
        raise TransferError(
            "reading from Redis requires the Python package redis-py; in zonerelay's source directory, "
            "with the relay's own pip, run: pip install -r locks/redis.lock"
        ) from error
    opened: AbstractAsyncContextManager[Source] = found(place, now)
    return opened
