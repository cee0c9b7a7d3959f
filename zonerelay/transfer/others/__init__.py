"""Imports the queues of other mail systems. Each module reads the queue of one system and changes nothing in
it.

Policy: recipients who have received the message are not imported. Age, attempts, due times and DSN options
are kept as far as the other system stores them. A source whose system is running is refused.
"""

import importlib
from contextlib import AbstractAsyncContextManager

from zonerelay.store.context import driver
from zonerelay.store.contract import StoreOpenError
from zonerelay.transfer.files import Source, TransferError


def reading(system: str, place: str, now: float) -> AbstractAsyncContextManager[Source]:
    """Open the queue of another mail system as a source of messages. Entering it raises TransferError or
    OSError if it cannot be read.
    """
    module, reader = system.partition("-")[0], f"reading_{system.replace('-', '_')}"
    try:
        with driver("redis", "redis"):
            found = getattr(importlib.import_module(f"{__name__}.{module}"), reader)
    except StoreOpenError as error:
        raise TransferError(str(error)) from error
    opened: AbstractAsyncContextManager[Source] = found(place, now)
    return opened
