"""Schedules the mail of all zones of one worker: wakes and stops the zones, and withdraws mail for operators'
changes.

STRATEGIES (policy → the harm it prevents). The strategies within a zone are listed in `zone/plan.py`.

- Zones share only the store and the settler → no zone waits for the destinations of another zone.
- Nothing polls: a zone wakes on new mail, on its earliest due time and on a freed connection → an idle relay
  costs nothing, and new mail starts within one or two iterations of the event loop.
- Mail in zones that the configuration no longer names stays in the store and is reported as a problem → an
  edit of the configuration loses no mail, and sends none in the wrong way.
- An operator's change withdraws its deliveries first and gives them back afterwards → an attempt never
  interferes with an operator's change.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from msgspec import structs

from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.model.delivery import Delivery, DeliveryKey, QueueKind, QueueName, queue_of, queues_of
from zonerelay.queue.destination.destinations import Destination, Rates
from zonerelay.queue.selection import BacklogThrottle
from zonerelay.queue.zone.plan import WINDOW
from zonerelay.queue.zone.zone import Zone, ZoneParts
from zonerelay.routing.destinations.route import DestinationKey
from zonerelay.routing.zones.zones import DEFAULT_ZONE

PATIENCE = 5.0
"""Seconds that an operator's change waits for outcomes to become durable."""
LOOK = 0.02


