"""`status`: one look at the store's counts, the scheduler's window and the listeners, put together.

Costs a read of the oldest delivery per zone and nothing per message.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from zonerelay import __version__
from zonerelay.config.models import Settings
from zonerelay.control.explain import Suspended, Suspensions
from zonerelay.control.messages import DestinationStatus, RelayStatus, ZoneStatus
from zonerelay.model.clock import Clock
from zonerelay.queue import destinations, scheduler
from zonerelay.routing.nexthop import DestinationKey
from zonerelay.store.base import QueueCounts, QueueStore

MAX_DESTINATIONS = 50
"""Shown in one answer: those that need attention first."""


class SchedulerView(Protocol):
    """What `queue.scheduler.Scheduler` shows of itself."""

    def snapshot(self) -> tuple[scheduler.ZoneStatus, ...]: ...

    def active_count(self, zone: str) -> int: ...


class StatusReporter:
    """`problems` gives the reasons against readiness, `state` one word for what the relay is doing."""

    def __init__(
        self,
        settings: Settings,
        *,
        hostname: str,
        store: QueueStore,
        scheduler: SchedulerView,
        clock: Clock,
        state: Callable[[], str],
        inbound_connections: Callable[[], int],
        problems: Callable[[], Awaitable[Sequence[str]]],
    ) -> None:
        self._settings = settings
        self._hostname = hostname
        self._store = store
        self._scheduler = scheduler
        self._clock = clock
        self._started = clock.monotonic()
        self._state = state
        self._inbound_connections = inbound_connections
        self._problems = problems

    async def __call__(self) -> RelayStatus:
        found = destination_statuses(self._scheduler.snapshot())
        return RelayStatus(
            software=__version__,
            pid=os.getpid(),
            hostname=self._hostname,
            backend=self._settings.spool.backend.value,
            uptime=self._clock.monotonic() - self._started,
            state=self._state(),
            listeners=tuple(listener.address for listener in self._settings.listener),
            inbound_connections=self._inbound_connections(),
            zones=tuple([await self._zone(name, counts) for name, counts in self._zones().items()]),
            destinations=tuple(found[:MAX_DESTINATIONS]),
            destinations_total=len(found),
            problems=tuple(await self._problems()),
        )

    def _zones(self) -> dict[str, QueueCounts]:
        """The configured zones in their order, then those that only old mail remembers."""
        configured = {zone.name: QueueCounts() for zone in self._settings.zone}
        return configured | self._store.counts()

    async def _zone(self, name: str, counts: QueueCounts) -> ZoneStatus:
        oldest = await self._store.oldest(name)
        active = self._scheduler.active_count(name)
        ready, deferred = without_active(counts, active)
        return ZoneStatus(
            name=name,
            ready=ready,
            active=active,
            deferred=deferred,
            held=counts.held,
            oldest_seconds=0.0 if oldest is None else max(self._clock.now() - oldest, 0.0),
        )


def without_active(counts: QueueCounts, active: int) -> tuple[int, int]:
    """Ready and deferred deliveries that are not being attempted: the store does not know which are."""
    ready = max(counts.ready - active, 0)
    return ready, max(counts.deferred - max(active - counts.ready, 0), 0)


def destination_statuses(zones: Sequence[scheduler.ZoneStatus]) -> list[DestinationStatus]:
    """Suspended ones first, then by how much is on its way or waits."""
    found = [_destination(zone.zone, each) for zone in zones for each in zone.destinations]
    found.sort(key=lambda each: (each.suspended_until is None, -each.active, -each.waiting, each.destination))
    return found


def _destination(zone: str, each: destinations.DestinationStatus) -> DestinationStatus:
    return DestinationStatus(
        zone=zone,
        destination=each.name,
        hosts=each.key.partition(" ")[2],
        active=each.active,
        waiting=each.waiting,
        suspended_until=each.suspended_until,
        reply=each.reply,
    )


def suspensions(view: SchedulerView) -> Suspensions:
    """What `explain` asks about a destination."""

    def suspended(key: DestinationKey) -> Suspended | None:
        for zone in view.snapshot():
            for each in zone.destinations:
                if each.key == key and each.suspended_until is not None:
                    return Suspended(each.suspended_until, each.reply)
        return None

    return suspended
