"""The end of a worker that drains its spool: when the spool counts as empty.

Promise: the spool counts as empty when its store says that no queue has a delivery left and proves that
nothing else is stored, twice in a row: nothing waits, is being attempted, is held, or cannot be read, nothing
is damaged, and no loss waits to be acknowledged. Else it stays for ever, and `tell` says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from zonerelay.store.contract import Store, StoreError

LOOK_EVERY = 1.0


async def until_empty(store: Store, tell: Callable[[str], None]) -> None:
    """Returns when nothing is left in the store, into which no listener writes mail. `tell(left)` is called
    when what is left without a delivery that could be sent has changed.
    """
    empty, told = 0, ""
    while empty < 2:
        try:
            left = "" if (queues := await store.queues()) else await store.left_over() or _trouble(store)
            empty = 0 if queues or left else empty + 1
        except StoreError:
            left, empty = told, 0
        if left != told:
            told = left
            tell(left)
        if empty < 2:
            await asyncio.sleep(LOOK_EVERY)


def _trouble(store: Store) -> str:
    """Damage, and losses that wait to be acknowledged; a full disk is no reason to stay."""
    return "; ".join(text for text in store.problems() if text != store.unhealthy())
