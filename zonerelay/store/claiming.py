"""What claims have in common: reading what was claimed, and when those of a shared store are looked over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey

RECONCILE = 30.0
"""Seconds between two rounds of a relay on a shared store: what it holds there is compared with what it knows
to be in use, and zones with something to claim are woken. Whatever was missed on the way (a claim that
outlived its connection, a row that was locked while a claim looked) waits no longer than that."""


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
