"""The attempts of one zone: delivers the batches that the plan has started, and passes the outcomes to the
settler.

Worker tasks make the attempts, one batch after the other. Creating a task costs more than everything else
that starting a batch does, so an idle task waits for more work. At most `SPARE` idle tasks are kept. Promise:
work that is passed to `start` is attempted, or its claim is released if the task is cancelled first. In both
cases `finished` is called once.

Policy: a message that is larger than its zone allows is returned to its sender (552 5.3.4) without a
connection.

Failure: if a message cannot be read or the courier raises, the batch is deferred and a `trouble` event is
reported to the operator. A cancelled attempt leaves no outcome, and its claim is released. A known outcome
has already been passed to the settler, which is not cancelled. An attempt whose lease on the claim is lost
leaves no outcome either, because another relay may be making it.

Rates: a batch starts when a turn is due, but the time at which MAIL is written is known only when its
connection is established. Otherwise connections that are established late and at the same time would send
their mail at the same time. So the courier takes the turn at that point. It rarely has to wait. It waits for
the first turn for up to `LONGEST_FIRST`: few batches wait (`rates.HORIZON`), and they wait longer only if a
reload has made the rate much slower. It waits for a further turn, for recipients that the peer wants in
another transaction or for another host, only for `PATIENCE`, because a connection is kept open during this
time. The rest is tried again later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from zonerelay.config.settings import ZoneSettings
from zonerelay.config.units import format_size
from zonerelay.model.clock import Clock
from zonerelay.model.envelope import Message
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.model.reply import Reply
from zonerelay.queue.aio import Tasks
from zonerelay.queue.destination.destinations import Work
from zonerelay.queue.destination.rates import Ticket
from zonerelay.queue.settle.disposition import LOCAL_ERROR, UNREADABLE, local_delay
from zonerelay.queue.zone.parts import ZoneParts
from zonerelay.routing.destinations.route import Batch
from zonerelay.store.contract import (
    ClaimLostError,
    MessageNotFoundError,
    MessageSettledError,
    StoreCorruptError,
)

SPARE = 16
PATIENCE = 5.0
LONGEST_FIRST = 120.0
"""Seconds. Servers disconnect clients that are silent for five minutes (RFC 5321 4.5.3.2.7)."""


class Attempts:
    """The delivery tasks of one zone.

    `following` returns the next work of a task after its last, or None if there is none. `finished` is called
    with the outcomes of each work in order, which are empty if the work never reached a courier. `given_back`
    is called with work that the store may hand out again.
    """

    def __init__(
        self,
        zone: ZoneSettings,
        parts: ZoneParts,
        following: Callable[[Work], Work | None],
        finished: Callable[[Work, Sequence[Outcome]], None],
        given_back: Callable[[Work], None],
    ) -> None:
        self._zone = zone
        self._store = parts.store
        self._courier = parts.courier
        self._orders = parts.orders
        self._settler = parts.settler
        self._events = parts.events
        self._clock = parts.clock
        self._following = following
        self._finished = finished
        self._given_back = given_back
        self.tasks = Tasks("queue.lane", parts.events)
        self._spare: list[asyncio.Future[Work | None]] = []
        self._closed = False

    def start(self, work: Work) -> None:
        while self._spare:
            spare = self._spare.pop()
            if not spare.done():
                spare.set_result(work)
                return
        self.tasks.start(self._run(work))

    def close(self) -> None:
        """Let every task end when it has no more work."""
        self._closed = True
        for spare in self._spare:
            if not spare.done():
                spare.set_result(None)
        self._spare.clear()

    async def _run(self, first: Work) -> None:
        work: Work | None = first
        while work is not None:
            outcomes: Sequence[Outcome] = ()
            try:
                outcomes = await self.make(work)
            finally:
                self._finished(work, outcomes)
            work = self._following(work)
            if work is None and not self._closed and len(self._spare) < SPARE:
                work = await self._wait_for_work()

    async def _wait_for_work(self) -> Work | None:
        spare: asyncio.Future[Work | None] = asyncio.get_running_loop().create_future()
        self._spare.append(spare)
        try:
            return await spare
        except asyncio.CancelledError:
            work = None if spare.cancelled() else spare.result()
            if work is not None:
                self._release(work)
                self._finished(work, ())
            raise

    async def make(self, work: Work) -> Sequence[Outcome]:
        """Deliver a batch, post its outcomes, and return them in order. They are empty if the batch never
        reached a courier.
        """
        try:
            if not self._settler.outcome_log.has_room:
                await self._settler.outcome_log.room()
            try:
                message = await self._store.read_message(work.message_id)
            except ClaimLostError:
                raise
            except Exception as error:  # noqa: BLE001 - an error of the store is temporary, too
                self._unreadable(work, error)
                return ()
            if self._orders is not None and self._orders.table.by_envelope:
                label = work.destination.label
                work.deliveries = self._orders.keep(message, work.deliveries, work.route.name, label)
                if not work.deliveries:
                    return ()
            if self._zone.max_message_size and message.size > self._zone.max_message_size:
                return self._return(work, message)
            return await self._deliver(work, message)
        except ClaimLostError:
            self._release(work)
            self._given_back(work)
            return ()
        except asyncio.CancelledError:
            self._release(work)
            raise

    async def _deliver(self, work: Work, message: Message) -> Sequence[Outcome]:
        started = self._clock.monotonic()
        batch = Batch(
            self._zone,
            work.route,
            message,
            work.deliveries,
            partial(self._take_turn, work, message),
            more=work.more,
        )
        try:
            outcomes = await self._courier.deliver(batch)
        except ClaimLostError:
            raise
        except Exception as error:  # noqa: BLE001 - an error of the courier is temporary
            outcomes = self._courier_failed(batch, error)
        if len(outcomes) != len(work.deliveries):
            count = f"{len(outcomes)} outcomes for {len(work.deliveries)} deliveries"
            outcomes = self._courier_failed(batch, ValueError(count))
        # There is no await from here on, so a cancelled task cannot lose known outcomes.
        if self._zone.mix_domains is None:
            work.destination.most_domains = batch.rcptdomainmax or 1
        if batch.most_connections is not None:
            work.destination.suspension.take_at_most(batch.most_connections)
        work.seconds = seconds = self._clock.monotonic() - started
        label = work.destination.label
        self._settler.post(message, work.deliveries, outcomes, destination=label, seconds=seconds)
        return outcomes

    async def _take_turn(self, work: Work, message: Message) -> bool:
        """Wait like `BatchTurns.take`. Raise ClaimLostError if an operator has suspended the mail since the
        batch started, for example while a connection was opened.
        """
        if self._orders is not None:
            label = work.destination.label
            if any(self._orders.waited_for(each, message, label) for each in work.deliveries):
                raise ClaimLostError("an operator has suspended it")
        return work.ticket is None or await BatchTurns(work.ticket, self._clock).take()

    def _return(self, work: Work, message: Message) -> Sequence[Outcome]:
        most = format_size(self._zone.max_message_size)
        text = f"the message has {message.size} bytes, but zone {self._zone.name} accepts at most {most}"
        outcome = Outcome(Verdict.BOUNCED, Reply(552, "3.4", text), Scope.LOCAL, local=True, counts=False)
        self._settler.post(
            message, work.deliveries, [outcome] * len(work.deliveries), destination=work.destination.label
        )
        return ()

    def _unreadable(self, work: Work, error: Exception) -> None:
        if isinstance(error, MessageSettledError):
            self._release(work)
            return
        self._events.error("queue.read_message", error, message_id=work.message_id)
        label = work.destination.label
        if isinstance(error, MessageNotFoundError | StoreCorruptError):
            # Kept until the spool is repaired. If it was dropped since, nothing is left to change.
            self._settler.post(None, work.deliveries, [UNREADABLE] * len(work.deliveries), destination=label)
        else:
            now = self._clock.now()
            until = now + local_delay(now - work.deliveries[0].created)
            self._settler.post_unattempted(
                work.deliveries, UNREADABLE, destination=label, until=lambda: until
            )

    def _courier_failed(self, batch: Batch, error: Exception) -> Sequence[Outcome]:
        self._events.error("queue.courier", error, message_id=batch.message.id)
        return [LOCAL_ERROR] * len(batch.deliveries)

    def _release(self, work: Work) -> None:
        self._store.release([delivery.key for delivery in work.deliveries])


class BatchTurns:
    """The send times that one batch waits for."""

    __slots__ = ("_clock", "_ticket")

    def __init__(self, ticket: Ticket, clock: Clock) -> None:
        self._ticket = ticket
        self._clock = clock

    async def take(self) -> bool:
        """Wait for the next send time; the transaction must then start immediately. Return false if the wait
        would be too long.
        """
        ticket = self._ticket
        if not ticket.taken:
            ticket.arrived(self._clock.monotonic())
        # Checked again after each sleep: other batches may have taken the turn, and the rate may have
        # changed.
        while (wait := ticket.due - self._clock.monotonic()) > 0:
            if wait > (PATIENCE if ticket.taken else LONGEST_FIRST):
                return False
            await self._wait(min(wait, PATIENCE))
        ticket.take(self._clock.monotonic())
        return True

    async def _wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until new send times are available."""
        turns = self._ticket.leased
        if turns is None:
            await asyncio.sleep(seconds)
            return
        woken = asyncio.Event()
        turns.watch(woken.set, further=self._ticket.taken)
        try:
            async with asyncio.timeout(seconds):
                await woken.wait()
        except TimeoutError:
            return
        finally:
            turns.unwatch(woken.set)
