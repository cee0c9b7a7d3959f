"""The claims of one zone: they ask the store for deliveries when there is a reason, as `ZonePlan` says.

One task lives as long as the zone. It goes on while there is room and a reason (new mail, a due time, a line
that has drained), then waits for the next one; nothing is asked of the store when nothing has happened.

Failure: a store that raises is asked again with back-off, for everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from zonerelay.model.queue_name import Priority, queue_of
from zonerelay.queue.aio import Alarm, Tasks
from zonerelay.queue.zone.parts import ZoneParts
from zonerelay.queue.zone.plan import ZonePlan
from zonerelay.queue.zone.window import Claim, NewClaim, Question, Refill

CLAIM_PAUSE = 0.02
"""Seconds between claims while plenty waits already: new mail for an idle destination waits no longer."""

CLAIM_RETRY_FIRST = 1.0
CLAIM_RETRY_LONGEST = 30.0

WORTHWHILE = 8
"""Deliveries of a line that has run short, which are fetched without a pause: it may be a quick one."""

TOGETHER = 0.1
"""Seconds between two claims of due mail: those of hosts that cannot be reached come due one by one."""
OVERDUE_PAUSE = 1.0
"""Seconds to the next look when the store names a due time that has passed although a claim found nothing."""


class Claims:
    """Claimed deliveries are added to the plan, then `claimed` is called. The task is one of `tasks`, whose
    owner ends it; after `stop` deliveries that a question still brings are released.
    """

    def __init__(
        self,
        zone: str,
        plan: ZonePlan,
        parts: ZoneParts,
        *,
        tasks: Tasks,
        claimed: Callable[[], None],
        is_served: bool = True,
    ) -> None:
        """Of a zone that is not served nothing is claimed."""
        self._is_served = is_served
        self._zone = zone
        self._plan = plan
        self._store = parts.store
        self._settler = parts.settler
        self._events = parts.events
        self._clock = parts.clock
        self._tasks = tasks
        self._claimed = claimed
        self._alarm = Alarm(parts.clock.now, self.wake)
        self._stopping = False
        self._busy = False
        self._wanted: asyncio.Future[None] | None = None
        self.priorities = {Priority.NORMAL}
        """Those that the zone has or has had mail of: their queues may hold something."""
        self._more = {Priority.NORMAL}
        self._new = {Priority.NORMAL}
        """Those of which new mail may have come."""
        self._due_unknown = {Priority.NORMAL}
        self._claimed_at = dict.fromkeys(Priority, 0.0)
        self._delay = CLAIM_RETRY_FIRST

    # Reasons

    def notify(self, priority: Priority) -> None:
        """There may be something new to claim."""
        self.priorities.add(priority)
        self._more.add(priority)
        self._new.add(priority)
        self.go_on()

    def wake(self) -> None:
        """Anything may have changed in the store: look for new, due and released deliveries."""
        self._look_everywhere()
        self.go_on()

    def released(self, priorities: Iterable[Priority]) -> None:
        """Something of these has been given back to the store."""
        self._more.update(priorities)
        self._new.update(priorities)

    def postponed(self, when: float, priority: Priority) -> None:
        """There is nothing new before `when`."""
        self.priorities.add(priority)
        if not self._stopping:
            self._wake_at(when, priority)

    def go_on(self) -> None:
        """There may be room again."""
        if self._busy or self._stopping or not self._is_served:
            return
        if self._plan.wants_claim(self._more, self._new) or (self._due_unknown and not self._more):
            self._busy = True
            if not self._wake_task():
                self._tasks.start(self._run())

    def stop(self) -> None:
        self._stopping = True
        self._alarm.cancel()
        self._wake_task()

    def _look_everywhere(self) -> None:
        self._due_unknown.update(self.priorities)
        self._more.update(self.priorities)
        self._new.update(self.priorities)

    def _wake_task(self) -> bool:
        """False when there is none that waits."""
        wanted, self._wanted = self._wanted, None
        if wanted is None or wanted.done():
            return False
        wanted.set_result(None)
        return True

    # The task

    async def _run(self) -> None:
        try:
            while not self._stopping:
                if await self._once():
                    self._claimed()
                    continue
                self._busy = False
                wanted = self._wanted = asyncio.get_running_loop().create_future()
                self.go_on()
                await wanted
        finally:
            self._busy = False

    async def _once(self) -> bool:
        """One question to the store; false when there is none left to ask."""
        if not self._settler.outcome_log.has_room:
            await self._settler.outcome_log.room()
        plan = self._plan.plan_claim(self._more, self._new)
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
        self._delay = CLAIM_RETRY_FIRST
        if plan is not None and self._plan.is_crowded and not _is_worthwhile(plan):
            await asyncio.sleep(CLAIM_PAUSE)
        return True

    async def _carry_out(self, plan: Question) -> None:
        now = self._clock.now()
        priority = plan.priority
        queue = queue_of(self._zone, priority)
        if isinstance(plan, Claim):
            self._more.discard(priority)
            self._claimed_at[priority] = now
            due = self._plan.due_time(now)
            claimed = await self._store.claim(queue, plan.limit, now=due, skip_domains=plan.skip)
            more = len(claimed) >= plan.limit
        elif isinstance(plan, NewClaim):
            self._new.discard(priority)
            claimed = await self._store.claim_new(queue, plan.limit, since=plan.since, skip_domains=plan.skip)
            more = False
            if len(claimed) >= plan.limit:
                self._new.add(priority)
        else:
            claimed = await self._store.claim_domain(queue, plan.domain, plan.limit, now=now)
            # The domain is no longer passed over: a claim may find what was released meanwhile.
            more = len(claimed) < plan.limit
        if more:
            self._more.add(priority)
        if self._stopping:
            if claimed:
                self._store.release([delivery.key for delivery in claimed])
            return
        self._plan.add(claimed, self._clock.now(), priority)
        self._plan.claimed(plan, len(claimed))

    async def _ask_due(self) -> None:
        while self._due_unknown:
            priority = self._due_unknown.pop()
            due = await self._store.next_due(queue_of(self._zone, priority))
            if self._stopping:
                return
            if due is not None:
                # Something overdue that a claim passed over is fetched by name; the store need not know that.
                overdue = due <= self._claimed_at[priority]
                self._wake_at(self._clock.now() + OVERDUE_PAUSE if overdue else due, priority)

    def _wake_at(self, when: float, priority: Priority) -> None:
        """Claim what is due then, with what comes due within `TOGETHER` after the last claim."""
        last = min(self._claimed_at[priority], self._clock.now())
        self._alarm.set(max(when, last + TOGETHER))

    async def _wait_for_store(self, error: Exception) -> None:
        self._events.trouble("store.claim", error)
        if not await self._store.usable():
            await asyncio.sleep(self._delay)
            self._delay = min(self._delay * 2, CLAIM_RETRY_LONGEST)


def _is_worthwhile(plan: Question) -> bool:
    return isinstance(plan, Refill) and plan.limit >= WORTHWHILE
