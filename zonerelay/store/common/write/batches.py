"""Cuts an operator's change of many deliveries into durable writes of a bounded size."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.store.contract import StoreError

UPDATE_BATCH = 256
"""Deliveries that one durable write of an operator's verb changes at most."""

ChangeOne = Callable[[Delivery], Delivery | None]
"""An operator's change: the delivery's new state, or `None` to remove it."""


class BatchedUpdate(abc.ABC):
    """The `update` of an engine, in durable writes of at most `UPDATE_BATCH` deliveries each."""

    async def update(self, keys: Collection[DeliveryKey], change: ChangeOne) -> int:
        existed = 0
        for batch in in_batches(keys, UPDATE_BATCH):
            existed += await self._update_batch(batch, change)
        return existed

    @abc.abstractmethod
    async def _update_batch(self, keys: Sequence[DeliveryKey], change: ChangeOne) -> int:
        """Change these in one durable write. Returns how many existed and were not left alone."""


def in_batches(keys: Iterable[DeliveryKey], size: int) -> Iterator[list[DeliveryKey]]:
    """Each key once, in the order given, `size` at a time."""
    wanted = list(dict.fromkeys(keys))
    for start in range(0, len(wanted), size):
        yield wanted[start : start + size]


def changed(old: Delivery, change: ChangeOne) -> Delivery | None:
    """The delivery's state after `change`. Raises StoreError when that belongs to another delivery."""
    new = change(old)
    if new is not None and new.key != old.key._replace(queue=new.queue):
        raise StoreError("a change may not turn a delivery into another one")
    return new
