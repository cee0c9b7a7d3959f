"""Defines the components that all zones of a scheduler share."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from zonerelay.config.settings import RetrySettings
from zonerelay.limits.worker.keeper import LimitKeeper
from zonerelay.model.clock import Clock
from zonerelay.queue.contract import Courier, Router
from zonerelay.queue.orders.orders import Orders
from zonerelay.queue.selection import BacklogThrottle
from zonerelay.queue.settle.settler import Settler
from zonerelay.store.contract import QueueStore
from zonerelay.telemetry.events.events import Events


@dataclass(frozen=True, slots=True)
class ZoneParts:
    """The components that all zones of a scheduler share. A reload replaces `retry`."""

    store: QueueStore
    router: Router
    courier: Courier
    settler: Settler
    retry: RetrySettings
    events: Events
    clock: Clock
    random: Random
    limits: LimitKeeper | None = None
    """Set if other workers share the limits."""
    orders: Orders | None = None
    """Suspensions and hold rules of operators."""
    throttle: BacklogThrottle | None = None
