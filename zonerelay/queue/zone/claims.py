"""Fetches deliveries of one zone from the store when its plan requests them.

One task lives as long as the zone. It continues while there is space and a reason (new mail, a due time, a
line that has drained), then waits for the next reason. The store is not queried when nothing has happened.

Failure: if the store raises, all claims are tried again with back-off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from zonerelay.model.queue_name import Priority, queue_of
from zonerelay.queue.aio import Alarm, Tasks
from zonerelay.queue.zone.parts import ZoneParts
from zonerelay.queue.zone.plan import ZonePlan
from zonerelay.queue.zone.window import ClaimRequest

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


class Claims:
    """Claims deliveries of one zone from the store. They are added to the plan, and then `claimed` is called.
    The task is one of `tasks`, whose owner ends it. After `stop`, deliveries that a pending request still
    returns are released.
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
        """Create the claims. If the zone is not served, nothing is claimed."""
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
        """The priorities of which the zone has or has had mail, so their queues may hold something."""
        self._more = {Priority.NORMAL}
        self._new = {Priority.NORMAL}
        """The priorities of which new mail may have arrived."""
        self._due_unknown = {Priority.NORMAL}
        self._claimed_at = dict.fromkeys(Priority, 0.0)
        self._delay = CLAIM_RETRY_FIRST

    # Reasons

    @property
    def is_open(self) -> bool:
        """Whether the zone is served and not stopped."""
        return self._is_served and not self._stopping

    def notify(self, priority: Priority) -> None:
        """Note that there may be new mail to claim."""
        self.priorities.add(priority)
        self._more.add(priority)
        self._new.add(priority)
        self.go_on()

    def wake(self) -> None:
        """Search for new, due and released deliveries."""
        self._look_everywhere()
        self.go_on()

    def released(self, priorities: Iterable[Priority]) -> None:
        """Note that deliveries of these priorities were returned to the store."""
        self._more.update(priorities)
        self._new.update(priorities)

    def postponed(self, when: float, priority: Priority) -> None:
        """Note that there is nothing new before `when`."""
        self.priorities.add(priority)
        if not self._stopping:
            self._wake_at(when, priority)

    def go_on(self) -> None:
        """Claim more deliveries if there may be room."""
        if self._busy or not self.is_open:
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
        """Wake the task. Return false if no task waits."""
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
        """Make one request to the store. Return false if there is none left to make."""
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
        except Exception as error:  # noqa: BLE001 - not even an error in the store may end the claims of a zone
            self._look_everywhere()
            await self._wait_for_store(error)
            return True
        self._delay = CLAIM_RETRY_FIRST
        if plan is not None and self._plan.is_crowded and not _is_worthwhile(plan):
            await asyncio.sleep(CLAIM_PAUSE)
        return True

    async def _carry_out(self, plan: ClaimRequest) -> None:
        now = self._clock.now()
        priority = plan.priority
        queue = queue_of(self._zone, priority)
        if plan.is_of_backlog:
            self._more.discard(priority)
            self._claimed_at[priority] = now
            now = self._plan.due_time(now)
        elif plan.since is not None:
            self._new.discard(priority)
        claimed = await self._store.claim(
            queue, plan.limit, now=now, skip_domains=plan.skip, since=plan.since, domain=plan.domain
        )
        is_full = len(claimed) >= plan.limit
        if plan.since is not None:
            if is_full:
                self._new.add(priority)
        elif is_full is plan.is_of_backlog:
            # A domain of which there is no more is no longer passed over, so a claim may find what was
            # released since.
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
                # Overdue mail that a claim passed over is claimed by domain, which the store need not know.
                overdue = due <= self._claimed_at[priority]
                self._wake_at(self._clock.now() + OVERDUE_PAUSE if overdue else due, priority)

    def _wake_at(self, when: float, priority: Priority) -> None:
        """Claim deliveries due at `when`, together with those due within `TOGETHER` after the last claim."""
        last = min(self._claimed_at[priority], self._clock.now())
        self._alarm.set(max(when, last + TOGETHER))

    async def _wait_for_store(self, error: Exception) -> None:
        self._events.error("store.claim", error)
        if not await self._store.usable():
            await asyncio.sleep(self._delay)
            self._delay = min(self._delay * 2, CLAIM_RETRY_LONGEST)


def _is_worthwhile(plan: ClaimRequest) -> bool:
    return plan.domain is not None and plan.limit >= WORTHWHILE
