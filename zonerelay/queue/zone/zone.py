"""Runs one zone: carries out the decisions of its `ZonePlan`. It claims mail, looks up routes, attempts
batches and sets timers.

Every task here belongs to the zone and ends in `stop`. Between two awaits a task makes one call on the plan,
so no task sees the plan in an inconsistent state.

Claims: one task at a time makes them while there is space and a reason (new mail, a due time, a line that has
drained). The store is not queried when nothing has happened. Deliveries that a claim returns after the zone
was stopped are released.

Attempts: a task makes one batch after the other while there is more to start. Promise: an attempt that is
cancelled releases its claim, and `_finished` is called once for each attempt.

Policy: a message that is larger than its zone allows is returned to its sender (552 5.3.4) without a
connection.

Failure: if the store raises, all claims are tried again with back-off. If the router or the courier raises,
or a message cannot be read, the deliveries are deferred and a `trouble` event is reported to the operator. A
cancelled attempt leaves no outcome, and its claim is released. A known outcome has already been passed to the
settler, which is not cancelled. An attempt whose lease on the claim is lost leaves no outcome either, because
another relay may be making it.

Rates: a batch starts when a turn is due, but the time at which MAIL is written is known only when its
connection is established. Otherwise connections that are established late and at the same time would send
their mail at the same time. So the courier takes the turn at that point (`take_turn`). It rarely has to wait.
It waits for the first turn for up to `LONGEST_FIRST`: few batches wait (`destinations.HORIZON`), and they
wait longer only if a reload has made the rate much slower. It waits for a further turn, for recipients that
the peer wants in another transaction or for another host, only for `PATIENCE`, because a connection is kept
open during this time. The rest is tried again later.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from random import Random

import msgspec

from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.config.units import format_size
from zonerelay.limits.worker import LimitKeeper
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, DeliveryKey, queue_of
from zonerelay.model.envelope import Message, Priority
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.process.tasks import Alarm, NextIteration, Tasks, in_slices
from zonerelay.queue.destination import destinations
from zonerelay.queue.destination.destinations import Destination, Rates, Ticket, Transition, Work
from zonerelay.queue.orders.order import OPEN
from zonerelay.queue.orders.orders import Orders
from zonerelay.queue.selection import BacklogThrottle
from zonerelay.queue.settle.settler import LOCAL_ERROR, UNREADABLE, Settler, local_delay
from zonerelay.queue.zone.plan import WINDOW, ZonePlan
from zonerelay.queue.zone.window import ClaimRequest, PriorityWindow
from zonerelay.routing.destinations.route import Batch, DestinationKey, Route, SiteKey, Unroutable
from zonerelay.store import contract
from zonerelay.store.contract import ClaimLostError, QueueStore
from zonerelay.telemetry.events.events import Events

CLAIM_PAUSE = 0.02
"""Seconds between claims while much mail waits already. New mail for an idle destination waits no longer than
this.
"""

CLAIM_RETRY_FIRST = 1.0
CLAIM_RETRY_LONGEST = 30.0

WORTHWHILE = 8
"""Deliveries of a refill that is made without a pause, because the line has run short and may
be a fast one.
"""

TOGETHER = 0.1
"""Seconds between two claims of due mail: mail for unreachable hosts becomes due one delivery at a time."""
OVERDUE_PAUSE = 1.0
"""Seconds until the next check if the store reports a due time in the past although a claim found nothing."""

PATIENCE = 5.0
LONGEST_FIRST = 120.0
"""Seconds. Servers disconnect clients that are silent for five minutes (RFC 5321 4.5.3.2.7)."""


class ZoneParts(msgspec.Struct, frozen=True):
    """The components that all zones of a scheduler share. A reload replaces `retry`."""

    store: QueueStore
    route: Callable[[ZoneSettings, str], Awaitable[Route | Unroutable]]
    """Return the hosts for a domain, from a cache while the entry is fresh. Only CancelledError is raised.

    In a zone with a `next_hop` all domains have the same route; the zone then passes `""`.
    """
    deliver: Callable[[Batch], Awaitable[Sequence[Outcome]]]
    """Deliver a batch to one of the hosts of its route, and return one outcome per delivery, in order. If all
    outcomes have the scope HOST, no host of the route answered.

    Only CancelledError and ClaimLostError are raised, and only while no peer has replied for a recipient. Any
    unexpected error becomes a deferral.
    """
    settler: Settler
    retry: RetrySettings
    events: Events
    clock: Clock
    random: Random
    limits: LimitKeeper | None = None
    """Set if other workers share the limits."""
    orders: Orders | None = None
    """Suspensions and hold rules of operators."""
    throttle: BacklogThrottle | None = None


class Zone:
    """Sends the mail of one zone. `plan` holds the waiting mail.

    `rates` outlive the zone: a `Zone` with newer settings takes them over. The mail of a zone that is not
    served waits in the store, because the configuration does not say how to send it.
    """

    def __init__(
        self,
        settings: ZoneSettings,
        parts: ZoneParts,
        rates: Rates,
        *,
        window: int = WINDOW,
        is_served: bool = True,
    ) -> None:
        self.settings = settings
        self.is_served = is_served
        self.retry = parts.retry
        self.gate = OPEN if parts.orders is None else parts.orders.table.gate(settings)
        self._parts = parts
        self._store = parts.store
        self._settler = parts.settler
        self._events = parts.events
        self._clock = parts.clock
        self.plan = ZonePlan(
            settings,
            parts.retry,
            rates,
            window=window,
            shared=None if parts.limits is None else parts.limits.zone(settings.name),
            throttle=parts.throttle,
            gate=self.gate,
        )
        self._errands = Tasks(partial(parts.events.error, "queue.errand"))
        self._attempts = Tasks(partial(parts.events.error, "queue.lane"))
        self._pump_soon = NextIteration(self.pump)
        self._next_turn = Alarm(parts.clock.monotonic, self.pump)
        self._next_claim = Alarm(parts.clock.now, self.wake)
        self._rests: dict[Destination, asyncio.TimerHandle] = {}
        rates.changed = self._turns_changed
        self._stopping = False
        self._may_claim = is_served and not self.gate.is_closed
        """Whether mail is claimed."""
        self._is_claiming = False
        self._delay = CLAIM_RETRY_FIRST
        self._look_everywhere()

    # Calls from outside

    def stored(self, deliveries: Sequence[Delivery], is_next: bool) -> int:
        """Accept new deliveries into memory while there is room and no older mail must be sent first. The
        others are claimed later. Return how many were accepted.
        """
        priority = deliveries[0].priority
        taken = self.plan.take_new(deliveries, self._clock.now()) if is_next and self._may_claim else 0
        if taken:
            self._pump_soon.ask()
        rest = deliveries[taken:]
        # The due time of deferred mail is used: if the clock were set back, no claim would find the mail now.
        if due := min((each.next_attempt for each in rest), default=0.0):
            self.postponed(due, priority)
        elif rest or self.plan.window.of(priority).since is not None:
            # With a backlog claims go on, because only they find out when it ends.
            self.notify(priority)
        return taken

    def notify(self, priority: Priority) -> None:
        """Start a claim of new mail of a priority, because some may have been stored."""
        self.plan.window.of(priority).look(due=False)
        self._claim()

    def wake(self, *priorities: Priority) -> None:
        """Start a claim of new, due and released mail of all priorities."""
        for priority in priorities:
            self.plan.window.of(priority)
        self._look_everywhere()
        self._claim()

    def postponed(self, when: float, priority: Priority) -> None:
        """Schedule a claim for deferred mail that is due at `when`."""
        if not self._stopping:
            self._claim_at(when, self.plan.window.of(priority))

    def granted(self) -> None:
        """Start transactions that limits shared with other workers may now allow."""
        if not self._stopping:
            self.plan.round_robin.granted(self._clock.now())
            self.pump()

    async def stop(self, deadline: float) -> None:
        """Start no new attempts, wait for the running ones until `deadline` (loop time), and cancel the
        others.
        """
        self._quit()
        # Pending claims and look-ups are forgotten, because nothing has been sent for them.
        await self._errands.cancel()
        await self._give_up()
        await self._attempts.wait(max(0.0, deadline - asyncio.get_running_loop().time()))
        await self._attempts.cancel()

    async def retire(self, given_back: Callable[[], None]) -> None:
        """Release queued mail and let attempts finish, so that a `Zone` with other settings can take over.
        `given_back` is called when the waiting mail can be claimed again.
        """
        self._quit()
        await self._give_up()
        given_back()
        # Not cancelled: an interrupted claim would keep its deliveries from the next `Zone`.
        await self._errands.wait(None)
        await self._give_up()
        # Attempts may take many minutes, and until they end no other zone would search for the mail of this
        # claim.
        given_back()
        await self._attempts.wait(None)
        async for _ in in_slices(self.plan.clear(), self._clock.monotonic):
            pass

    async def _give_up(self) -> None:
        """Release all waiting deliveries, so that they can be claimed from the store again."""
        async for deliveries in in_slices(self.plan.drain(), self._clock.monotonic):
            self._release(deliveries)

    def _quit(self) -> None:
        self._stopping = True
        self._may_claim = False
        self._next_claim.cancel()
        self._next_turn.cancel()
        for destination in list(self._rests):
            self._end_rest(destination)

    def give_back(self, keys: Collection[DeliveryKey]) -> None:
        self.plan.give_back(keys)
        self._store.release(keys)
        self.wake()

    def resume(self, destination: DestinationKey | None) -> None:
        for resumed in self.plan.resume(destination):
            self._resumed(resumed)
        self.wake()

    # Carrying out the plan

    def pump(self) -> None:
        """Start all batches that the connection and rate limits allow now."""
        if self._stopping:
            return
        now, tick = self._clock.now(), self._clock.monotonic()
        while (work := self.plan.next_work(now, tick)) is not None:
            self._attempts.start(self._attempt(work))
        if self.plan.round_robin.next_turn is not None:
            self._next_turn.set(self.plan.round_robin.next_turn)
        if self.plan.has_requests:
            self._grant_requests()
        self._claim()

    def _grant_requests(self) -> None:
        for domain in self.plan.look_ups.take():
            self._errands.start(self._look_up(domain))
        for destination, deliveries in self.plan.take_parked():
            self._put_off(destination, deliveries)
        for delivery, order in self.plan.take_to_hold():
            assert self._parts.orders is not None
            self._parts.orders.hold([delivery], order)
        returned = self.plan.take_returned()
        if returned:
            self._requeue(returned)

    def _release(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries:
            self._store.release([delivery.key for delivery in deliveries])

    def _requeue(self, deliveries: Sequence[Delivery]) -> None:
        """Release deliveries, which can then be claimed again at once."""
        self._release(deliveries)
        for priority in {delivery.priority for delivery in deliveries}:
            self.plan.window.of(priority).look(due=False)

    # Claims

    def _claim(self) -> None:
        """Start to claim deliveries, unless a claim is running or there is no room."""
        if not self._is_claiming and self._may_claim and self.plan.window.wants():
            self._is_claiming = True
            self._errands.start(self._claim_on())

    def _look_everywhere(self) -> None:
        for window in self.plan.window.windows.values():
            window.look()

    async def _claim_on(self) -> None:
        try:
            while not self._stopping and await self._claim_once():
                self.pump()
        finally:
            self._is_claiming = False
        self._claim()

    async def _claim_once(self) -> bool:
        """Claim deliveries from the store once, or query it for the next due time. Return false if there is
        nothing more to request.
        """
        await self._settler.outcome_log.room()
        plan = self.plan.plan_claim(self._clock.now())
        try:
            if plan is not None:
                await self._carry_out_claim(plan)
            elif self.plan.window.wants_due():
                await self._ask_due()
            else:
                return False
        except Exception as error:  # noqa: BLE001 - not even an error in the store may end the claims of a zone
            self._look_everywhere()
            await self._wait_for_store(error)
            return True
        self._delay = CLAIM_RETRY_FIRST
        is_short = plan is not None and (plan.domain is None or plan.limit < WORTHWHILE)
        if is_short and self.plan.window.is_crowded:
            await asyncio.sleep(CLAIM_PAUSE)
        return True

    async def _carry_out_claim(self, plan: ClaimRequest) -> None:
        now = self._clock.now()
        claimed = await self._store.claim(
            queue_of(self.settings.name, plan.priority),
            plan.limit,
            now=self.plan.due_time(now) if plan.is_of_backlog else now,
            skip_domains=plan.skip,
            since=plan.since,
            domain=plan.domain,
        )
        if self._stopping:
            self._release(claimed)
            return
        self.plan.add(claimed, self._clock.now(), plan.priority)
        self.plan.claimed(plan, len(claimed))

    async def _ask_due(self) -> None:
        for priority, window in list(self.plan.window.windows.items()):
            if not window.is_due_unknown:
                continue
            window.is_due_unknown = False
            due = await self._store.next_due(queue_of(self.settings.name, priority))
            if self._stopping:
                return
            if due is not None:
                # Overdue mail that a claim passed over is claimed by domain, which the store need not know.
                overdue = due <= window.claimed_at
                self._claim_at(self._clock.now() + OVERDUE_PAUSE if overdue else due, window)

    def _claim_at(self, when: float, window: PriorityWindow) -> None:
        """Schedule a claim at `when`, but not within `TOGETHER` seconds of the last one."""
        last = min(window.claimed_at, self._clock.now())
        self._next_claim.set(max(when, last + TOGETHER))

    async def _wait_for_store(self, error: Exception) -> None:
        self._events.error("store.claim", error)
        if not await self._store.usable():
            await asyncio.sleep(self._delay)
            self._delay = min(self._delay * 2, CLAIM_RETRY_LONGEST)

    # Routes

    async def _look_up(self, domain: str) -> None:
        try:
            answer = await self._parts.route(self.settings, domain)
        except Exception as error:  # noqa: BLE001 - an error of the router is temporary
            self._events.error("queue.router", error)
            answer = None
        if isinstance(answer, Route):
            self.plan.found(domain, answer, self._clock.now())
        else:
            outcome = LOCAL_ERROR if answer is None else answer.outcome
            deliveries = self.plan.unroutable(domain)
            self._settler.post_unattempted(deliveries, outcome, destination=domain or self.settings.next_hop)
        # Not at once: other domains of the message may turn out to have the same route.
        self._pump_soon.ask()

    def _put_off(self, destination: Destination, deliveries: Sequence[Delivery]) -> None:
        """Defer the mail of a destination whose hosts are unreachable. It is due with the next probe, so that
        it leaves at once when the probe succeeds. In a zone with one next hop it stays due, so that this also
        works after a restart. After some of the mail was deferred, the rest stays in the store until the
        probe, except old mail, which must be checked and is deferred slowly.
        """
        suspension, random, now = destination.suspension, self._parts.random, self._clock.now()
        suspension.put_off += len(deliveries)
        is_old = any(map(self._settler.is_old, deliveries))
        pause = max(1, len(deliveries)) / destinations.PUT_OFF_RATE
        if suspension.put_off >= destinations.PUT_OFF_MOST and not is_old:
            pause = max(pause, suspension.until - now)
        self._end_rest(destination)
        self._rests[destination] = asyncio.get_running_loop().call_later(pause, self._rested, destination)

        def until() -> float:
            if self.settings.next_hop:
                return suspension.until if is_old else now
            if not is_old:
                return suspension.until
            # The store returns the same deliveries first. They are spread one behind the other, or others
            # would never be checked.
            spread = max(1.0, suspension.duration() * self._parts.retry.jitter)
            return suspension.place() + random.uniform(0, spread)

        reply = destinations.suspended(suspension.reply)
        outcome = Outcome(Verdict.DEFERRED, reply, Scope.HOST, local=True, counts=False)
        self._settler.post_unattempted(deliveries, outcome, destination=destination.label, until=until)

    def _resumed(self, destination: Destination) -> None:
        """Claim the mail of a destination whose suspension has ended."""
        self._events.resumed(self.settings.name, destination.label)
        self._end_rest(destination)
        self.plan.rested(destination)
        self.wake()

    def _end_rest(self, destination: Destination) -> None:
        if (timer := self._rests.pop(destination, None)) is not None:
            timer.cancel()

    def _rested(self, destination: Destination) -> None:
        self._end_rest(destination)
        self.plan.rested(destination)
        self._claim()

    # Attempts

    def _following(self, last: Work) -> Work | None:
        """Return the next batch for the task that has sent `last`, and start other batches that may start
        now.
        """
        if self._stopping:
            return None
        now, tick = self._clock.now(), self._clock.monotonic()
        work = self.plan.following(last, now, tick) or self.plan.next_work(now, tick)
        self.pump()
        return work

    def _finished(self, work: Work, outcomes: Sequence[Outcome]) -> None:
        transition = self.plan.finished(work, outcomes, self._clock.now())
        if transition is Transition.NONE:
            return
        destination = work.destination
        suspension = destination.suspension
        if transition is Transition.RESUMED:
            self._resumed(destination)
            return
        # The jitter keeps destinations that failed together from being probed at the same moment.
        suspension.until += self._parts.random.uniform(0, suspension.duration() * self._parts.retry.jitter)
        if suspension.reply is not None:
            self._events.suspended(self.settings.name, destination.label, suspension.until, suspension.reply)

    async def _attempt(self, first: Work) -> None:
        work: Work | None = first
        while work is not None:
            outcomes: Sequence[Outcome] = ()
            try:
                outcomes = await self._make(work)
            finally:
                self._finished(work, outcomes)
            work = self._following(work)

    async def _make(self, work: Work) -> Sequence[Outcome]:
        """Deliver a batch, post its outcomes, and return them in order. They are empty if the batch never
        reached a courier.
        """
        try:
            await self._settler.outcome_log.room()
            try:
                message = await self._store.read_message(work.message_id)
            except ClaimLostError:
                raise
            except Exception as error:  # noqa: BLE001 - an error of the store is temporary, too
                self._unreadable(work, error)
                return ()
            if self._parts.orders is not None and self._parts.orders.table.by_envelope:
                label = work.destination.label
                work.deliveries = self._parts.orders.keep(message, work.deliveries, work.route.name, label)
                if not work.deliveries:
                    return ()
            if self.settings.max_message_size and message.size > self.settings.max_message_size:
                return self._return(work, message)
            return await self._deliver(work, message)
        except ClaimLostError:
            self._requeue(work.deliveries)
            return ()
        except asyncio.CancelledError:
            self._release(work.deliveries)
            raise

    async def _deliver(self, work: Work, message: Message) -> Sequence[Outcome]:
        started = self._clock.monotonic()
        batch = Batch(
            self.settings,
            work.route,
            message,
            work.deliveries,
            partial(self._take_turn, work, message),
            more=work.more,
        )
        try:
            outcomes = await self._parts.deliver(batch)
        except ClaimLostError:
            raise
        except Exception as error:  # noqa: BLE001 - an error of the courier is temporary
            outcomes = self._courier_failed(batch, error)
        if len(outcomes) != len(work.deliveries):
            count = f"{len(outcomes)} outcomes for {len(work.deliveries)} deliveries"
            outcomes = self._courier_failed(batch, ValueError(count))
        # There is no await from here on, so a cancelled task cannot lose known outcomes.
        if self.settings.mix_domains is None:
            work.destination.most_domains = batch.rcptdomainmax or 1
        if batch.most_connections is not None:
            work.destination.suspension.take_at_most(batch.most_connections)
        work.seconds = seconds = self._clock.monotonic() - started
        label = work.destination.label
        self._settler.post(message, work.deliveries, outcomes, destination=label, seconds=seconds)
        return outcomes

    async def _take_turn(self, work: Work, message: Message) -> bool:
        """Wait until the rate limits allow the transaction, like `take_turn`. Raise ClaimLostError if an
        operator has suspended the mail since the batch started, for example while a connection was opened.
        """
        if self._parts.orders is not None:
            label = work.destination.label
            if any(self._parts.orders.order_of(each, message, label) for each in work.deliveries):
                raise ClaimLostError("an operator has suspended the delivery")
        return work.ticket is None or await take_turn(work.ticket, self._clock)

    def _return(self, work: Work, message: Message) -> Sequence[Outcome]:
        most = format_size(self.settings.max_message_size)
        text = f"the message has {message.size} bytes, but zone {self.settings.name} accepts at most {most}"
        outcome = Outcome(Verdict.BOUNCED, Reply(552, "3.4", text), Scope.LOCAL, local=True, counts=False)
        self._settler.post(
            message, work.deliveries, [outcome] * len(work.deliveries), destination=work.destination.label
        )
        return ()

    def _unreadable(self, work: Work, error: Exception) -> None:
        if isinstance(error, contract.MessageSettledError):
            self._release(work.deliveries)
            return
        self._events.error("queue.read_message", error, message_id=work.message_id)
        label = work.destination.label
        if isinstance(error, contract.MessageNotFoundError | contract.StoreCorruptError):
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

    # Rates

    def _turns_changed(self, site: SiteKey, earlier: bool) -> None:
        self.plan.round_robin.changed(site, self._clock.now(), earlier=earlier)
        self._pump_soon.ask()


async def take_turn(ticket: Ticket, clock: Clock) -> bool:
    """Wait until the rate limits allow the next transaction of a batch, which must then start immediately.
    Return false if the wait would be too long.
    """
    if not ticket.taken:
        ticket.arrived(clock.monotonic())
    # Checked again after each sleep: other batches may have taken the turn, and the rate may have changed.
    while (wait := ticket.due - clock.monotonic()) > 0:
        if wait > (PATIENCE if ticket.taken else LONGEST_FIRST):
            return False
        await _wait_for_turns(ticket, min(wait, PATIENCE))
    ticket.take(clock.monotonic())
    return True


async def _wait_for_turns(ticket: Ticket, seconds: float) -> None:
    """Wait for `seconds`, or until the rates allow earlier send times."""
    turns = ticket.pace.leased
    if turns is None:
        await asyncio.sleep(seconds)
        return
    woken = asyncio.Event()
    turns.watch(woken.set, further=ticket.taken)
    try:
        async with asyncio.timeout(seconds):
            await woken.wait()
    except TimeoutError:
        return
    finally:
        turns.unwatch(woken.set)
