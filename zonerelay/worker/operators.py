"""The operators' view of a worker: its status, `explain`, the operations of its queue.

`worker` builds the parts, `endpoints` are where operators connect. The module keeps no state: a part that a
reload may replace is looked up when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zonerelay.config.settings import Settings, ZoneSettings
from zonerelay.control.acts import OperatorActs
from zonerelay.control.bodies import Bodies
from zonerelay.control.explain.changes import ChangePlans, RewritePlans
from zonerelay.control.explain.explainer import Explainer
from zonerelay.control.explain.guard_rails import GuardPlans
from zonerelay.control.explain.sources import SourcePlans
from zonerelay.control.handler import ControlHandler, PartAnswers
from zonerelay.control.orders import OrderAnswers
from zonerelay.control.status import StatusBoard, Surface
from zonerelay.control.streams import Streams
from zonerelay.history.writer import History
from zonerelay.inbound.listen.listeners import Listeners
from zonerelay.model.clock import Clock
from zonerelay.queue.operator.journal import DIRECTORY, Journal
from zonerelay.queue.operator.operations import Operations
from zonerelay.queue.orders.orders import Orders
from zonerelay.queue.scheduler import Scheduler
from zonerelay.queue.settle.settler import Settler
from zonerelay.routing.zones.zones import Zones
from zonerelay.store.spool_paths import name_of
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.worker.outbound import Sending
from zonerelay.worker.queue import MailQueue
from zonerelay.worker.webhooks import TellsOthers


@dataclass(frozen=True, slots=True)
class Parts:
    """All parts of one worker, built."""

    hostname: str
    queue: MailQueue
    zones: Zones
    scheduler: Scheduler
    settler: Settler
    sending: Sending
    listeners: Listeners
    telling: TellsOthers
    orders: Orders
    events: Events
    redactor: Redactor
    clock: Clock


def build_board(settings: Settings, parts: Parts, surface: Callable[[], Surface]) -> StatusBoard:
    sending = parts.sending
    return StatusBoard(
        settings=settings,
        hostname=parts.hostname,
        store=parts.queue.store,
        scheduler=parts.scheduler,
        zones=parts.zones,
        connections=sending.courier.open_connections,
        sources=SourcePlans(sending.sources, hostname=parts.hostname),
        name_servers=sending.resolver.state,
        limits=lambda: "" if sending.limits is None else sending.limits.status,
        surface=surface,
        clock=parts.clock,
    )


def build_journal(settings: Settings, worker: int, clock: Clock) -> Journal:
    """The journal of acts is beside the spool, as the history is."""
    return Journal(settings.spool.path.parent / DIRECTORY / name_of(worker), clock)


def build_operations(parts: Parts, journal: Journal) -> Operations:
    return Operations(
        store=parts.queue.store,
        scheduler=parts.scheduler,
        settler=parts.settler,
        events=parts.events,
        clock=parts.clock,
        journal=journal,
    )


def build_handler(
    settings: Callable[[], Settings],
    parts: Parts,
    operations: Operations,
    acts: OperatorActs,
    board: StatusBoard,
    *,
    answers: PartAnswers,
    history: History | None,
) -> ControlHandler:
    orders = OrderAnswers(
        parts.orders,
        operations,
        store=parts.queue.store,
        scheduler=parts.scheduler,
        first_expiry=parts.settler.first_expiry,
        zones=lambda: parts.zones.names,
        clock=parts.clock,
    )
    explainer = _build_explainer(settings, parts, board, orders)
    board.orders = orders.rows
    return ControlHandler(
        operations,
        status=board.status,
        explainer=explainer,
        orders=orders,
        redactor=parts.redactor,
        bodies=_build_bodies(parts),
        acts=acts,
        streams=Streams(parts.events, parts.redactor),
        acknowledge=parts.queue.acknowledge,
        part=answers,
        webhooks=lambda: parts.telling.webhooks,
        history=history,
    )


def _build_bodies(parts: Parts) -> Bodies:
    def zone(name: str) -> ZoneSettings | None:
        found = parts.scheduler.zone(name)
        return found.settings if found.is_served else None

    return Bodies(parts.queue.store, parts.sending.renderer, zone=zone, read=parts.events.body_read)


def _build_explainer(
    settings: Callable[[], Settings], parts: Parts, board: StatusBoard, orders: OrderAnswers
) -> Explainer:
    sending, listeners, clock = parts.sending, parts.listeners, parts.clock
    return Explainer(
        parts.zones,
        sending.router,
        sending.resolver,
        hostname=parts.hostname,
        listeners=lambda: settings().listener,
        suspended=board.suspended,
        learned=sending.courier.learned,
        orders=orders.about,
        sources=SourcePlans(sending.sources, hostname=parts.hostname),
        rewrites=RewritePlans(lambda: listeners.rewriting, lambda: sending.srs, clock),
        credential=sending.logins.explain,
        changes=ChangePlans(lambda: sending.dkim_keys, lambda: sending.srs, clock),
        guard=GuardPlans(listeners.guard.rails_of, clock),
    )