class Scheduler:
    """Schedules the deliveries of all zones on one event loop. Call `start` first; after `stop` nothing more
    is started.
    """

    def __init__(
        self,
        zones: Sequence[ZoneSettings],
        parts: ZoneParts,
        *,
        window: int = WINDOW,
        busy: Callable[[], float] | None = None,
        resumed: Callable[[str], None] = lambda zone: None,
    ) -> None:
        """Create the scheduler. `busy` is passed to `BacklogThrottle`. `resumed(zone)` is called when the
        zone's mail is to be tried now, whatever has delayed it.
        """
        self._resumed = resumed
        self._settler = parts.settler
        self._store = parts.store
        self._events = parts.events
        self._clock = parts.clock
        self._window = window
        self.throttle = BacklogThrottle(busy, self._unthrottled)
        self._parts = structs.replace(parts, throttle=self.throttle)
        self._configured = _by_name(zones)
        # Withdrawn deliveries and rates outlive a `Zone`: an operator's change continues while settings are
        # replaced, and a reload must not reset a rate that is used up.
        self._withdrawn: set[DeliveryKey] = set()
        self._rates: defaultdict[str, Rates] = defaultdict(Rates)
        # Settings of zones that the configuration does not name: those of mailboxes.
        self._provided: dict[str, ZoneSettings] = {}
        self._zones: dict[str, Zone] = {}
        for settings in zones:
            self._make(settings.name)
        # Zones whose settings were replaced, until their last attempts end.
        self._retired: dict[Zone, asyncio.Task[None]] = {}
        self._running = False

    async def start(self) -> None:
        """Start the zones, including those that have mail in the store but no settings. Raise StoreError."""
        for queue in sorted(await self._store.queues()):
            if queue.is_mail:
                self.zone(queue.zone).plan.window.of(queue.priority)
        self._running = True
        for zone in self._zones.values():
            zone.wake()

    async def stop(self, timeout: float) -> None:
        """Start no new batches, let running ones end within `timeout` seconds, then cancel them.

        Known outcomes are recorded if the store accepts them within the rest of the timeout plus one second.
        """
        self._running = False
        self._parts = structs.replace(self._parts, orders=None)  # no zone is created from now on
        self.throttle.stop()
        deadline = asyncio.get_running_loop().time() + timeout
        for retirement in self._retired.values():
            retirement.cancel()
        await asyncio.gather(*(zone.stop(deadline) for zone in self._all_zones()))
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        await self._settler.drain(left + 1.0)

    def configure(
        self, zones: Sequence[ZoneSettings], retry: RetrySettings, *, other_routes: bool = False
    ) -> None:
        """Apply new settings. Attempts in progress end with the old ones.

        The courier's pool counts connections by zone and destination, so limits hold during the change. With
        `other_routes`, all earlier results of the router are discarded.
        """
        self._configured = _by_name(zones)
        self._parts = structs.replace(self._parts, retry=retry)
        for name in dict.fromkeys((*(zone.name for zone in zones), *self._zones)):
            if not self._is_in_force(name, other_routes=other_routes):
                self._renew(name)

    def _renew(self, name: str) -> None:
        old, new = self._zones.get(name), self._make(name)
        if old is not None:
            for priority in old.plan.window.windows:
                new.plan.window.of(priority)
            self._retire(old)
        self.wake(queue_of(name))

    def go_by_orders(self) -> None:
        """Restart the zones whose mail is affected by a change of the suspensions."""
        if (orders := self._parts.orders) is not None:
            for name, zone in list(self._zones.items()):
                if zone.is_served and zone.gate != orders.table.gate(zone.settings):
                    self._renew(name)

    def _is_in_force(self, name: str, *, other_routes: bool = False) -> bool:
        zone, settings = self._zones.get(name), self._settings_of(name)
        if zone is None or settings is None or not zone.is_served:
            return zone is not None and not zone.is_served and settings is None
        return not other_routes and zone.retry == self._parts.retry and zone.settings == settings

    def provide(self, settings: ZoneSettings) -> None:
        """Add a zone that is not in the configuration, such as the one that delivers to a mailbox."""
        self._provided[settings.name] = settings
        if not self._is_in_force(settings.name):
            self._renew(settings.name)

    def dismiss(self, name: str) -> bool:
        """Remove a zone that `provide` has added. Return false while some of its mail waits or is
        attempted.
        """
        zone = self._zones.get(name)
        if zone is not None:
            if zone.plan.round_robin.active or zone.plan.window.waiting:
                return False
            del self._zones[name]
            self._retire(zone)
        self._provided.pop(name, None)
        self._rates.pop(name, None)
        return True

    def _retire(self, zone: Zone) -> None:
        retirement = asyncio.get_running_loop().create_task(zone.retire(lambda: self._wake_successor(zone)))
        self._retired[zone] = retirement
        retirement.add_done_callback(lambda _: self._succeeded(zone))

    def _succeeded(self, zone: Zone) -> None:
        self._retired.pop(zone, None)
        self._wake_successor(zone)

    def _wake_successor(self, zone: Zone) -> None:
        if zone.settings.name in self._zones:
            self.wake(queue_of(zone.settings.name))

    def _all_zones(self) -> tuple[Zone, ...]:
        return (*self._zones.values(), *self._retired)

    # Reasons to wake

    def stored(self, deliveries: Sequence[Delivery], is_next: bool) -> int:
        """Accept into memory, while there is room, deliveries that were just stored, and return how many."""
        if not self._running:
            return 0
        try:
            return self.zone(deliveries[0].queue.zone).stored(deliveries, is_next)
        except Exception as error:  # noqa: BLE001 - an error here must not stop the write of other mail
            self._events.error("queue.stored", error, message_id=deliveries[0].message_id)
            return 0

    def notify(self, queue: QueueName) -> None:
        """Look for claimable mail in a queue, because some may have been added. Cheap; never raises."""
        if self._running:
            self.zone(queue.zone).notify(queue.priority)

    def wake(self, queue: QueueName) -> None:
        """Look for claimable mail in the zone again. Deliveries have changed, or other workers may have
        stored some in this queue.
        """
        if self._running:
            self.zone(queue.zone).wake(queue.priority)

    def granted(self, name: str) -> None:
        """Start transactions that the limits shared with other workers may now allow in a zone."""
        zone = self._zones.get(name)
        if self._running and zone is not None:
            zone.granted()

    def _unthrottled(self) -> None:
        for zone in self._all_zones():
            zone.pump()

    def postponed(self, queue: QueueName, when: float) -> None:
        """Schedule a claim of deferred mail that has become durable. The earliest of its deliveries is due at
        `when`.
        """
        # The outbox itself checks a mailbox again, and may have dismissed it.
        if self._running and queue.kind is not QueueKind.MAILBOX:
            self.zone(queue.zone).postponed(when, queue.priority)

    # For operators

    def withdraw(self, keys: Collection[DeliveryKey]) -> set[DeliveryKey]:
        """Withdraw deliveries from scheduling and return those that may be changed now.

        A delivery may be changed if it is not being attempted, no outcome of it waits to become durable, and
        no other change has withdrawn it, because the first change to give it back would allow an attempt in
        the middle of the other. Whether it was claimed does not matter. Withdrawn deliveries are attempted
        again only after `give_back`, which the caller must call.
        """
        free = set(keys) - self._settler.unsettled_keys() - self._withdrawn - self._attempted()
        self._withdrawn |= free
        for name, some in _by_zone(free).items():
            self.zone(name).plan.withdraw(some)
        return free

    async def withdraw_settled(self, keys: Collection[DeliveryKey]) -> set[DeliveryKey]:
        """Withdraw deliveries as `withdraw` does, after their outcomes have become durable. Otherwise a
        change would miss deliveries whose outcomes are being written when thousands are deferred at once.
        """
        free = self.withdraw(keys)
        try:
            end = asyncio.get_running_loop().time() + PATIENCE
            while left := set(keys) - free - self._withdrawn - self._attempted():
                free |= self.withdraw(left)
                if left <= free or asyncio.get_running_loop().time() >= end:
                    break
                await asyncio.sleep(LOOK)
        except BaseException:
            self.give_back(free)
            raise
        return free

    def _attempted(self) -> set[DeliveryKey]:
        return {key for zone in self._all_zones() for key in zone.plan.active_keys()}

    def give_back(self, keys: Collection[DeliveryKey]) -> None:
        """Allow attempts of withdrawn deliveries again, after the changes to them were stored."""
        self._withdrawn.difference_update(keys)
        for name, some in _by_zone(keys).items():
            self.zone(name).give_back(some)

    def resume(self, zone: str, destination: DestinationKey | None = None) -> None:
        """Lift the suspension of a destination, or of all destinations in the zone."""
        self._resumed(zone)
        self.zone(zone).resume(destination)

    def resume_domain(self, zone: str, domain: str) -> None:
        """Lift the suspension of the destination for a domain, if the destination is known."""
        self._resumed(zone)
        destination = self.zone(zone).plan.destination_of(domain)
        if destination is not None:
            self.resume(zone, destination.key)

    # For status

    def problems(self) -> tuple[str, ...]:
        """Return a problem for each zone that has stored mail but is not configured."""
        stored = {
            queue.zone
            for queue, counts in self._store.counts().items()
            if counts.total and queue.kind is QueueKind.MAIL
        }
        return tuple(
            f"zone {zone} is not configured, but {self._stored(zone)} deliveries are queued in it. They "
            f'are kept and not sent. Restore [[zone]] name = "{zone}" and reload, or bounce them with '
            f"zonerelay queue bounce --zone {zone}"
            for zone in sorted(stored)
            if not self.zone(zone).is_served
        )

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        """Yield, with the zone's name, the destinations that have mail or are suspended. They may change
        during the iteration.
        """
        now = self._clock.now()
        for name, zone in list(self._zones.items()):
            for each in zone.plan.shown_destinations(now):
                yield name, each

    def destination_counts(self, now: float) -> Iterator[tuple[str, int, int]]:
        """Yield for each zone how many destinations are suspended, and how many others have mail."""
        for name, zone in self._zones.items():
            suspended = [each.suspended_until is not None for each in zone.plan.shown_destinations(now)]
            yield name, sum(suspended), len(suspended) - sum(suspended)

    def destination_of(self, zone: str, domain: str) -> Destination | None:
        """Return the destination of a domain, or None if its route is not known."""
        found = self._zones.get(zone)
        return None if found is None else found.plan.destination_of(domain)

    def new_mail_rate(self, zone: str) -> float:
        """Return how many new deliveries per second a zone has started recently, or infinity if that is not
        known.
        """
        found = self._zones.get(zone)
        return 0.0 if found is None else found.plan.new_mail_rate(self._clock.now())

    def active_count(self, zone: str) -> int:
        """Return how many deliveries of the zone are being attempted. The zones of all mailboxes are counted
        together under their label.
        """
        names = [name for name in self._zones if queue_of(name).label == zone]
        return sum(len(self._zones[name].plan.active_keys()) for name in names)

    def active_keys(self) -> set[DeliveryKey]:
        """Return the deliveries that are being attempted, or whose outcome is not durable yet."""
        return self._settler.unsettled_keys() | self._attempted()

    # Zones

    def zone(self, name: str) -> Zone:
        """Return the zone with this name, and create it if it is unknown."""
        return self._zones.get(name) or self._make(name)

    def _settings_of(self, name: str) -> ZoneSettings | None:
        return self._provided.get(name) or self._configured.get(name)

    def _tell_missing(self, zone: str) -> None:
        deliveries = self._stored(zone)
        if deliveries or not self._store.is_counted():
            self._events.zone_missing(zone, deliveries)

    def _stored(self, zone: str) -> int:
        counts = self._store.counts()
        return sum(counts[queue].total for queue in queues_of(zone) if queue in counts)

    def _make(self, name: str) -> Zone:
        settings, rates, limits = self._settings_of(name), self._rates[name], self._parts.limits
        if settings is None:
            self._tell_missing(name)
        if limits is not None:
            rates.lessor = partial(limits.turns, name)
        zone = self._zones[name] = Zone(
            settings or ZoneSettings(name=name),
            self._parts,
            rates,
            window=self._window,
            is_served=settings is not None,
        )
        zone.plan.withdraw([key for key in self._withdrawn if key.queue.zone == name])
        return zone


def _by_name(zones: Sequence[ZoneSettings]) -> dict[str, ZoneSettings]:
    """Return the settings of each zone by name. The default zone is included even if it is not configured."""
    return {DEFAULT_ZONE: ZoneSettings()} | {zone.name: zone for zone in zones}


def _by_zone(keys: Collection[DeliveryKey]) -> dict[str, list[DeliveryKey]]:
    zones: dict[str, list[DeliveryKey]] = defaultdict(list)
    for key in keys:
        zones[key.queue.zone].append(key)
    return zones
