"""The verbs of operators on the queue: list, show, trace, retry, hold, release, bounce, drop.

Policy: deliveries on their way at this moment are left alone and counted as `busy`. Every change is durable
when its verb returns, in batches of `BATCH`, so a verb over a huge queue neither blocks the loop nor holds
it in memory; when it fails or is cancelled half-way, the finished batches stay done.

- retry: deferred deliveries become due now, also those that their senders hold back (RFC 4865), and the
  suspension of their destinations is lifted; held ones stay held.
- hold: nothing is attempted until release; survives restarts; held deliveries do not expire.
- release: held deliveries become due now; those that their senders hold back, at the time of their release.
- bounce: deliveries leave with a failure report to the sender, as if the peer had refused them.
- drop: deliveries leave without a report.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Protocol

from zonerelay.model.address import domain_of
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, DeliveryKey, DeliveryState
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.model.priority import queues_of, zone_of
from zonerelay.model.reply import Reply
from zonerelay.model.webhook import is_webhook_zone
from zonerelay.queue.aio import closing
from zonerelay.queue.operator.filters import Matcher, QueueFilter
from zonerelay.queue.operator.summary import BOUNDS, KEYS, MAX_KEYS, NEED_MESSAGE, UNKNOWN, Summary, Tally
from zonerelay.queue.operator.trace import Shown, Step, steps
from zonerelay.queue.scheduler import Scheduler
from zonerelay.queue.settle.settler import Settler
from zonerelay.store.contract import DAMAGED, EveryNth, MessageNotFoundError, Store, StoreCorruptError
from zonerelay.telemetry.events.events import Events

__all__ = ["BOUNDS", "MAX_KEYS", "SAMPLE", "Operations", "QueueFilter", "Result", "Shown", "Step", "Tally"]

BATCH = 1000
SHOWN = 100
SOON = 0.25
"""Deliveries in a batch that is to be shown, and the seconds that are spent on it: lines should come soon."""
NEVER = float("inf")
SUMMED = 250
"""Deliveries that a summary counts without a pause of the event loop."""
SAMPLE = 10_000
"""Deliveries from which a summary is estimated."""
TOGETHER = 100
"""Messages that are bounced at the same time, so that one write holds many."""

Selected = tuple[Delivery, Message | None, DeliveryState]
_Change = Callable[[Delivery], Delivery | None]
_Act = Callable[[Sequence[DeliveryKey]], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Result:
    """`changed` can be less than `matched - busy`: some already were as wanted, or left meanwhile."""

    matched: int = 0
    changed: int = 0
    busy: int = 0

    def __add__(self, other: Result) -> Result:
        return Result(self.matched + other.matched, self.changed + other.changed, self.busy + other.busy)


class VerbProgress(Protocol):
    """How many deliveries have been looked at, of how many there were at the start."""

    done: int
    total: int


LEFT_OUT = "what cannot be read, for the spool is damaged (zonerelay status says more)"


class Operations:
    """One per worker. Methods raise StoreError when the store cannot do it."""

    def __init__(
        self, *, store: Store, scheduler: Scheduler, settler: Settler, events: Events, clock: Clock
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._settler = settler
        self._events = events
        self._clock = clock

    # Looking

    def left_out(self) -> tuple[str, ...]:
        """Says in words what the answers of a damaged store lack."""
        return (LEFT_OUT,) if self._store.unhealthy() == DAMAGED else ()

    async def select(
        self, wanted: QueueFilter, limit: int | None = None, progress: VerbProgress | None = None
    ) -> AsyncGenerator[Selected, None]:
        """Matching deliveries, zone by zone, oldest message first; the message is `None` if unreadable."""
        left = sys.maxsize if limit is None else limit
        async with aclosing(self._matching(wanted, progress, most=SHOWN, within=SOON)) as batches:
            async for batch in batches:
                messages = await self._store.read_messages([each.message_id for each, _ in batch[:left]])
                for delivery, state in batch[:left]:
                    yield delivery, messages.get(delivery.message_id), state
                left -= len(batch)
                if left <= 0:
                    return

    async def count(self, wanted: QueueFilter, progress: VerbProgress | None = None) -> int:
        total = 0
        async with aclosing(self._matching(wanted, progress)) as batches:
            async for batch in batches:
                total += len(batch)
        return total

    async def show(self, message_id: MessageId) -> Shown:
        """One message with its open deliveries. Raises MessageNotFoundError."""
        # The deliveries first: a shared store waits for its server when a message is read, and not here.
        deliveries = await self._store.deliveries_of(message_id)
        message = await self._store.read_message(message_id)
        now = self._clock.now()
        active = self._scheduler.active_keys()
        return Shown(message, tuple((delivery, _state(delivery, active, now)) for delivery in deliveries))

    async def trace(self, message_id: MessageId) -> tuple[Step, ...]:
        """The known history of a message, and its next attempts. Raises MessageNotFoundError."""
        return steps(await self.show(message_id))

    async def summary(
        self, wanted: QueueFilter, by: str, *, exact: bool, progress: VerbProgress | None = None
    ) -> Tally:
        """Counts the matches by one property. Without `exact` a large queue is estimated from one delivery in
        several, so that the answer comes within about a second.
        """
        every = 1 if exact else max(1, self._total(wanted.zone) // SAMPLE)
        summary = Summary(every, self._clock.now())
        key_of = KEYS.get(by) or self._site
        async with aclosing(self._matching(wanted, progress, most=SUMMED, every=every)) as batches:
            async for batch in batches:
                ids = [each.message_id for each, _ in batch] if by in NEED_MESSAGE else []
                messages = await self._store.read_messages(ids) if ids else {}
                for delivery, _ in batch:
                    summary.count(key_of(delivery, messages.get(delivery.message_id)), delivery.created)
                await asyncio.sleep(0)
        return summary.tally

    def _site(self, delivery: Delivery, _message: Message | None) -> str:
        """The hosts that the zone has found for the domain."""
        found = self._scheduler.destination_of(delivery.zone, delivery.domain)
        return UNKNOWN if found is None else found.partition(" ")[2]

    # Changing

    async def retry(self, wanted: QueueFilter, progress: VerbProgress | None = None) -> Result:
        return await self._change("retry", wanted, _retried, progress, after=self._resume)

    async def hold(self, wanted: QueueFilter, progress: VerbProgress | None = None) -> Result:
        return await self._change("hold", wanted, _held, progress)

    async def release(self, wanted: QueueFilter, progress: VerbProgress | None = None) -> Result:
        now = self._clock.now()
        return await self._change("release", wanted, lambda delivery: _released(delivery, now), progress)

    async def drop(self, wanted: QueueFilter, progress: VerbProgress | None = None) -> Result:
        return await self._change("drop", wanted, _dropped, progress)

    async def bounce(self, wanted: QueueFilter, reason: str, progress: VerbProgress | None = None) -> Result:
        # One line for the report: it ends up in a status field.
        reply = Reply(554, "7.0", " ".join(reason.split()) or "returned by the operator")
        outcome = Outcome(Verdict.BOUNCED, reply, Scope.LOCAL, local=True, counts=False)

        async def bounce(keys: Sequence[DeliveryKey]) -> int:
            return await self._bounce(keys, outcome)

        return await self._over("bounce", wanted, bounce, progress)

    async def correct(self, change: Callable[[Delivery], Delivery]) -> int:
        """Apply a change to the deferred deliveries that it alters; returns how many those were."""
        corrected = 0

        async def update(keys: Sequence[DeliveryKey]) -> int:
            return await self._store.update(keys, change)

        async with aclosing(self._matching(QueueFilter(state=DeliveryState.DEFERRED), None)) as batches:
            async for batch in batches:
                keys = [delivery.key for delivery, _ in batch if change(delivery) != delivery]
                if keys:
                    corrected += (await self._one_batch(keys, update)).changed
        return corrected

    async def _change(
        self,
        verb: str,
        wanted: QueueFilter,
        change: _Change,
        progress: VerbProgress | None,
        after: Callable[[Sequence[DeliveryKey]], None] | None = None,
    ) -> Result:
        async def update(keys: Sequence[DeliveryKey]) -> int:
            changed = 0
            dropped: dict[DeliveryKey, None] = {}

            def counted(delivery: Delivery) -> Delivery | None:
                nonlocal changed
                new = change(delivery)
                changed += new != delivery
                if new is None:
                    dropped[delivery.key] = None
                return new

            await self._store.update(keys, counted)
            self._events.dropped(list(dropped))
            if after is not None:
                after(keys)
            return changed

        return await self._over(verb, wanted, update, progress)

    async def _over(self, verb: str, wanted: QueueFilter, act: _Act, progress: VerbProgress | None) -> Result:
        """Withdraws, acts on and gives back the matching deliveries, batch by batch."""
        result = Result()
        try:
            async with aclosing(self._matching(wanted, progress)) as batches:
                async for batch in batches:
                    result += await self._one_batch([delivery.key for delivery, _ in batch], act)
        finally:
            if result.matched:
                self._events.operated(verb, result.changed, detail=_described(wanted))
        return result

    async def _one_batch(self, keys: Sequence[DeliveryKey], act: _Act) -> Result:
        free = self._scheduler.withdraw(keys)
        try:
            changed = await act([key for key in keys if key in free]) if free else 0
        finally:
            self._scheduler.give_back(free)
        return Result(len(keys), changed, len(keys) - len(free))

    async def _bounce(self, keys: Sequence[DeliveryKey], outcome: Outcome) -> int:
        bounced = 0
        groups = [list(group) for _, group in groupby(keys, key=lambda key: key.message_id)]
        for start in range(0, len(groups), TOGETHER):
            some = groups[start : start + TOGETHER]
            # The settler keeps an outcome until it is stored; an operator is told now that it cannot be.
            await self._store.probe()
            bounced += sum(await asyncio.gather(*(self._bounce_message(group, outcome) for group in some)))
        return bounced

    async def _bounce_message(self, keys: Sequence[DeliveryKey], outcome: Outcome) -> int:
        message_id = keys[0].message_id
        message = await self._message(message_id)
        if message is None:
            return 0
        chosen = set(keys)
        # As they are now: the list may be older than the last attempt.
        deliveries = [d for d in await self._store.deliveries_of(message_id) if d.key in chosen]
        if deliveries:
            await self._settler.settle(message, deliveries, [outcome] * len(deliveries))
        return len(deliveries)

    def _resume(self, keys: Sequence[DeliveryKey]) -> None:
        for zone, domain in {(zone_of(key.queue), domain_of(key.recipient)) for key in keys}:
            self._scheduler.resume_domain(zone, domain)

    # Reading

    async def _matching(
        self,
        wanted: QueueFilter,
        progress: VerbProgress | None,
        *,
        most: int = BATCH,
        within: float = NEVER,
        every: int = 1,
    ) -> AsyncGenerator[list[tuple[Delivery, DeliveryState]], None]:
        """Matches in batches of at most `most`, which take no longer `within` that many seconds. A batch is
        complete before anything is done to it. Of `every` so many deliveries one is looked at.
        """
        matcher = Matcher(wanted, self._clock.now())
        batch: list[tuple[Delivery, DeliveryState]] = []
        began = self._clock.monotonic()
        seen = 0
        active = self._scheduler.active_keys()
        async with aclosing(self._candidates(wanted, matcher, progress, every)) as candidates:
            async for delivery in candidates:
                seen += 1
                if seen % BATCH == 0:
                    await asyncio.sleep(0)
                    active = self._scheduler.active_keys()
                state = _state(delivery, active, self._clock.now())
                if not matcher.matches(delivery, state):
                    continue
                if matcher.needs_message and not matcher.matches_sender(
                    await self._message(delivery.message_id)
                ):
                    continue
                batch.append((delivery, state))
                if len(batch) >= most or self._clock.monotonic() - began >= within:
                    yield batch
                    batch = []
                    began = self._clock.monotonic()
        if batch:
            yield batch

    async def _candidates(
        self, wanted: QueueFilter, matcher: Matcher, progress: VerbProgress | None, every: int
    ) -> AsyncGenerator[Delivery, None]:
        if wanted.message_id is not None:
            for delivery in await self._store.deliveries_of(wanted.message_id):
                if not is_webhook_zone(delivery.queue):
                    yield delivery
            return
        may_match = matcher.recipient
        if every > 1:
            may_match = EveryNth(every)
        elif progress is not None:
            progress.total = self._total(wanted.zone)
            may_match = _counting(may_match, progress)
        for queue in (None,) if wanted.zone is None else queues_of(wanted.zone):
            async with closing(self._store.scan(queue, wanted=may_match)) as deliveries:
                async for delivery in deliveries:
                    if not is_webhook_zone(delivery.queue):
                        yield delivery

    def _total(self, zone: str | None) -> int:
        return sum(
            counts.total
            for name, counts in self._store.counts().items()
            if zone in (None, zone_of(name)) and not is_webhook_zone(name)
        )

    async def _message(self, message_id: MessageId) -> Message | None:
        try:
            return await self._store.read_message(message_id)
        except (MessageNotFoundError, StoreCorruptError):
            return None


def _counting(wanted: Callable[[str], bool], progress: VerbProgress) -> Callable[[str], bool]:
    """Also asked in the store's thread, one delivery after the other."""

    def counted(recipient: str) -> bool:
        progress.done += 1
        return wanted(recipient)

    return counted


def _state(delivery: Delivery, active: set[DeliveryKey], now: float) -> DeliveryState:
    return DeliveryState.ACTIVE if delivery.key in active else delivery.state(now)


def _retried(delivery: Delivery) -> Delivery:
    return delivery if delivery.held else replace(delivery, next_attempt=0.0)


def _held(delivery: Delivery) -> Delivery:
    return replace(delivery, held=True)


def _released(delivery: Delivery, now: float) -> Delivery:
    if not delivery.held:
        return delivery
    return replace(delivery, held=False, next_attempt=delivery.created if delivery.created > now else 0.0)


def _dropped(delivery: Delivery) -> None:
    del delivery


def _described(wanted: QueueFilter) -> str:
    """The filter as one line of the log, which shows later what was done."""
    given = ((field.name, getattr(wanted, field.name)) for field in fields(wanted))
    return " ".join(f"{name}={value}" for name, value in given if value is not None)
