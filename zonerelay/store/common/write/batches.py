"""Splits an operator's change of many deliveries into durable writes of a bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.store.contract import StoreError

UPDATE_BATCH = 256
"""The largest number of deliveries that one durable write of an operator's command changes."""

ChangeOne = Callable[[Delivery], Delivery | None]
"""An operator's change: the delivery's new state, or `None` to remove it."""


def in_batches(keys: Iterable[DeliveryKey]) -> Iterator[list[DeliveryKey]]:
    """Yield each key once, in the given order, in batches of `UPDATE_BATCH`."""
    wanted = list(dict.fromkeys(keys))
    for start in range(0, len(wanted), UPDATE_BATCH):
        yield wanted[start : start + UPDATE_BATCH]


def changed(old: Delivery, change: ChangeOne) -> Delivery | None:
    """Return the delivery's state after `change`. Raises StoreError if `change` returns another delivery."""
    new = change(old)
    if new is not None and new.key != old.key._replace(queue=new.queue):
        raise StoreError("a change must not modify the key of a delivery")
    return new
