"""One zone at work: does what `ZoneQueue` decides. Claims, looks up routes, runs couriers, sets the timer.

Every task here belongs to the zone and ends in `stop`. What a task does between two awaits is one
call on the queue's plan, so no two tasks ever see it half changed.

- Batches are carried by *lanes* (`lanes.py`), so that no task is made per message.
- What a batch goes through is `attempts.py`'s.
- One task claims; it goes on when there is room and a reason (new mail, a due time, a line
  that has drained). Nothing is asked of the store when nothing has happened.

Failure: a router that raises costs its deliveries a deferral and the operator a `trouble` event. A store that
cannot be asked is asked again with back-off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

from zonerelay.config.models import RetrySettings, ZoneSettings
from zonerelay.limits.keeper import LimitKeeper
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.model.priority import Priority, queue_of
from zonerelay.model.reply import Reply
from zonerelay.queue.alarm import Alarm
from zonerelay.queue.attempts import Attempts
from zonerelay.queue.consequences import TROUBLE
from zonerelay.queue.destinations import Destination, DestinationStatus, Work
from zonerelay.queue.lanes import Lanes
from zonerelay.queue.protocols import Courier, Router
from zonerelay.queue.rates import Rates
from zonerelay.queue.rest import Rests
from zonerelay.queue.settle import Settler
from zonerelay.queue.shares import Claim, Refill
from zonerelay.queue.suspension import Transition
from zonerelay.queue.tasks import Linger, Once, Tasks
from zonerelay.queue.zone_queue import WINDOW, ZoneQueue
from zonerelay.routing.nexthop import DestinationKey, Route, SiteKey
from zonerelay.store.base import QueueStore
from zonerelay.telemetry.events import Events

CLAIM_PAUSE = 0.02
"""Seconds between claims while plenty waits already: new mail for an idle destination waits no longer."""

CLAIM_RETRY_FIRST = 1.0
CLAIM_RETRY_LONGEST = 30.0

LINGER = 0.05
"""Seconds that a found route waits for look-ups in progress: recipients of one message whose domains turn
out to share their hosts then share a transaction."""

OVERDUE_PAUSE = 1.0
"""Seconds to the next look when the store names a due time that has passed although a claim found nothing."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every zone of one scheduler works with."""

    store: QueueStore
    router: Router
    courier: Courier
    settler: Settler
    retry: RetrySettings
    events: Events
    clock: Clock
    random: Random
    limits: LimitKeeper | None = None
    """Where other workers go by the same limits."""


