"""A worker that is no more: when its spool is empty.

Promise: the spool counts as empty when its store says that no zone has a delivery left, twice in a row, so
nothing waits, is being attempted, or is held. Records that cannot be read count as mail, and so does damage:
then it stays for ever.
"""

from __future__ import annotations

import asyncio

from zonerelay.store.base import Store, StoreError

LOOK_EVERY = 1.0


async def until_empty(store: Store) -> None:
    """Returns when nothing is left in the store, into which nobody writes new mail."""
    empty = 0
    while empty < 2:
        try:
            has_mail = bool(await store.zones())
            # Damage, and losses that nobody has looked at; a full disk is no reason to stay.
            may_hold_more = any(text != store.unhealthy() for text in store.problems())
            empty = 0 if has_mail or may_hold_more else empty + 1
        except StoreError:
            empty = 0
        if empty < 2:
            await asyncio.sleep(LOOK_EVERY)
