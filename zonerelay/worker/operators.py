"""Builds the parts of a worker that serve operators: its status, `explain`, and the commands on its queue.

`build` creates the other parts, and operators connect to `endpoints`. The module keeps no state: a part that
a reload may replace is looked up when it is needed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from zonerelay.config.settings import Settings, ZoneSettings
from zonerelay.control.acts import OperatorActs
from zonerelay.control.explain import Explainer
from zonerelay.control.handler import Bodies, ControlHandler
from zonerelay.control.orders import OrderAnswers
from zonerelay.control.status import StatusBoard
from zonerelay.control.streams import LiveStreams
from zonerelay.history.writer import History
from zonerelay.inbound.listen.listeners import Listeners
from zonerelay.model.message_id import MessageIdSource
from zonerelay.operations.answers import RelayStatus
from zonerelay.queue.operator.clock_watch import NAME, ClockWatch
from zonerelay.queue.operator.journal import Bin
from zonerelay.queue.operator.operations import Operations
from zonerelay.queue.orders.orders import Orders
from zonerelay.queue.scheduler import Scheduler
from zonerelay.queue.settle.settler import Settler
from zonerelay.routing.zones.zones import Zones
from zonerelay.store.open import acknowledge_loss
from zonerelay.worker.context import WorkerContext
from zonerelay.worker.outbound import MailReporter, OutboundSide
from zonerelay.worker.queue import MailQueue


class WorkerParts(msgspec.Struct, frozen=True, kw_only=True):
    """All parts of one worker."""

    context: WorkerContext
    queue: MailQueue
    zones: Zones
    ids: MessageIdSource
    scheduler: Scheduler
    settler: Settler
    sending: OutboundSide
    listeners: Listeners
    telling: MailReporter
    orders: Orders
    operations: Operations
    dropped: Bin
    clock_watch: ClockWatch


def build_operators(
    settings: Callable[[], Settings],
    parts: WorkerParts,
    *,
    status: Callable[[], Awaitable[RelayStatus]],
    unready: Callable[[], Awaitable[Sequence[str]]],
    history: History | None,
) -> tuple[StatusBoard, ControlHandler]:
    """Return the status of the queue and the handler of requests. `status` returns the status of the worker,
    and `settings` the active configuration.
    """
    context, sending = parts.context, parts.sending
    orders = OrderAnswers(
        parts.orders,
        parts.operations,
        store=parts.queue.store,
        scheduler=parts.scheduler,
        first_expiry=parts.settler.first_expiry,
        zones=lambda: parts.zones.names,
        clock=context.clock,
    )
    board = StatusBoard(
        settings=settings(),
        worker=context.identity.index,
        hostname=context.hostname,
        store=parts.queue.store,
        scheduler=parts.scheduler,
        zones=parts.zones,
        connections=sending.courier.pool.open_connections,
        sources=sending.sources,
        name_servers=sending.resolver.watch.state,
        limits=lambda: "" if sending.limits is None else sending.limits.status,
        history=history,
        orders=orders.rows,
        in_force=parts.orders,
        clock=context.clock,
    )
    handler = ControlHandler(
        operations=parts.operations,
        status=status,
        explainer=_build_explainer(settings, parts, board, orders),
        orders=orders,
        redactor=context.redactor,
        bodies=_build_bodies(parts),
        acts=OperatorActs(parts.operations, parts.operations.journal, parts.zones, context.clock),
        streams=LiveStreams(context.events, context.redactor, sending.courier.join),
        phase_of=sending.courier.phase_of,
        turn_of=board.destinations.waiting_for_rate,
        acknowledge=partial(_acknowledge, parts),
        refresh=board.refresh,
        families=context.events.metrics.families,
        unready=unready,
        webhooks=lambda: parts.telling.webhooks,
        history=history,
    )
    return board, handler


async def _acknowledge(parts: WorkerParts, loss: str) -> bool:
    """Dismiss a loss of the spool, or confirm a leap of the clock."""
    if loss == NAME:
        return parts.clock_watch.confirm()
    return await acknowledge_loss(parts.queue.spool, loss)


def _build_bodies(parts: WorkerParts) -> Bodies:
    def zone(name: str) -> ZoneSettings | None:
        found = parts.scheduler.zone(name)
        return found.settings if found.is_served else None

    return Bodies(parts.queue.store, parts.sending.renderer, zone=zone, read=parts.context.events.body_read)


def _build_explainer(
    settings: Callable[[], Settings], parts: WorkerParts, board: StatusBoard, orders: OrderAnswers
) -> Explainer:
    sending, listeners = parts.sending, parts.listeners
    return Explainer(
        zones=parts.zones,
        router=sending.router,
        resolver=sending.resolver,
        hostname=parts.context.hostname,
        clock=parts.context.clock,
        selection=sending.sources,
        listeners=lambda: settings().listener,
        rewriting=lambda: listeners.rewriting,
        srs=lambda: sending.srs,
        keys=lambda: sending.dkim_keys,
        rails=listeners.guard.rails_of,
        credential=sending.logins.explain,
        suspended=board.suspended,
        learned=sending.courier.learned,
        orders=orders.about,
    )