class ZoneRunner:
    """One zone. `notify` and `postponed` are the only ways in from outside; everything else follows.

    `rates`: the zone's, which a runner with newer settings takes over.
    """

    def __init__(
        self, zone: ZoneSettings, around: Surroundings, rates: Rates, *, window: int = WINDOW
    ) -> None:
        self.zone = zone
        self.retry = around.retry
        self._around = around
        self._store = around.store
        self._settler = around.settler
        self._attempts = Attempts(
            zone,
            store=around.store,
            courier=around.courier,
            settler=around.settler,
            events=around.events,
            clock=around.clock,
        )
        self._events = around.events
        self._clock = around.clock
        self._rates = rates
        shared = None if around.limits is None else around.limits.zone(zone.name)
        self._queue = ZoneQueue(zone, around.retry, rates, window=window, shared=shared)
        self._lanes = Lanes(self._attempt, self._following, self._drop, around.events)
        self._errands = Tasks("queue.errand", around.events)
        self._pump_soon = Once(self._pump)
        self._alarm = Alarm(around.clock.now, self._due)
        self._next_turn = Alarm(around.clock.monotonic, self._pump)
        rates.changed = self._turns_changed
        self._stopping = False
        self._claiming = False
        self._claim_wanted: asyncio.Future[None] | None = None
        self._known = {Priority.NORMAL: zone.name}
        """The queues that may hold something."""
        self._more = {Priority.NORMAL}
        self._due_unknown = {Priority.NORMAL}
        self._claimed_at = dict.fromkeys(Priority, 0.0)
        self._claim_delay = CLAIM_RETRY_FIRST
        self._linger = Linger(LINGER, self._pump)
        self._rests = Rests(self._rested)

    # From outside

    def know(self, priority: Priority) -> None:
        """The store may hold mail of this priority, now or later."""
        if priority not in self._known:
            self._known[priority] = queue_of(self.zone.name, priority)

    def notify(self, priority: Priority = Priority.NORMAL) -> None:
        """There may be something new to claim."""
        if priority is not Priority.NORMAL:
            self.know(priority)
        self._more.add(priority)
        self._claim_if_wanted()

    def wake(self) -> None:
        """Anything may have changed in the store: look for new, due and released deliveries."""
        self._look_everywhere()
        self._claim_if_wanted()

    def _look_everywhere(self) -> None:
        self._due_unknown.update(self._known)
        self._more.update(self._known)

    def postponed(self, when: float, priority: Priority = Priority.NORMAL) -> None:
        """A deferral to `when` is durable, or new mail that is to leave then."""
        self.know(priority)
        if not self._stopping:
            self._alarm.set(when)

    def granted(self) -> None:
        """Of shared limits there may be more."""
        if not self._stopping:
            self._queue.granted(self._clock.now())
            self._pump()

    async def stop(self, deadline: float) -> None:
        """Start nothing, let attempts end until `deadline` (loop time), then cancel them."""
        self._quit()
        # Claims and look-ups in progress are forgotten: nothing has been sent for them.
        await self._errands.cancel()
        self._release(self._queue.drain())
        await self._lanes.wait(max(0.0, deadline - asyncio.get_running_loop().time()))
        await self._lanes.cancel()

    async def retire(self) -> None:
        """Make way for a runner with other settings: give back what waits, let attempts end."""
        self._quit()
        self._release(self._queue.drain())
        # Not cancelled: a claim that is cut off would keep its deliveries from the next runner.
        await self._errands.wait(None)
        self._release(self._queue.drain())
        await self._lanes.wait(None)

    def _quit(self) -> None:
        self._stopping = True
        self._alarm.cancel()
        self._next_turn.cancel()
        self._lanes.close()
        self._wake_claimer()
        self._linger.cancel()
        self._rests.cancel()

    def active_keys(self) -> set[DeliveryKey]:
        return self._queue.active_keys()

    def withdraw(self, keys: Collection[DeliveryKey]) -> None:
        self._queue.withdraw(keys)

    def give_back(self, keys: Collection[DeliveryKey]) -> None:
        self._queue.give_back(keys)
        self._store.release(keys)
        self.wake()

    def resume(self, destination: DestinationKey | None) -> None:
        for resumed in self._queue.resume(destination):
            self._events.resumed(self.zone.name, resumed.label)
        self.wake()

    def destination_of(self, domain: str) -> DestinationKey | None:
        return self._queue.destination_of(domain)

    @property
    def priorities(self) -> Collection[Priority]:
        """Those that the zone has or has had mail of."""
        return self._known.keys()

    @property
    def active(self) -> int:
        return self._queue.active

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    def destinations(self) -> tuple[DestinationStatus, ...]:
        return self._queue.status(self._clock.now(), self._clock.monotonic())

    # Doing what the plan says

    def _pump(self) -> None:
        """Start whatever can be started now."""
        if self._stopping:
            return
        now = self._clock.now()
        while (work := self._next_work(now)) is not None:
            self._lanes.start(work)
        if self._queue.next_turn is not None:
            self._next_turn.set(self._queue.next_turn)
        if self._queue.has_requests:
            self._grant_requests()
        self._claim_if_wanted()

    def _next_work(self, now: float) -> Work | None:
        return self._queue.next_work(now, self._clock.monotonic() if self._rates.used else 0.0)

    def _grant_requests(self) -> None:
        self._start_look_ups()
        for destination, deliveries in self._queue.take_parked():
            self._defer(destination, deliveries)
            self._rests.begin(destination, len(deliveries))
        returned = self._queue.take_returned()
        if returned:
            self._release(returned)
            self._more.update({delivery.priority for delivery in returned})

    def _start_look_ups(self) -> None:
        for domain in self._queue.take_look_ups():
            self._errands.start(self._look_up(domain))

    def _pump_together(self) -> None:
        """Pump once the look-ups in progress have ended, or after `LINGER`."""
        if self._queue.looking_up:
            self._start_look_ups()
            self._linger.soon()
        else:
            self._linger.now()

    def _claim_if_wanted(self) -> None:
        if self._claiming or self._stopping:
            return
        if self._queue.wants_claim(self._more) or (self._due_unknown and not self._more):
            self._claiming = True
            if not self._wake_claimer():
                self._errands.start(self._claim())

    def _wake_claimer(self) -> bool:
        """False when there is none that waits."""
        wanted, self._claim_wanted = self._claim_wanted, None
        if wanted is None or wanted.done():
            return False
        wanted.set_result(None)
        return True

    def _due(self) -> None:
        """The timer: something deferred has come due, and what comes next is not known yet."""
        self.wake()

    def _release(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries:
            self._store.release([delivery.key for delivery in deliveries])

    # Claims

    async def _claim(self) -> None:
        """The claimer: one task for the life of the zone."""
        try:
            while not self._stopping:
                if await self._claim_once():
                    self._pump()
                    continue
                self._claiming = False
                wanted = self._claim_wanted = asyncio.get_running_loop().create_future()
                self._claim_if_wanted()
                await wanted
        finally:
            self._claiming = False

    async def _claim_once(self) -> bool:
        """One question to the store; false when there is none left to ask."""
        if not self._settler.has_room:
            await self._settler.room()
        plan = self._queue.plan_claim(self._more)
        try:
            if plan is not None:
                await self._carry_out(plan)
            elif self._more or not self._due_unknown:
                return False
            else:
                await self._ask_due()
        except Exception as error:  # noqa: BLE001 - even a store's bug must not end the claims of a zone
            self._look_everywhere()
            await self._wait_for_store(error)
            return True
        self._claim_delay = CLAIM_RETRY_FIRST
        if plan is not None and self._queue.is_crowded:
            await asyncio.sleep(CLAIM_PAUSE)
        return True

    async def _carry_out(self, plan: Claim | Refill) -> None:
        now = self._clock.now()
        priority = plan.priority
        queue = self._known[priority]
        if isinstance(plan, Claim):
            self._more.discard(priority)
            self._claimed_at[priority] = now
            claimed = await self._store.claim(queue, plan.limit, now=now, skip_domains=plan.skip)
            more = len(claimed) >= plan.limit
        else:
            claimed = await self._store.claim_domain(queue, plan.domain, plan.limit, now=now)
            # The domain is no longer passed over: a claim may find what was released meanwhile.
            more = len(claimed) < plan.limit
        if more:
            self._more.add(priority)
        if self._stopping:
            self._release(claimed)
            return
        self._queue.add(claimed, self._clock.now(), priority)
        self._queue.claimed(plan, len(claimed))

    async def _ask_due(self) -> None:
        while self._due_unknown:
            priority = self._due_unknown.pop()
            due = await self._store.next_due(self._known[priority])
            if self._stopping:
                return
            if due is not None:
                # Something overdue that a claim passed over is fetched by name; the store need not know that.
                overdue = due <= self._claimed_at[priority]
                self._alarm.set(self._clock.now() + OVERDUE_PAUSE if overdue else due)

    async def _wait_for_store(self, error: Exception) -> None:
        self._events.trouble("store.claim", error)
        await asyncio.sleep(self._claim_delay)
        self._claim_delay = min(self._claim_delay * 2, CLAIM_RETRY_LONGEST)

    # Routes

    async def _look_up(self, domain: str) -> None:
        try:
            answer = await self._around.router.route(self.zone, domain)
        except Exception as error:  # noqa: BLE001 - a router's bug is temporary trouble
            self._events.trouble("queue.router", error)
            outcome = TROUBLE
        else:
            if isinstance(answer, Route):
                self._queue.found(domain, answer, self._clock.now())
                # Not at once: other domains of the message may turn out to go the same way.
                self._pump_soon.ask()
                return
            outcome = answer.outcome
        deliveries = self._queue.unroutable(domain)
        self._settler.post_unattempted(deliveries, outcome, destination=domain or self.zone.next_hop)
        self._pump_together()

    def _defer(self, destination: Destination, deliveries: Sequence[Delivery]) -> None:
        """Its hosts cannot be reached: look again when the suspension is over, not all at the same moment."""
        suspension = destination.suspension
        spread = max(1.0, suspension.duration() * self._around.retry.jitter)
        outcome = Outcome(
            Verdict.DEFERRED,
            Reply(451, "4.1", f"delivery temporarily suspended: {suspension.reply}"),
            Scope.HOST,
            local=True,
            counts=False,
        )
        self._settler.post_unattempted(
            deliveries,
            outcome,
            destination=destination.label,
            until=lambda: suspension.place() + self._around.random.uniform(0, spread),
        )

    def _rested(self, destination: Destination) -> None:
        self._queue.rested(destination)
        self._claim_if_wanted()

    # Attempts

    def _following(self) -> Work | None:
        """What a lane goes on with; whatever else can start now does."""
        work = None if self._stopping else self._next_work(self._clock.now())
        self._pump()
        return work

    def _drop(self, work: Work) -> None:
        self._release(work.deliveries)
        self._finished(work, ())

    async def _attempt(self, work: Work) -> None:
        outcomes: Sequence[Outcome] = ()
        try:
            outcomes = await self._attempts.make(work)
        finally:
            self._finished(work, outcomes)

    def _finished(self, work: Work, outcomes: Sequence[Outcome]) -> None:
        transition = self._queue.finished(work, outcomes, self._clock.now())
        if transition is Transition.NONE:
            return
        destination = work.destination
        suspension = destination.suspension
        if transition is Transition.RESUMED:
            self._events.resumed(self.zone.name, destination.label)
        elif suspension.reply is not None:
            self._events.suspended(self.zone.name, destination.label, suspension.until, suspension.reply)

    # Rates

    def _turns_changed(self, site: SiteKey, /, *, earlier: bool) -> None:
        self._queue.turns_changed(site, self._clock.now(), earlier=earlier)
        self._pump_soon.ask()
