"""The parts of one worker, as its endpoints and its status need them."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zonerelay.history.writer import History
from zonerelay.inbound.listen.listeners import Listeners
from zonerelay.model.envelope import MessageIdSource
from zonerelay.queue.operator.clock_watch import ClockWatch
from zonerelay.queue.operator.journal import Bin
from zonerelay.queue.operator.operations import Operations
from zonerelay.queue.orders.orders import Orders
from zonerelay.queue.scheduler import Scheduler
from zonerelay.queue.settle.settler import Settler
from zonerelay.routing.zones.zones import Zones
from zonerelay.worker.context import WorkerContext
from zonerelay.worker.outbound import OutboundSide
from zonerelay.worker.queue import MailQueue
from zonerelay.worker.tables import Tables

if TYPE_CHECKING:
    from zonerelay.webhook.webhooks import Webhooks  # most relays have none


@dataclass(eq=False, repr=False, kw_only=True)
class WorkerParts(abc.ABC):
    """The parts of one worker. `settings` are the active ones."""

    tables: Tables
    context: WorkerContext
    queue: MailQueue
    zones: Zones
    ids: MessageIdSource
    scheduler: Scheduler
    settler: Settler
    sending: OutboundSide
    listeners: Listeners
    orders: Orders
    operations: Operations
    dropped: Bin
    clock_watch: ClockWatch
    history: History | None
    webhooks: Webhooks | None = None
    """None until a webhook is configured, or the spool has events of one."""

    def __post_init__(self) -> None:
        context = self.context
        self.settings, self.store = self.tables.settings, self.queue.store
        self.identity, self.events, self.clock = context.identity, context.events, context.clock
        self.metrics = self.events.metrics
        self.taken_up = self.clock.now()
        """The time at which the active configuration was loaded."""
        self.refused_at: float | None = None
        """The time at which the last reload was refused, or None."""
        self.draining = False

    @abc.abstractmethod
    def all_problems(self) -> tuple[str, ...]:
        """Return the problems of all parts."""
