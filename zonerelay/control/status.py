"""The figures of `zonerelay status` and of the queue gauges, collected from the store and the scheduler.

Each question reads the store's counts and the scheduler's snapshot once, so that figures agree with each
other. The ages of the oldest deliveries need the disk: `refresh` reads them, and a scrape uses the last
ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zonerelay import __version__
from zonerelay.config.settings import Settings, raised_guard
from zonerelay.control.explain.explainer import Suspended
from zonerelay.control.explain.sources import SourcePlans
from zonerelay.control.messages.answers import DestinationStatus, RelayStatus, ZoneStatus
from zonerelay.model.clock import Clock
from zonerelay.model.priority import zone_of
from zonerelay.queue.scheduler import Scheduler
from zonerelay.routing.destinations.route import DestinationKey
from zonerelay.routing.zones.zones import Zones
from zonerelay.store.contract import QueueCounts, Store, StoreError
from zonerelay.telemetry.metrics.collectors import ZoneQueue

MAX_DESTINATIONS = 1000


@dataclass(frozen=True, slots=True)
class Surface:
    """The facts that only the worker knows: its listeners, its connections, its state and its problems."""

    listeners: Sequence[str]
    inbound_connections: int
    state: str
    problems: Sequence[str]


class StatusBoard:
    def __init__(
        self,
        *,
        settings: Settings,
        hostname: str,
        store: Store,
        scheduler: Scheduler,
        zones: Zones,
        connections: Callable[[str], int],
        sources: SourcePlans,
        limits: Callable[[], str] = str,
        surface: Callable[[], Surface],
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._hostname = hostname
        self._store = store
        self._scheduler = scheduler
        self._zones = zones
        self._connections = connections
        self._sources = sources
        self._limits = limits
        self._surface = surface
        self._clock = clock
        self._started = clock.now()
        self._oldest: dict[str, float] = {}

    async def refresh(self) -> None:
        """Bring the ages of the oldest deliveries up to date.

        A store that refuses leaves the ages as they were last known, for nothing leaves the queue meanwhile:
        operators need the other figures most at that time.
        """
        oldest: dict[str, float] = {}
        now = self._clock.now()
        try:
            for queue in self._store.counts():
                created = await self._store.oldest(queue, now=now)
                if created is not None:
                    zone = zone_of(queue)
                    oldest[zone] = min(created, oldest.get(zone, created))
        except StoreError:
            return  # `unhealthy` has the reason, and the store's events have told it
        self._oldest = oldest

    def queues(self) -> list[ZoneQueue]:
        """Returns the queues of every configured zone, and of every other zone that holds mail."""
        counts = _by_zone(self._store.counts())
        return [
            self._queue(zone, counts.get(zone) or QueueCounts())
            for zone in dict.fromkeys((*self._zones.names, *counts))
        ]

    def _queue(self, zone: str, counts: QueueCounts) -> ZoneQueue:
        created = self._oldest.get(zone)
        active = min(self._scheduler.active_count(zone), counts.total)
        # What is being attempted is counted by its durable state too: mostly ready, sometimes deferred.
        from_ready = min(active, counts.ready)
        return ZoneQueue(
            zone=zone,
            ready=counts.ready - from_ready,
            active=active,
            deferred=max(counts.deferred - (active - from_ready), 0),
            held=counts.held,
            oldest=0.0 if created is None else max(self._clock.now() - created, 0.0),
            connections=self._connections(zone),
        )

    async def status(self) -> RelayStatus:
        await self.refresh()
        surface = self._surface()
        destinations = self._destinations()
        return RelayStatus(
            software=__version__,
            pid=os.getpid(),
            hostname=self._hostname,
            backend=self._settings.spool.backend.value,
            guard=raised_guard(self._settings.spool),
            uptime=self._clock.now() - self._started,
            state=surface.state,
            listeners=tuple(surface.listeners),
            inbound_connections=surface.inbound_connections,
            zones=tuple(self._zone(queue) for queue in self.queues()),
            destinations=tuple(destinations[:MAX_DESTINATIONS]),
            destinations_total=len(destinations),
            problems=tuple(surface.problems),
            source_penalties=self._sources.penalties(),
            limits=self._limits(),
            counted=self._store.is_counted(),
        )

    def suspended(self, destination: DestinationKey) -> Suspended | None:
        """Returns the suspension of a destination, `None` when it is not suspended."""
        for zone in self._scheduler.snapshot():
            for status in zone.destinations:
                if status.key == destination and status.suspended_until is not None:
                    return Suspended(status.suspended_until, status.reply)
        return None

    def _zone(self, queue: ZoneQueue) -> ZoneStatus:
        return ZoneStatus(
            name=queue.zone,
            ready=queue.ready,
            active=queue.active,
            deferred=queue.deferred,
            held=queue.held,
            oldest_seconds=queue.oldest,
        )

    def _destinations(self) -> list[DestinationStatus]:
        """The busiest first, suspended ones before idle ones."""
        now = self._clock.now()
        rows = [
            DestinationStatus(
                zone=zone.zone,
                destination=destination.name,
                hosts=destination.key.partition(" ")[2],
                active=destination.active,
                waiting=destination.waiting,
                suspended_until=destination.suspended_until,
                reply=destination.reply,
                next_turn=None if destination.turn_in is None else now + destination.turn_in,
            )
            for zone in self._scheduler.snapshot()
            for destination in zone.destinations
        ]
        rows.sort(key=lambda row: (-row.active, -row.waiting, row.suspended_until is None))
        return rows


def _by_zone(counts: Mapping[str, QueueCounts]) -> dict[str, QueueCounts]:
    """The queues of all priorities together."""
    zones: dict[str, QueueCounts] = {}
    for queue, count in counts.items():
        zone = zones.setdefault(zone_of(queue), QueueCounts())
        zone.ready += count.ready
        zone.deferred += count.deferred
        zone.held += count.held
    return zones
