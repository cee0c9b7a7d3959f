"""Operators' changes of many deliveries, cut into durable writes of a bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zonerelay.model.delivery import DeliveryKey


def in_batches(keys: Iterable[DeliveryKey], size: int) -> Iterator[list[DeliveryKey]]:
    """Each key once, in the order given, `size` at a time."""
    wanted = list(dict.fromkeys(keys))
    for start in range(0, len(wanted), size):
        yield wanted[start : start + size]
