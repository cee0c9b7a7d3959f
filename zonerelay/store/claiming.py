"""Handing out deliveries whose states must be read first, where what is read may turn out to be gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey


async def claim_and_read(
    limit: int,
    take: Callable[[int], list[DeliveryKey]],
    read: Callable[[Sequence[DeliveryKey]], Awaitable[list[Delivery]]],
    release: Callable[[Collection[DeliveryKey]], None],
) -> list[Delivery]:
    """Up to `limit`, in message order. `read` gives up the claims on what it leaves out; after an error
    nothing is claimed.
    """
    found: list[Delivery] = []
    try:
        while len(found) < limit and (keys := take(limit - len(found))):
            found += await read(keys)
    except BaseException:
        release([delivery.key for delivery in found])
        raise
    return sorted(found, key=lambda delivery: delivery.message_id)
