"""Collects the numbers of `zonerelay status` and of the queue gauges from the store and the scheduler.

Each request reads the store's counts and the scheduler's snapshot once, so that the numbers are consistent.
The ages of the oldest deliveries require disk access: `refresh` reads them, and a scrape uses the last ones.

The worker is ready (`/readyz`) if it accepts connections, is not shutting down, and its spool can be written
and synced *now*. The last condition is tested by a write, because a disk that hangs shows only when it is
used. The result of one test is used for all requests during the test and for `FRESH_FOR` seconds after it, so
frequent requests cost little, and a test that hangs is never followed by a second one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay import __version__
from zonerelay.config.settings import Settings, SpoolSettings, raised_guard, space_guard
from zonerelay.config.units import rough_size
from zonerelay.control.destinations import DestinationRows
from zonerelay.control.explain import penalties_of
from zonerelay.control.orders import OrderAnswers
from zonerelay.model.delivery import QueueName, queue_of
from zonerelay.operations.answers import QuotaStatus, RelayStatus, ZoneStatus
from zonerelay.process.tasks import cancel_all
from zonerelay.process.threads import STATUS
from zonerelay.routing.destinations.route import DestinationKey
from zonerelay.store.contract import QueueCounts, StoreError, Unhealthy
from zonerelay.store.spool_paths import directories_of, spool_of
from zonerelay.telemetry.metrics.instruments import Figures, ZoneQueue, queue_figures, reload_figures
from zonerelay.worker.worker import Worker

if TYPE_CHECKING:
    from zonerelay.capture.store import Capture, Totals

MAX_DESTINATIONS = 1000
LARGEST = 8
"""Destinations with the most mail that are added to them, for the chart of the page."""
CAPTURED = "captured/captured.db"
"""The file of `capture/store`, which most relays have no use for: it is loaded where this is there."""


PROBE_TIMEOUT = 5.0
FRESH_FOR = 1.0


class ReadinessCheck:
    """Collects the reasons why a worker is not ready. Nothing in it raises an exception."""

    def __init__(self, worker: Worker, *, timeout: float = PROBE_TIMEOUT) -> None:
        self._worker, self._timeout = worker, timeout
        self._trial: asyncio.Task[str] | None = None
        self._fresh_until = 0.0

    async def __call__(self) -> tuple[str, ...]:
        """Return every reason why the relay is not ready, beginning with those that an operator caused, or
        nothing if it is ready.

        Reasons are for the operator and contain no addresses.
        """
        failure, worker = await self._probe_failure(), self._worker
        stopped = "" if worker.listeners.addresses else "no listener accepts connections"
        if worker.draining:
            stopped = "the relay is shutting down"
        return tuple(dict.fromkeys(filter(None, (stopped, worker.store.unhealthy(), failure))))

    async def _probe_failure(self) -> str:
        """Return the reason why the spool cannot be written and synced now, or ""."""
        trial = self._trial
        if trial is None or (trial.done() and self._worker.clock.monotonic() >= self._fresh_until):
            trial = self._trial = asyncio.create_task(self._try())
        # wait() does not cancel the test at the timeout, because a sync cannot be interrupted.
        await asyncio.wait({trial}, timeout=self._timeout)
        if trial.done() and not trial.cancelled():
            return trial.result()
        return f"the spool did not complete a synced write within {self._timeout:.0f} seconds"

    async def close(self) -> None:
        """Cancel a test write to the spool that hangs. Call this before the store is closed."""
        await cancel_all(self._trial)

    async def _try(self) -> str:
        try:
            await self._worker.store.probe()
        except StoreError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - an unexpected error is a reason like any other
            return f"the spool probe failed with an unexpected {type(error).__name__}"
        finally:
            self._fresh_until = self._worker.clock.monotonic() + FRESH_FOR
        return ""


class StatusBoard:
    """Collects the numbers of `status` and of the queue gauges (implements `admin.http_server.Monitored`)."""

    def __init__(self, worker: Worker, orders: OrderAnswers) -> None:
        self._worker = worker
        self._orders = orders
        self.readiness = ReadinessCheck(worker)
        self.exposition = worker.metrics.exposition
        self._store, self._scheduler, self._clock = worker.store, worker.scheduler, worker.clock
        self._spool = spool_of(worker.settings.spool, worker.identity.index)
        self.destinations = DestinationRows(self._store, self._scheduler, self._clock, worker.orders)
        self._started = self._clock.now()
        self._oldest: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self.free_space: int | None = None
        """Octets, when they were last looked at."""
        self.captured: Totals | None = None
        """Captured mail, when it was last looked at; `None` where there is none."""
        self._capture: Capture | None = None
        self._capture_problem = ""
        self._files = worker.settings, _named_files(worker.settings)

    async def close(self) -> None:
        """Stop all reads of the store. Call this before the store is closed."""
        await self.destinations.close()
        await self.readiness.close()
        if self._capture is not None:
            await STATUS.run(self._capture.close)

    async def refresh(self) -> None:
        """Update the ages of the oldest deliveries.

        If the store refuses, the last known ages are kept, because nothing leaves the queue in this state and
        operators need the other numbers most at that time.
        """
        self.free_space = await STATUS.run(_free_space, self._spool)
        self.captured = await STATUS.run(self._look_at_captured)
        with contextlib.suppress(StoreError):  # `unhealthy` has the reason, and the store's events too
            self._oldest = await self._earliest(partial(self._store.oldest, now=self._clock.now()))
            # A store that cannot claim mail has no due times, but still has ages.
            self._due = await self._earliest(self._store.next_due)

    async def _earliest(self, ask: Callable[[QueueName], Awaitable[float | None]]) -> dict[str, float]:
        """Return, for each zone, the earliest time that `ask` returns for any of its queues."""
        found: dict[str, float] = {}
        for queue in self._store.counts():
            at = await ask(queue)
            if at is not None:
                found[queue.zone] = min(at, found.get(queue.zone, at))
        return found

    def _look_at_captured(self) -> Totals | None:
        if not (self._worker.settings.spool.path.parent / CAPTURED).exists():
            self._capture_problem = ""
            return None
        from zonerelay.capture.store import CaptureError, open_capture  # noqa: PLC0415 - see CAPTURED

        self._capture = self._capture or open_capture(self._worker.settings, self._clock.now)
        try:
            found = self._capture.totals()
        except CaptureError as error:
            self._capture_problem = f"captured mail is unavailable: {error}"
            return self.captured
        self._capture_problem = ""
        return found

    def queues(self) -> list[ZoneQueue]:
        """Return the queues of every configured zone, and of every other zone that holds mail."""
        counts = _by_zone(self._store.counts())
        return [
            self._queue(zone, counts.get(zone) or QueueCounts())
            for zone in dict.fromkeys((*self._worker.zones.names, *counts))
        ]

    def _queue(self, zone: str, counts: QueueCounts) -> ZoneQueue:
        created = self._oldest.get(zone)
        active = min(self._scheduler.active_count(zone), counts.total)
        # Deliveries that are being attempted are also counted by their stored state: mostly ready, sometimes
        # deferred.
        from_ready = min(active, counts.ready)
        return ZoneQueue(
            zone=zone,
            ready=counts.ready - from_ready,
            active=active,
            deferred=max(counts.deferred - (active - from_ready), 0),
            held=counts.held,
            oldest=0.0 if created is None else max(self._clock.now() - created, 0.0),
            connections=self._worker.sending.courier.pool.open_connections(zone),
            overdue=max(self._clock.now() - self._due[zone], 0.0) if zone in self._due else 0.0,
        )

    def figures(self) -> Mapping[str, Figures]:
        """Return the metrics that are computed at each scrape."""
        worker, captured = self._worker, self.captured
        label = str(worker.identity.index)
        return {
            **queue_figures(self.queues(), is_counted=self._store.is_counted()),
            **reload_figures(worker.taken_up, worker.refused_at is None),
            "zonerelay_destinations": self._destination_states(),
            "zonerelay_orders": worker.orders.in_force(),
            "zonerelay_orders_without_end": worker.orders.endless(),
            "zonerelay_source_penalties": worker.sending.sources.penalty_counts(),
            "zonerelay_store_usable": {label: float(self._store.unhealthy() is None)},
            "zonerelay_spool_free_bytes": {} if self.free_space is None else {label: self.free_space},
            "zonerelay_spool_min_free_bytes": {label: space_guard(worker.settings.spool)},
            "zonerelay_captured_messages": None if captured is None else captured.messages,
            "zonerelay_captured_bytes": None if captured is None else captured.octets,
            "zonerelay_restrained_seconds_total": self._scheduler.throttle.seconds,
        }

    def _destination_states(self) -> Mapping[tuple[str, str], int]:
        """Return, for each zone, the number of destinations that are suspended now, and of those that are
        not.
        """
        found: Counter[tuple[str, str]] = Counter()
        for zone, suspended, usable in self._scheduler.destination_counts(self._clock.now()):
            found[queue_of(zone).label, "suspended"] += suspended
            found[queue_of(zone).label, "usable"] += usable
        return found

    async def status(self) -> RelayStatus:
        """Return the status of the worker."""
        await self.refresh()
        worker, settings, history = self._worker, self._worker.settings, self._worker.history
        limits, accepted_and_delivered = worker.sending.limits, worker.metrics.per_minute.counts()
        destinations, total = await self.destinations.rows(MAX_DESTINATIONS, LARGEST)
        problems = (*worker.all_problems(), *filter(None, (self._capture_problem, self._space_problem())))
        return RelayStatus(
            software=__version__,
            pid=os.getpid(),
            hostname=worker.context.hostname,
            backend=settings.spool.backend.value,
            guard=raised_guard(settings.spool),
            uptime=self._clock.now() - self._started,
            state="draining" if worker.draining else "running",
            listeners=tuple(worker.listeners.addresses),
            inbound_connections=worker.listeners.connections,
            zones=tuple(self._zone(queue) for queue in self.queues()),
            destinations=tuple(destinations),
            destinations_total=total,
            problems=(*problems, *await STATUS.run(self._missing, settings, problems)),
            source_penalties=penalties_of(worker.sending.sources),
            limits="" if limits is None else limits.status,
            counted=self._store.is_counted(),
            every=self.destinations.every,
            free_space=self.free_space,
            captured_messages=None if self.captured is None else self.captured.messages,
            captured_size=None if self.captured is None else self.captured.octets,
            history_size=None if history is None else await STATUS.run(history.size),
            history_since=None if history is None else history.since,
            name_servers=worker.sending.resolver.watch.state(),
            orders=self._orders.rows(),
            taken_up=worker.taken_up,
            refused=worker.refused_at,
            quotas=tuple(QuotaStatus(*each) for each in worker.listeners.guard.nearly_used()),
            accepted_per_minute=accepted_and_delivered[0],
            delivered_per_minute=accepted_and_delivered[1],
        )

    def _missing(self, settings: Settings, reported: Sequence[str]) -> list[str]:
        """Describe files named in the configuration that have disappeared since it was loaded. Blocks."""
        if settings is not self._files[0]:
            self._files = settings, _named_files(settings)
        return [
            f"{file}, which {name} refers to, is missing or in a directory that the relay is not allowed to "
            "search; restore it, or change the configuration"
            for file, name in self._files[1].items()
            if not os.path.exists(file)  # noqa: PTH110 - Path.exists raises PermissionError
            and not any(str(file) in each for each in reported)
        ]

    def _space_problem(self) -> str:
        if self.free_space is None or self._store.unhealthy() is not Unhealthy.NO_SPACE:
            return ""
        least = space_guard(self._worker.settings.spool)
        if least <= self.free_space:
            return ""  # it was freed since the store looked
        return (
            f"only {rough_size(self.free_space)} are free on the disk of the spool, and new mail is "
            f"rejected below {rough_size(least)}; free {rough_size(least - self.free_space)} more"
        )

    def suspended(self, destination: DestinationKey) -> tuple[float | None, str]:
        """Return the time until which a destination is suspended, and the reply that caused the
        suspension.
        """
        for _, each in self._scheduler.destinations():
            if each.key == destination and each.suspended_until is not None:
                return each.suspended_until, str(each.suspension.reply or "")
        return None, ""

    def _zone(self, queue: ZoneQueue) -> ZoneStatus:
        waiting = queue.ready + queue.deferred
        by_order = min(self.destinations.held_by_order[queue.zone], queue.held)
        suspended = waiting
        if not self._scheduler.zone(queue.zone).gate.is_closed:
            suspended = min(self.destinations.suspended[queue.zone], waiting)
        unreachable = min(self.destinations.unreachable[queue.zone], queue.ready)
        deferred = min(queue.deferred + unreachable, waiting - suspended)
        return ZoneStatus(
            name=queue.zone,
            ready=max(waiting - suspended - deferred, 0),
            active=queue.active,
            deferred=deferred,
            suspended=suspended + by_order,
            held=queue.held - by_order,
            oldest_seconds=queue.oldest,
        )


def _named_files(settings: Settings) -> dict[Path, str]:
    """Return the existing files that the configuration names, each with its option. Blocks."""
    found = {}
    for table in fields(settings):
        value = getattr(settings, table.name)
        rows = value if isinstance(value, tuple) else (value,)
        options = fields(rows[0]) if rows and is_dataclass(rows[0]) else ()
        for name in [each.name for each in options if "Path" in str(each.type)]:
            for paths in [getattr(row, name) for row in rows]:
                for path in paths if isinstance(paths, tuple) else (paths,):
                    if path is not None and os.path.isfile(path):  # noqa: PTH113 - raises no error
                        found[path] = f"{table.name}.{name}"
    return found


def _free_space(spool: SpoolSettings) -> int | None:
    """Return the free space in bytes of the spool directory that has the least. Blocks."""
    found = []
    for place in directories_of(spool):
        with contextlib.suppress(OSError):
            found.append(shutil.disk_usage(place).free)
    return min(found, default=None)


def _by_zone(counts: Mapping[QueueName, QueueCounts]) -> dict[str, QueueCounts]:
    """Return the counts of each zone, added up over its priorities."""
    zones: dict[str, QueueCounts] = {}
    for queue, count in counts.items():
        zones.setdefault(queue.zone, QueueCounts()).add(count)
    return zones
