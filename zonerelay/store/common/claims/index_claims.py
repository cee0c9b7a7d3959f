"""Hands out the deliveries of an index, after their states were read.

Several claims read at the same time, and what they have taken may be given back or changed before they have
read it. So each claim of a delivery has a number of its own (`Entry.claim`): once everything was read, it
hands out what still bears its number, as it is then, and its end touches no other claim.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common.claims.index import Index, ZoneIndex

RECONCILE = 30.0
"""Seconds between two rounds of a relay on a shared store: what it holds there is compared with what it knows
to be in use, and zones with something to claim are woken. Whatever was missed on the way (a claim that
outlived its connection, a row that was locked while a claim looked) waits no longer than that."""


class Held(Protocol):
    """A message's state in memory, which follows its changes."""

    @property
    def deliveries(self) -> Mapping[DeliveryKey, Delivery]: ...


H = TypeVar("H", bound=Held)


class IndexClaims(Generic[H]):
    """The claims of all zones."""

    def __init__(
        self,
        index: Callable[[], Index],
        check_usable: Callable[[], None],
        hold: Callable[[Collection[MessageId]], Awaitable[dict[MessageId, H]]],
        drop: Callable[[Iterable[H]], None],
    ) -> None:
        """`index` is asked each time, because a store may begin with a new one.

        `hold` returns the states of messages, which stay in memory until `drop`. Those that do not exist or
        cannot be read are absent. It raises StoreError, and holds nothing then.
        """
        self._index_now = index
        self._check_usable = check_usable
        self._hold = hold
        self._drop = drop

    def _show(self, key: DeliveryKey, delivery: Delivery | None) -> None:
        """The index was wrong: this is what is stored."""
        self._index_now().show(key, delivery)

    def _handed_out(self, found: Collection[Delivery]) -> None:
        """These are the caller's from here on."""

    async def claim(
        self, queue: QueueName, limit: int, *, now: float, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        return await self._claim(queue, limit, now, lambda index, room: index.take(room, skip_domains, now))

    async def claim_new(
        self, queue: QueueName, limit: int, *, since: MessageId, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        # What is fresh is due at any time.
        return await self._claim(
            queue, limit, 0.0, lambda index, room: index.take_new(room, since, skip_domains)
        )

    async def claim_domain(self, queue: QueueName, domain: str, limit: int, *, now: float) -> list[Delivery]:
        return await self._claim(queue, limit, now, lambda index, room: index.take_domain(domain, room, now))

    async def _claim(
        self, queue: QueueName, limit: int, now: float, take: Callable[[ZoneIndex, int], list[DeliveryKey]]
    ) -> list[Delivery]:
        """Up to `limit`, in message order; after an error nothing is claimed."""
        self._check_usable()
        taken: dict[DeliveryKey, int] = {}
        held: dict[MessageId, H] = {}
        found: list[Delivery] = []
        try:
            while len(found) < limit and (keys := take(self._index_now()[queue], limit - len(found))):
                taken |= {key: self._index_now()[queue].claim_of(key) for key in keys}
                held |= await self._hold({key.message_id for key in keys} - held.keys())
                found = self._due(taken, held, now)
        except BaseException:
            self.release(self._handed(taken))
            raise
        finally:
            self._drop(held.values())
        self._handed_out(found)
        return sorted(found, key=lambda delivery: delivery.message_id)

    def _handed(self, taken: Mapping[DeliveryKey, int]) -> list[DeliveryKey]:
        """Without the keys that were given back, even when another claim has taken them."""
        index = self._index_now()
        return [key for key, number in taken.items() if index[key.queue].claim_of(key) == number]

    def _due(
        self, taken: Mapping[DeliveryKey, int], held: Mapping[MessageId, H], now: float
    ) -> list[Delivery]:
        """Those that are still there and due; the other claims are given up."""
        found: list[Delivery] = []
        for key in self._handed(taken):
            state = held.get(key.message_id)
            delivery = None if state is None else state.deliveries.get(key)
            if delivery is not None and delivery.is_due(now):
                found.append(delivery)
            else:
                self._correct(key, delivery)
        return found

    def _correct(self, key: DeliveryKey, delivery: Delivery | None) -> None:
        """Dropped or put off meanwhile, unreadable, or changed by hand."""
        zone = self._index_now()[key.queue]
        zone.drop_claim(key)
        if not zone.is_changing(key):
            self._show(key, delivery)

    def release(self, keys: Collection[DeliveryKey]) -> None:
        for key in keys:
            self._index_now()[key.queue].release(key)

    async def next_due(self, queue: QueueName) -> float | None:
        self._check_usable()
        return self._index_now()[queue].next_due()

    def has_ready(self, queue: QueueName) -> bool:
        return self._index_now()[queue].has_ready()
