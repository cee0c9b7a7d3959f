"""Implements `Store` in plain dictionaries: the reference that the relay's stores are compared with.

It is written to be obviously right and not to be fast: every claim looks at the whole queue.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, groupby, zip_longest

from zonerelay.model.clock import Clock, SystemClock
from zonerelay.model.delivery import Delivery, DeliveryKey, QueueName
from zonerelay.model.envelope import Envelope, Message, MessageId
from zonerelay.store import contract
from zonerelay.store.context import SiblingWorkers
from zonerelay.store.contract import Unhealthy
from zonerelay.store.queue.body import BodyWriter, NewMessage, check_own_message, split
from zonerelay.store.queue.keeper import Counts
from zonerelay.store.queue.reservations import Reservations, register_for


class MemoryStore:
    """Holds whole bodies in memory, without a bound."""

    node = 0

    def __init__(self, *, clock: Clock | None = None, siblings: SiblingWorkers | None = None) -> None:
        self._messages: dict[MessageId, tuple[Message, list[bytes]]] = {}
        self._deliveries: dict[DeliveryKey, Delivery] = {}
        self.uploads = 0
        self._arriving: dict[MessageId, list[bytes]] = {}
        self._claimed: set[DeliveryKey] = set()
        self._passed_over: set[DeliveryKey] = set()
        self._last_id: MessageId | None = None
        self._kept: dict[str, contract.StoredKey] = {}
        self._reservations = Reservations(
            self._find_kept,
            self._kept_page,
            self.keep_keys,
            self._forget_keys,
            self.usable,
            clock=clock or SystemClock(),
            register=register_for(siblings),
        )
        self.kept_keys = self._reservations.kept_keys
        self.submit_once = self._reservations.store
        self._closed = False
        self.on_stored: contract.Stored = lambda *_: 0

    # --- taking mail

    def begin(self, envelope: Envelope) -> BodyWriter:
        return BodyWriter(self, envelope)

    def submit_chunks(
        self, message_id: MessageId, first: int, chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        self._arriving[message_id] = [*self._arriving.get(message_id, ()), *chunks]
        return _done()

    def submit_message(self, given: NewMessage) -> asyncio.Future[None]:
        message, deliveries, chunks, companions, once = given
        if once is not None:
            self._kept[once.identity] = once.kept(message.id)
        self.add(message, [*self._arriving.pop(message.id, ()), *chunks], deliveries)
        for report in companions:
            self.add(report.message, split(report.body), report.deliveries)
        return _done()

    def begin_keys(self) -> None:
        self._reservations.start()

    async def _find_kept(self, identity: str) -> contract.StoredKey | None:
        self.check_writable()
        return self._kept.get(identity)

    async def _kept_page(self, after: str) -> contract.KeptKeys:
        return [] if after else list(self._kept.items())

    async def keep_keys(self, keys: contract.KeptKeys) -> None:
        self._kept.update(keys)

    async def _forget_keys(self, now: float, most: int, is_used: Callable[[str], bool]) -> None:
        del is_used  # nothing comes between
        expired = [identity for identity, kept in self._kept.items() if kept.until <= now]
        for identity in expired[:most]:
            del self._kept[identity]

    def remove_chunks(self, message_id: MessageId, count: int) -> None:
        self._arriving.pop(message_id, None)

    def add(self, message: Message, chunks: list[bytes], deliveries: Iterable[Delivery]) -> None:
        new = {delivery.key: delivery for delivery in deliveries}
        is_next = not any(each.next_attempt <= 0 for each in self._unclaimed())
        self._messages[message.id] = (message, chunks)
        self._deliveries |= new
        self._last_id = max(self._last_id or message.id, message.id)
        self._give(new.values(), is_next)

    def _give(self, new: Iterable[Delivery], is_next: bool) -> None:
        """Offer new deliveries to `on_stored`, which claims those that it takes."""
        ready = [each for each in new if not each.held]
        for _, some in groupby(ready, key=lambda each: each.queue):
            told = list(some)
            may_take = is_next and not any(each.next_attempt for each in told)
            self._claimed.update(each.key for each in told[: self.on_stored(told, may_take)])

    def _unclaimed(self) -> Iterator[Delivery]:
        return (each for key, each in self._deliveries.items() if key not in self._claimed and not each.held)

    # --- handing out

    async def claim(
        self,
        queue: QueueName,
        limit: int,
        *,
        now: float,
        skip_domains: Collection[str] = (),
        since: MessageId | None = None,
        domain: str | None = None,
    ) -> list[Delivery]:
        self.check_writable()
        over = self._passed_over
        if domain is not None:
            # They were due when they were passed over.
            skipped = [each for each in self._claimable(queue, math.inf) if each.key in over]
            return self._claim([each for each in skipped if each.domain == domain], limit)
        if since is not None:
            fresh = self._claimable(queue, 0.0)
            new = [each for each in fresh if each.message_id >= since and each.key not in over]
            return self._claim(new, limit, skip_domains)
        return self._claim(self._claimable(queue, now), limit, skip_domains)

    def _claimable(self, queue: QueueName, now: float) -> list[Delivery]:
        """Fresh ones by message, deferred ones by due time, in turns."""
        ready = [
            delivery
            for key, delivery in self._deliveries.items()
            if key.queue == queue and key not in self._claimed and delivery.is_due(now)
        ]
        fresh = sorted((d for d in ready if d.next_attempt <= 0), key=lambda d: d.key)
        due = sorted((d for d in ready if d.next_attempt > 0), key=lambda d: (d.next_attempt, d.key))
        return [delivery for delivery in chain.from_iterable(zip_longest(fresh, due)) if delivery is not None]

    def _claim(
        self, offered: Iterable[Delivery], limit: int, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        found: list[Delivery] = []
        for delivery in offered:
            if len(found) == limit:
                break
            if delivery.domain in skip_domains:
                self._passed_over.add(delivery.key)
            else:
                found.append(delivery)
        keys = {delivery.key for delivery in found}
        self._claimed |= keys
        self._passed_over -= keys
        return sorted(found, key=lambda delivery: delivery.message_id)

    def release(self, keys: Collection[DeliveryKey]) -> None:
        self._claimed -= set(keys)

    def forget_claims(self) -> None:
        """Forgets every claim, as a crash of a private store does."""
        self._claimed.clear()
        self._passed_over.clear()

    async def next_due(self, queue: QueueName) -> float | None:
        self.check_writable()
        return min((when for when in self._waiting(queue) if when > 0), default=None)

    def _waiting(self, queue: QueueName) -> Iterator[float]:
        """The times of the next attempts that `claim` could hand out."""
        unavailable = self._claimed | self._passed_over
        for key, delivery in self._deliveries.items():
            if key.queue == queue and key not in unavailable and not delivery.held:
                yield delivery.next_attempt

    # --- settling

    async def settle(self, changes: Sequence[contract.Change], *, lazy: bool = False) -> None:
        self.check_writable()
        for change in changes:
            if isinstance(change, contract.OwnMessage):
                check_own_message(change)
        for change in changes:
            if isinstance(change, contract.Finish):
                self._change(change.delivery.key, None)
            elif isinstance(change, contract.Postpone):
                self._change(change.delivery.key, change.delivery)
            else:
                self.add(change.message, split(change.body), change.deliveries)
        self.release(
            [change.delivery.key for change in changes if not isinstance(change, contract.OwnMessage)]
        )

    async def update(
        self, keys: Collection[DeliveryKey], change: Callable[[Delivery], Delivery | None]
    ) -> dict[DeliveryKey, Delivery]:
        self.check_writable()
        existing = {key: self._deliveries[key] for key in keys if key in self._deliveries}
        for key, old in existing.items():
            self._change(key, change(old))
        return existing

    def _change(self, key: DeliveryKey, new: Delivery | None) -> None:
        if key not in self._deliveries:
            return
        self._passed_over.discard(key)
        if new is not None and new.key == key:
            self._deliveries[key] = new
            return
        del self._deliveries[key]
        self._claimed.discard(key)
        if new is not None:
            self._deliveries[new.key] = new
            return
        if not any(other.message_id == key.message_id for other in self._deliveries):
            del self._messages[key.message_id]

    # --- reading

    def check_claim(self, message_id: MessageId) -> None:
        """Returns: no other relay has this store."""

    async def read_message(self, message_id: MessageId) -> Message:
        self.check_writable()
        return self._find(message_id)[0]

    async def read_body(self, message_id: MessageId) -> AsyncGenerator[bytes, None]:
        self.check_writable()
        for chunk in self._find(message_id)[1]:
            yield chunk

    def _find(self, message_id: MessageId) -> tuple[Message, list[bytes]]:
        try:
            return self._messages[message_id]
        except KeyError:
            raise contract.MessageNotFoundError(f"no message {message_id}") from None

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        return {each: self._messages[each][0] for each in ids if each in self._messages}

    async def scan(
        self,
        queue: QueueName | None = None,
        *,
        wanted: contract.Wanted = contract.everybody,
        after: DeliveryKey | None = None,
    ) -> AsyncGenerator[Delivery, None]:
        self.check_writable()
        for key, delivery in sorted(self._deliveries.items()):
            if after is not None and key <= after:
                continue
            if (key.queue == queue if queue else key.queue.is_mail) and wanted(key.recipient):
                yield delivery

    async def deliveries_of(self, message_id: MessageId, *, own: bool = False) -> list[Delivery]:
        self.check_writable()
        found = [delivery for key, delivery in self._deliveries.items() if key.message_id == message_id]
        return sorted(found, key=lambda delivery: (delivery.recipient, delivery.queue))

    def counts(self) -> dict[QueueName, contract.QueueCounts]:
        counts = Counts()
        for delivery in self._deliveries.values():
            counts.move(delivery.key, None, delivery)
        return counts.current()

    def waiting(self, queue: QueueName) -> int:
        return sum(delivery.queue == queue for delivery in self._deliveries.values())

    def is_counted(self) -> bool:
        return True

    async def oldest(self, queue: QueueName, *, now: float) -> float | None:
        self.check_writable()
        released = (key for key, d in self._deliveries.items() if key.queue == queue and d.created <= now)
        first = min(released, default=None)
        return None if first is None else self._deliveries[first].created

    async def queues(self) -> set[QueueName]:
        self.check_writable()
        return {key.queue for key in self._deliveries}

    async def left_over(self) -> str:
        self.check_writable()
        return ""

    def last_message_id(self) -> MessageId | None:
        return self._last_id

    # --- health

    def unhealthy(self) -> Unhealthy | None:
        return Unhealthy.CLOSED if self._closed else None

    def problems(self) -> tuple[str, ...]:
        return ()

    async def usable(self) -> bool:
        return False

    async def probe(self) -> None:
        self.check_writable()

    async def close(self) -> None:
        if not self._closed:
            await self._reservations.close()
            self._closed = True

    def check_writable(self) -> None:
        if self._closed:
            raise contract.StoreError(Unhealthy.CLOSED)


def _done() -> asyncio.Future[None]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done
