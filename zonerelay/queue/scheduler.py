"""All zones of one worker: who is woken, what an operator may touch, how it ends.

STRATEGIES (policy → the harm it prevents). Those inside a zone head `zone/plan.py`; here:

- Zones share nothing but the store and the settler → no zone waits for another's destinations.
- Nothing polls: a zone wakes on new mail, on its earliest due time and on a freed connection
  → an idle relay costs nothing, and new mail starts within a turn or two of the event loop.
- Mail in zones that the configuration no longer names is served with the default zone's settings
  → no mail is orphaned by an edit of the configuration.
- Who wants to change deliveries withdraws them first and gives them back afterwards
  → an operator's change and an attempt never cross.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.limits.worker.keeper import LimitKeeper
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import DeliveryKey
from zonerelay.model.outbox import MAILBOXES, is_mailbox_zone
from zonerelay.model.priority import Priority, priority_of, queues_of, zone_of
from zonerelay.queue.contract import Courier, Router
from zonerelay.queue.destination.destinations import DestinationStatus
from zonerelay.queue.selection.backlog_throttle import ThrottleTimer
from zonerelay.queue.selection.rates import Rates
from zonerelay.queue.settle.settler import Settler
from zonerelay.queue.zone.plan import WINDOW
from zonerelay.queue.zone.runner import Zone, ZoneParts
from zonerelay.routing.destinations.nexthop import DestinationKey
from zonerelay.store.contract import QueueStore
from zonerelay.telemetry.events.events import Events

DEFAULT_ZONE = "default"


@dataclass(frozen=True, slots=True)
class ZoneStatus:
    """`active` counts transactions, `waiting` deliveries in memory; the rest of the queue is in the store."""

    zone: str
    active: int
    waiting: int
    destinations: tuple[DestinationStatus, ...]


class Scheduler:
    """Lives on one event loop. `start` before anything else; after `stop` it does nothing more."""

    def __init__(
        self,
        *,
        zones: Sequence[ZoneSettings],
        store: QueueStore,
        router: Router,
        courier: Courier,
        settler: Settler,
        retry_settings: RetrySettings,
        events: Events,
        clock: Clock,
        random: Random,
        window: int = WINDOW,
        limits: LimitKeeper | None = None,
        busy: Callable[[], float] | None = None,
    ) -> None:
        """`busy`: as `ThrottleTimer`'s; without it what has waited before is sent without restraint."""
        self._settler = settler
        self._store = store
        self._events = events
        self._window = window
        self._throttle_timer = None if busy is None else ThrottleTimer(busy, self._unthrottled)
        self._around = ZoneParts(
            store=store,
            router=router,
            courier=courier,
            settler=settler,
            retry=retry_settings,
            events=events,
            clock=clock,
            random=random,
            limits=limits,
            throttle=None if self._throttle_timer is None else self._throttle_timer.throttle,
        )
        self._default = _default(zones)
        # They outlive runners, too: an operator's change goes on while settings are replaced.
        self._withdrawn: set[DeliveryKey] = set()
        # They outlive runners: a reload must not make room in a rate that is used up.
        self._rates: defaultdict[str, Rates] = defaultdict(Rates)
        # Zones that no configuration names: those of mailboxes.
        self._provided: dict[str, ZoneSettings] = {}
        self._runners = {zone.name: self._runner(zone) for zone in zones}
        # Of settings that were replaced, while their last attempts end.
        self._retired: dict[Zone, asyncio.Task[None]] = {}
        self._running = False
        self.resumed: Callable[[str], None] = _nobody
        """Told that a zone's mail is wanted to be tried now, whatever has kept it back."""
        settler.on_postponed(self._postponed)

    async def start(self) -> None:
        """Take up what the store holds. Raises StoreError."""
        for queue in sorted(await self._store.zones()):
            self._of(zone_of(queue)).know(priority_of(queue))
        self._running = True
        for runner in self._runners.values():
            runner.wake()

    async def stop(self, timeout: float) -> None:
        """No new batches; those in flight may end within `timeout`, then they are cancelled.

        Outcomes that are known are recorded, if the store takes them within what is left of the time
        and one second more.
        """
        self._running = False
        if self._throttle_timer is not None:
            self._throttle_timer.stop()
        deadline = asyncio.get_running_loop().time() + timeout
        for retirement in self._retired.values():
            retirement.cancel()
        await asyncio.gather(*(runner.stop(deadline) for runner in self._all_runners()))
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        await self._settler.drain(left + 1.0)

    def configure(
        self, zones: Sequence[ZoneSettings], retry: RetrySettings, *, other_routes: bool = False
    ) -> None:
        """Go by these settings from now on. Attempts under way end by the old ones.

        The courier's pool counts connections by zone and destination, so that limits hold meanwhile. With
        `other_routes` nothing that the router has said so far is used any longer.
        """
        self._default = _default(zones)
        self._around = replace(self._around, retry=retry)
        wanted = {zone.name: zone for zone in zones} | self._provided
        for name in (*wanted, *(self._runners.keys() - wanted.keys())):
            zone = wanted.get(name) or self._implied(name)
            is_served = zone is not None
            old = self._runners.get(name)
            if old is not None and old.is_served is is_served and self._is_in_force(old, zone, other_routes):
                continue
            runner = self._runners[name] = self._runner(zone or ZoneSettings(name=name), is_served=is_served)
            if not is_served:
                self._tell_missing(name)
            if old is not None:
                for priority in old.priorities:
                    runner.know(priority)
                self._retire(old)
            self.wake(name)

    def _is_in_force(self, runner: Zone, zone: ZoneSettings | None, other_routes: bool) -> bool:
        if zone is None:
            return True
        return not other_routes and runner.zone == zone and runner.retry == self._around.retry

    def provide(self, zone: ZoneSettings) -> None:
        """Serve a zone that the configuration does not name by these settings from now on."""
        self._provided[zone.name] = zone
        old = self._runners.get(zone.name)
        if old is not None and old.is_served and old.zone == zone:
            return
        self._runners[zone.name] = self._runner(zone)
        if old is not None:
            self._retire(old)

    def dismiss(self, zone: str) -> bool:
        """Forget a provided zone; false while something of it waits or is attempted."""
        runner = self._runners.get(zone)
        if runner is not None:
            if runner.active or runner.waiting:
                return False
            del self._runners[zone]
            self._retire(runner)
        self._provided.pop(zone, None)
        self._rates.pop(zone, None)
        return True

    def _retire(self, runner: Zone) -> None:
        given_back = partial(self._wake_successor, runner)
        retirement = asyncio.get_running_loop().create_task(runner.retire(given_back))
        self._retired[runner] = retirement
        retirement.add_done_callback(lambda _: self._succeeded(runner))

    def _succeeded(self, runner: Zone) -> None:
        self._retired.pop(runner, None)
        self._wake_successor(runner)

    def _wake_successor(self, runner: Zone) -> None:
        if runner.zone.name in self._runners:
            self.wake(runner.zone.name)

    def _all_runners(self) -> tuple[Zone, ...]:
        return (*self._runners.values(), *self._retired)

    # Reasons to wake

    def notify(self, queue: str, due: float = 0.0) -> None:
        """There may be something to claim in a zone's queue: now, or when the clock reaches `due`, if new
        mail is held back by its sender until then (RFC 4865). Cheap; never raises.
        """
        if self._running:
            # Normal mail's queue has the name of its zone.
            runner = self._runners.get(queue)
            priority = Priority.NORMAL if runner is not None else priority_of(queue)
            runner = runner or self._of(zone_of(queue))
            if due:
                runner.postponed(due, priority)
            else:
                runner.notify(priority)

    def wake(self, queue: str) -> None:
        """Deliveries of the zone have changed, or new ones of this priority may have come from others."""
        if self._running:
            runner = self._of(zone_of(queue))
            runner.know(priority_of(queue))
            runner.wake()

    def granted(self, zone: str) -> None:
        """Of limits that are shared with other workers there may be more for the zone."""
        runner = self._runners.get(zone)
        if self._running and runner is not None:
            runner.granted()

    def _unthrottled(self) -> None:
        for runner in self._all_runners():
            runner.unthrottled()

    def _postponed(self, queue: str, when: float) -> None:
        # A mailbox is looked at again by the outbox, which may have dismissed it.
        if self._running and not is_mailbox_zone(queue):
            self._of(zone_of(queue)).postponed(when, priority_of(queue))

    # Operators

    def withdraw(self, keys: Collection[DeliveryKey]) -> set[DeliveryKey]:
        """Keep the scheduler's hands off deliveries; the ones that may be changed now.

        Free are those that are neither being attempted nor waiting for their outcome to become durable,
        whether they were claimed or not, and that nobody else has withdrawn: who gives back first would let
        them be attempted in the middle of the other's change. They are attempted again only after
        `give_back`, which must follow.
        """
        free = set(keys) - self._settler.unsettled_keys() - self._withdrawn
        for runner in self._all_runners():
            free -= runner.active_keys()
        self._withdrawn |= free
        for zone, some in _by_zone(free).items():
            self._of(zone).withdraw(some)
        return free

    def give_back(self, keys: Collection[DeliveryKey]) -> None:
        """The changes are stored: these may be attempted again when they are due."""
        self._withdrawn.difference_update(keys)
        for zone, some in _by_zone(keys).items():
            self._of(zone).give_back(some)

    def resume(self, zone: str, destination: DestinationKey | None = None) -> None:
        """Lift the suspension of a destination, or of all in the zone."""
        self.resumed(zone)
        self._of(zone).resume(destination)

    def resume_domain(self, zone: str, domain: str) -> None:
        """Lift the suspension of the destination that mail for a domain goes to, if one is known."""
        self.resumed(zone)
        destination = self._of(zone).destination_of(domain)
        if destination is not None:
            self.resume(zone, destination)

    # For status

    @property
    def throttled_seconds(self) -> float:
        """How long what has waited before was held back for new mail."""
        return 0.0 if self._throttle_timer is None else self._throttle_timer.seconds

    def problems(self) -> tuple[str, ...]:
        """For people: mail that waits for a zone which the configuration does not name."""
        stored = {zone_of(queue) for queue, counts in self._store.counts().items() if counts.total}
        return tuple(
            f"zone {zone} is not configured, and {self._stored(zone)} deliveries wait in it: none is lost,"
            f' and none is sent. Put [[zone]] name = "{zone}" back and reload, or return them to their'
            f" senders with zonerelay queue bounce --zone {zone}"
            for zone in sorted(stored)
            if not is_mailbox_zone(zone) and not self._of(zone).is_served
        )

    def snapshot(self) -> tuple[ZoneStatus, ...]:
        return tuple(
            ZoneStatus(name, runner.active, runner.waiting, runner.destinations())
            for name, runner in self._runners.items()
        )

    def active_count(self, zone: str) -> int:
        """Deliveries of the zone that are being attempted; of all mailboxes' zones under their label."""
        if zone == MAILBOXES:
            return sum(
                len(runner.active_keys()) for name, runner in self._runners.items() if is_mailbox_zone(name)
            )
        runner = self._runners.get(zone)
        return 0 if runner is None else len(runner.active_keys())

    def active_keys(self) -> set[DeliveryKey]:
        """Deliveries that are being attempted, or whose outcome is not durable yet."""
        keys = self._settler.unsettled_keys()
        for runner in self._all_runners():
            keys |= runner.active_keys()
        return keys

    def is_active(self, key: DeliveryKey) -> bool:
        return key in self.active_keys()

    # Zones

    def _of(self, zone: str) -> Zone:
        return self._runners.get(zone) or self._adopt(zone)

    def _adopt(self, name: str) -> Zone:
        zone = self._provided.get(name) or self._implied(name)
        if zone is None and not is_mailbox_zone(name):  # which has no mail before it is provided
            self._tell_missing(name)
        runner = self._runner(zone or ZoneSettings(name=name), is_served=zone is not None)
        self._runners[name] = runner
        return runner

    def _implied(self, name: str) -> ZoneSettings | None:
        """The default zone need not be configured; where it is, it has a runner of its own."""
        return self._default if name == DEFAULT_ZONE else None

    def _tell_missing(self, zone: str) -> None:
        deliveries = self._stored(zone)
        if deliveries or not self._store.is_counted():
            self._events.zone_missing(zone, deliveries)

    def _stored(self, zone: str) -> int:
        counts = self._store.counts()
        return sum(counts[queue].total for queue in queues_of(zone) if queue in counts)

    def _runner(self, zone: ZoneSettings, *, is_served: bool = True) -> Zone:
        rates, limits = self._rates[zone.name], self._around.limits
        if limits is not None:
            rates.lessor = partial(limits.turns, zone.name)
        runner = Zone(zone, self._around, rates, window=self._window, is_served=is_served)
        runner.withdraw([key for key in self._withdrawn if zone_of(key.queue) == zone.name])
        return runner


def _nobody(zone: str) -> None:
    """Until somebody listens."""


def _default(zones: Sequence[ZoneSettings]) -> ZoneSettings:
    return next((zone for zone in zones if zone.name == DEFAULT_ZONE), ZoneSettings())


def _by_zone(keys: Collection[DeliveryKey]) -> dict[str, list[DeliveryKey]]:
    zones: dict[str, list[DeliveryKey]] = defaultdict(list)
    for key in keys:
        zones[zone_of(key.queue)].append(key)
    return zones
