"""The wiring of shared limits in a worker: the authority they are leased from, and the parts that hear of
news.

Where the store is Redis or PostgreSQL it is the authority, because relays of other machines may share it.
Otherwise a worker that a supervisor started asks the supervisor, over a socket. Otherwise there is no
authority: the limits in the configuration are those of this worker alone, and shared limits cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zonerelay.config.settings import Settings
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.limits.shared import BookStore
from zonerelay.limits.unix_socket import SocketAuthority
from zonerelay.limits.worker.keeper import LimitKeeper
from zonerelay.model.clock import Clock
from zonerelay.queue.scheduler import Scheduler
from zonerelay.store.open import open_books, open_limits
from zonerelay.telemetry.events.subsystems import LimitEvents


class SharedLimits:
    """One per worker that shares limits."""

    def __init__(self, keeper: LimitKeeper, events: LimitEvents) -> None:
        self.keeper = keeper
        self._events = events
        self._scheduler: Scheduler | None = None
        self._courier: SmtpCourier | None = None
        keeper.observer = self

    def attach(self, scheduler: Scheduler, courier: SmtpCourier) -> None:
        self._scheduler, self._courier = scheduler, courier

    def problems(self) -> tuple[str, ...]:
        trouble = self.keeper.trouble
        return () if trouble is None else (trouble,)

    # What the keeper tells

    def granted(self, zone: str) -> None:
        if self._scheduler is not None:
            self._scheduler.granted(zone)
        if self._courier is not None:
            self._courier.granted()

    def relieve(self, zone: str) -> None:
        if self._courier is not None:
            self._courier.relieve(zone)

    def waited(self, zone: str, seconds: float) -> None:
        del zone  # a histogram for each would be many numbers for little
        self._events.waited(seconds)

    def out_of_reach(self, reason: str) -> None:
        self._events.lost(self.keeper.authority.name, reason)

    def back_in_reach(self) -> None:
        self._events.restored(self.keeper.authority.name)


def usage_pages(settings: Settings, environment: Mapping[str, str], clock: Clock) -> BookStore:
    """The store in which the usage of users is counted. Raises StoreOpenError."""
    shared = open_books(settings, environment)
    if shared is not None:
        return shared
    # SQLite, for users with quotas only.
    from zonerelay.inbound.limits.usage_file import UsageFile  # noqa: PLC0415

    return UsageFile(settings.spool.path.parent, clock)


def build_shared_limits(
    settings: Settings,
    *,
    socket: Path | None,
    holder: str,
    environment: Mapping[str, str],
    events: LimitEvents,
    clock: Clock,
) -> SharedLimits | None:
    """Raises StoreOpenError."""
    chosen = open_limits(settings, holder, environment)
    if chosen is None and socket is not None:
        chosen = SocketAuthority(socket, holder)
    if chosen is None:
        return None
    keeper = LimitKeeper(chosen, clock)
    events.read(keeper.figures)
    return SharedLimits(keeper, events)
