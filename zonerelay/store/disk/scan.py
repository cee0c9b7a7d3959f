"""A walk over every delivery of the disk queue as it was at one moment.

The keys are taken at once; states are read in groups. What changes before the walk gets there is kept as it
was, so memory grows with the changes during a walk, not with the queue's states.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.store.contract import StoreCorruptError
from zonerelay.store.disk import files
from zonerelay.store.disk.keeper import DiskKeeper

GROUP = 200
"""Deliveries whose files are read in one go."""

_log = logging.getLogger("zonerelay.store")


class Walk:
    """One walk. `changed` is told of every change while it goes on."""

    def __init__(self, keeper: DiskKeeper, keys: list[DeliveryKey]) -> None:
        self._keeper = keeper
        self._keys = keys
        self._at = 0
        self._before: dict[DeliveryKey, Delivery] = {}

    def changed(self, key: DeliveryKey, old: Delivery | None) -> None:
        """The delivery was `old` until now; only the first change since the start counts."""
        if old is not None and self._at < len(self._keys) and key >= self._keys[self._at]:
            self._before.setdefault(key, old)

    async def deliveries(self) -> AsyncGenerator[Delivery, None]:
        while self._at < len(self._keys):
            group = self._keys[self._at : self._at + GROUP]
            found = await self._read(group)
            for key in group:
                self._at += 1
                delivery = self._before.pop(key, None) or found.get(key)
                if delivery is not None:
                    yield delivery

    async def _read(self, keys: Iterable[DeliveryKey]) -> dict[DeliveryKey, Delivery]:
        ids = dict.fromkeys(key.message_id for key in keys)
        states = await self._keeper.read(files.read_states, list(ids))
        found: dict[DeliveryKey, Delivery] = {}
        for state in states.values():
            if isinstance(state, StoreCorruptError):
                _log.error("left for the operator: %s", state)
            else:
                found |= {delivery.key: delivery for delivery in state}
        return found
