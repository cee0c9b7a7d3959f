"""The queues of other systems: each module reads one, and changes nothing in it.

Policy: what a recipient of the other system has received is not imported; age, attempts, due times and DSN
wishes are kept as far as the other system knows them; a source whose system runs is refused.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractAsyncContextManager

from zonerelay.transfer.stored import Source

_READERS = {"postfix": ("postfix", "reading_postfix")}


def reading(system: str, place: str, now: float) -> AbstractAsyncContextManager[Source]:
    """The queue of another system. Entering raises TransferError and OSError."""
    module, reader = _READERS[system]
    found = getattr(importlib.import_module(f"{__name__}.{module}"), reader)
    opened: AbstractAsyncContextManager[Source] = found(place, now)
    return opened
