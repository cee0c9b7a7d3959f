"""Runs one zone: carries out the decisions of its `ZonePlan`. It looks up routes, starts attempts and sets
timers.

Every task here belongs to the zone and ends in `stop`. Between two awaits a task makes one call on the plan,
so no task sees the plan in an inconsistent state.

`claims.py` fetches deliveries from the store, and `attempts.py` passes batches to the courier.

Failure: if the router raises, the deliveries are deferred and a `trouble` event is reported to the operator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence

from zonerelay.config.settings import ZoneSettings
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.queue.aio import Alarm, NextIteration, Tasks, Timers, in_slices
from zonerelay.queue.destination.destinations import Destination, DestinationFigures, Work
from zonerelay.queue.destination.rates import Rates
from zonerelay.queue.destination.suspension import PUT_OFF_MOST, PUT_OFF_RATE, Transition, suspended
from zonerelay.queue.orders.order import OPEN
from zonerelay.queue.settle.disposition import LOCAL_ERROR
from zonerelay.queue.zone.attempts import Attempts
from zonerelay.queue.zone.claims import Claims
from zonerelay.queue.zone.parts import ZoneParts
from zonerelay.queue.zone.plan import WINDOW, ZonePlan
from zonerelay.routing.destinations.route import DestinationKey, Route, SiteKey


class Zone:
    """Runs the deliveries of one zone. `claims` receives the reasons to claim, and `plan` holds the waiting
    mail.

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
        self._attempts = Attempts(settings, parts, self._following, self._finished, self._given_back)
        self._events = parts.events
        self._clock = parts.clock
        self._rates = rates
        shared = None if parts.limits is None else parts.limits.zone(settings.name)
        self.plan = ZonePlan(
            settings,
            parts.retry,
            rates,
            window=window,
            shared=shared,
            throttle=parts.throttle,
            gate=self.gate,
        )
        self._errands = Tasks("queue.errand", parts.events)
        self._pump_soon = NextIteration(self.pump)
        self.claims = Claims(
            settings.name,
            self.plan,
            parts,
            tasks=self._errands,
            claimed=self.pump,
            is_served=is_served and not self.gate.is_closed,
        )
        self._next_turn = Alarm(parts.clock.monotonic, self.pump)
        rates.changed = self._turns_changed
        self._stopping = False
        self._rests: Timers[Destination] = Timers(self._rested)

    # Calls from outside

    def stored(self, deliveries: Sequence[Delivery], is_next: bool) -> int:
        """Take new deliveries into the window while it has room and older mail does not come first. The
        others are claimed. Return how many were taken.
        """
        claims, priority = self.claims, deliveries[0].priority
        taken = self.plan.take_new(deliveries, self._clock.now()) if is_next and claims.is_open else 0
        if taken:
            claims.priorities.add(priority)
            self._pump_soon.ask()
        rest = deliveries[taken:]
        # The due time of deferred mail is used: if the clock were set back, no claim would find the mail now.
        if due := min((each.next_attempt for each in rest), default=0.0):
            claims.postponed(due, priority)
        elif rest or self.plan.has_backlog(priority):
            # With a backlog claims go on, because only they find out when it ends.
            claims.notify(priority)
        return taken

    def granted(self) -> None:
        """Start the transactions that shared limits allow now."""
        if not self._stopping:
            self.plan.granted(self._clock.now())
            self.pump()

    async def stop(self, deadline: float) -> None:
        """Start nothing more, let attempts end until `deadline` (loop time), then cancel them."""
        self._quit()
        # Pending claims and look-ups are forgotten, because nothing has been sent for them.
        await self._errands.cancel()
        await self._give_up()
        await self._attempts.tasks.wait(max(0.0, deadline - asyncio.get_running_loop().time()))
        await self._attempts.tasks.cancel()

    async def retire(self, given_back: Callable[[], None]) -> None:
        """Release queued mail and let attempts finish, so that a `Zone` with other settings can take over.
        `given_back` is called when the waiting mail can be claimed by others.
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
        await self._attempts.tasks.wait(None)
        async for _ in in_slices(self.plan.clear(), self._clock.monotonic):
            pass

    async def _give_up(self) -> None:
        """Release all waiting mail to the store."""
        async for deliveries in in_slices(self.plan.drain(), self._clock.monotonic):
            self._release(deliveries)

    def _quit(self) -> None:
        self._stopping = True
        self.claims.stop()
        self._next_turn.cancel()
        self._attempts.close()
        self._rests.cancel()

    def give_back(self, keys: Collection[DeliveryKey]) -> None:
        self.plan.give_back(keys)
        self._store.release(keys)
        self.claims.wake()

    def resume(self, destination: DestinationKey | None) -> None:
        for resumed in self.plan.resume(destination):
            self._resumed(resumed)
        self.claims.wake()

    def destinations(self) -> tuple[DestinationFigures, ...]:
        return self.plan.status(self._clock.now(), self._clock.monotonic())

    def each_destination(self) -> Iterator[DestinationFigures]:
        """Yield the status of the destinations, which may change during the iteration."""
        return self.plan.each_status(self._clock.now(), self._clock.monotonic())

    # Carrying out the plan

    def pump(self) -> None:
        """Start all deliveries that can be started now."""
        if self._stopping:
            return
        now = self._clock.now()
        while (work := self._next_work(now)) is not None:
            self._attempts.start(work)
        if self.plan.next_turn is not None:
            self._next_turn.set(self.plan.next_turn)
        if self.plan.has_requests:
            self._grant_requests()
        self.claims.go_on()

    def _next_work(self, now: float) -> Work | None:
        return self.plan.next_work(now, self._clock.monotonic() if self._rates.used else 0.0)

    def _grant_requests(self) -> None:
        for domain in self.plan.take_look_ups():
            self._errands.start(self._look_up(domain))
        for destination, deliveries in self.plan.take_parked():
            self._put_off(destination, deliveries)
        for delivery, order in self.plan.take_to_hold():
            assert self._parts.orders is not None
            self._parts.orders.hold([delivery], order)
        returned = self.plan.take_returned()
        if returned:
            self._release(returned)
            self.claims.released({delivery.priority for delivery in returned})

    def _release(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries:
            self._store.release([delivery.key for delivery in deliveries])

    # Routes

    async def _look_up(self, domain: str) -> None:
        try:
            answer = await self._parts.router.route(self.settings, domain)
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
        """Put off the mail of a destination whose hosts are unreachable. It is due with the next probe, so
        that it leaves at once when the probe succeeds. In a zone with one next hop it stays due, so that this
        also works after a restart. After some has been put off, the rest stays in the store until the probe,
        except old mail, which must be checked and is put off slowly.
        """
        suspension, random, now = destination.suspension, self._parts.random, self._clock.now()
        suspension.put_off += len(deliveries)
        is_old = any(map(self._settler.is_old, deliveries))
        pause = max(1, len(deliveries)) / PUT_OFF_RATE
        if suspension.put_off >= PUT_OFF_MOST and not is_old:
            pause = max(pause, suspension.until - now)
        self._rests.start(destination, pause)

        def until() -> float:
            if self.settings.next_hop:
                return suspension.until if is_old else now
            if not is_old:
                return suspension.until
            # The store returns the same deliveries first. They are spread one behind the other, or others
            # would never be checked.
            spread = max(1.0, suspension.duration() * self._parts.retry.jitter)
            return suspension.place() + random.uniform(0, spread)

        outcome = Outcome(
            Verdict.DEFERRED,
            suspended(suspension.reply),
            Scope.HOST,
            local=True,
            counts=False,
        )
        self._settler.post_unattempted(deliveries, outcome, destination=destination.label, until=until)

    def _resumed(self, destination: Destination) -> None:
        """Claim the mail of a destination whose suspension has ended."""
        self._events.resumed(self.settings.name, destination.label)
        self._rests.stop(destination)
        self.plan.rested(destination)
        self.claims.wake()

    def _rested(self, destination: Destination) -> None:
        self.plan.rested(destination)
        self.claims.go_on()

    # Attempts

    def _following(self, last: Work) -> Work | None:
        """Return the next work of a task, and start whatever else can start now."""
        if self._stopping:
            return None
        now = self._clock.now()
        work = self.plan.following(last, now, self._clock.monotonic()) or self._next_work(now)
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

    def _given_back(self, work: Work) -> None:
        self.claims.released({delivery.priority for delivery in work.deliveries})

    # Rates

    def _turns_changed(self, site: SiteKey, earlier: bool) -> None:
        self.plan.turns_changed(site, self._clock.now(), earlier=earlier)
        self._pump_soon.ask()
