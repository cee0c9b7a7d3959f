"""An operator's change of deliveries: read, changed and written in one transaction. What another node has
claimed is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.store.common import records
from zonerelay.store.contract import StoreError
from zonerelay.store.postgres import sql
from zonerelay.store.postgres.batch import close_messages
from zonerelay.store.postgres.driver import Columns, Fetch
from zonerelay.store.postgres.rows import delivery_key, delivery_of, key_columns

Change = Callable[[Delivery], Delivery | None]


@dataclass(slots=True)
class Changed:
    """`same` existed and stay as they are. `kept` are still claimed by us."""

    existed: int = 0
    same: dict[DeliveryKey, Delivery] = field(default_factory=dict)
    steps: dict[DeliveryKey, tuple[Delivery, Delivery | None]] = field(default_factory=dict)
    kept: set[DeliveryKey] = field(default_factory=set)


async def change_deliveries(
    fetch: Fetch,
    keys: Sequence[DeliveryKey],
    change: Change,
    *,
    session: int,
    keeps: Callable[[DeliveryKey], bool],
) -> Changed:
    """`keeps` says which of our claims go on; what else we have claimed is free afterwards."""
    found = Changed()
    removed: list[Columns] = []
    for row in await fetch(sql.FOR_UPDATE, *key_columns(keys)):
        if row[6] not in {None, session}:
            continue
        found.existed += 1
        old = delivery_of(row)
        new = change(old)
        if new is not None and new.key != old.key:
            raise StoreError("a change may not turn a delivery into another one")
        if new == old:
            found.same[old.key] = old
            continue
        found.steps[old.key] = (old, new)
        if new is None:
            removed.append(row)
        elif row[6] == session and keeps(old.key):
            found.kept.add(old.key)
    await _remove(fetch, removed)
    await _rewrite(fetch, found, session)
    return found


async def _remove(fetch: Fetch, rows: Sequence[Columns]) -> None:
    if not rows:
        return
    await fetch(sql.REMOVE, *key_columns([delivery_key(row) for row in rows]))
    if alone := [row[1] for row in rows if row[7]]:
        await fetch(sql.REMOVE_MESSAGES, alone)
    if shared := {row[1] for row in rows if not row[7]}:
        await close_messages(fetch, shared)


async def _rewrite(fetch: Fetch, found: Changed, session: int) -> None:
    states = [new for _, new in found.steps.values() if new is not None]
    if states:
        await fetch(
            sql.REWRITE,
            *key_columns([state.key for state in states]),
            [max(state.next_attempt, 0.0) for state in states],
            [state.held for state in states],
            [records.encode_delivery(state) for state in states],
            [session if state.key in found.kept else None for state in states],
        )
