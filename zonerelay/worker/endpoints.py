"""Opens a worker's endpoints for operators: the control socket, and HTTP if there is no supervisor to serve
it. A part that a reload may replace is looked up when needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from zonerelay.admin.http import AdminError, AdminServer, ControlSocket
from zonerelay.config.settings import ListenerSettings, ZoneSettings
from zonerelay.control.explain import Explainer
from zonerelay.control.handler import Bodies, ControlHandler
from zonerelay.control.orders import OrderAnswers
from zonerelay.control.runner import Handler, Runner
from zonerelay.control.socket import CallSocket, RelayHandler, control_socket_path, relay_socket_path
from zonerelay.control.streams import LiveStreams
from zonerelay.inbound.cleanup.submit import Submit
from zonerelay.inbound.listen.http_listener import HttpService
from zonerelay.operations.answers import RelayStatus
from zonerelay.operations.errors import AnotherRelayError, ControlError
from zonerelay.operations.requests import Status
from zonerelay.process.tasks import Component, RetriedComponents
from zonerelay.process.threads import FILES
from zonerelay.queue.operator.clock_watch import NAME
from zonerelay.store.open import acknowledge_loss
from zonerelay.worker.status import StatusBoard
from zonerelay.worker.worker import Worker

if TYPE_CHECKING:
    from zonerelay.admin.operators import Operators, Sandbox


class Endpoints:
    """The endpoints of a worker for operators: the control socket and the HTTP server. Call `open` once, and
    `close` even if `open` has failed.
    """

    def __init__(self, worker: Worker, sandbox: Sandbox | None) -> None:
        self._worker = worker
        self._sandbox = sandbox
        self._events = worker.events
        worker.opened = RetriedComponents(
            self._events.error, lambda part: self._events.lifecycle("restored", part=part)
        )
        self._operators: list[Operators] = []
        orders = OrderAnswers(worker.orders, worker.operations, lambda: worker.zones.names)
        self.board = StatusBoard(worker, orders)
        worker.metrics.read(self.board.figures)
        worker.handler = _build_handler(worker, self.board, orders)

    async def open(self) -> None:
        """Open the endpoints. An endpoint that cannot be opened is retried in the background while mail is
        processed. Raise ControlError if another relay answers, or if the supervisor could not reach this
        worker.
        """
        identity, settings = self._worker.identity, self._worker.settings
        on_error = self._events.error
        final = ControlError if identity.supervised else AnotherRelayError
        control: Component
        if identity.supervised:
            path = control_socket_path(settings, identity.index)
            control = CallSocket(path, self._worker.handler, on_error=on_error)
        else:
            control = ControlSocket(control_socket_path(settings), self._own_operators, on_error=on_error)
        what = "commands cannot be processed", "control-socket"
        await self._worker.opened.open(*what, control, ControlError, final=(final,))
        if settings.admin.address and not identity.supervised:
            http = self._worker.http = AdminServer(
                settings.admin,
                self.board,
                self._own_operators,
                events=self._events,
                clock=self._worker.clock,
                inherited=identity.inherited,
            )
            await self._worker.opened.open("HTTP is not served", "admin-http", http, AdminError)

    async def open_http(self, rules: Callable[[], ListenerSettings], submit: Submit) -> HttpService:
        """Return the HTTP submission server of a listener. It queries the supervisor, if there is one, about
        mail that another worker holds.
        """
        await FILES.run(import_module, "zonerelay.admin.submission.server")
        from zonerelay.admin.submission.server import SubmissionServer  # noqa: PLC0415 - with the first client

        operators = self._build_operators(self._relay(), submit, rules)
        return SubmissionServer(operators, rules)

    def _own_operators(self) -> Operators:
        return self._build_operators(self._worker.handler, self._worker.listeners.submit)

    def _relay(self) -> Handler:
        """Return the handler that answers requests for the whole relay: the supervisor, or this worker if
        there is none.
        """
        if self._worker.identity.supervised:
            return RelayHandler(relay_socket_path(self._worker.settings))
        return self._worker.handler

    async def relay_status(self) -> RelayStatus:
        """Return the status of the whole relay. Raise ControlError."""
        return await Runner(self._relay(), self._events.error).one(Status(), RelayStatus, "report")

    def _build_operators(
        self, handler: Handler, submit: Submit, rules: Callable[[], ListenerSettings] | None = None
    ) -> Operators:
        from zonerelay.admin.operators import Operators  # noqa: PLC0415 - with the first connection

        built = Operators(
            handler,
            lambda: self._worker.settings,
            events=self._events,
            clock=self._worker.clock,
            submit=submit,
            listener=rules,
            sandbox=self._sandbox,
        )
        self._operators.append(built)
        return built

    async def close(self) -> None:
        """Close the endpoints. Call it before the store is closed."""
        await self._worker.opened.close()
        for each in self._operators:
            await each.asking.close()
        await self.board.close()


def _build_handler(worker: Worker, board: StatusBoard, orders: OrderAnswers) -> ControlHandler:
    context, operations, courier = worker.context, worker.operations, worker.sending.courier
    return ControlHandler(
        operations=operations,
        status=board.status,
        explainer=_build_explainer(worker, board, orders),
        orders=orders,
        redactor=context.redactor,
        bodies=_build_bodies(worker),
        streams=LiveStreams(worker.events, context.redactor, courier.join),
        phase_of=courier.phase_of,
        turn_of=board.destinations.waiting_for_rate,
        acknowledge=partial(_acknowledge, worker),
        refresh=board.refresh,
        unready=board.readiness,
        webhooks=lambda: worker.webhooks,
        history=worker.history,
    )


async def _acknowledge(worker: Worker, loss: str) -> bool:
    """Dismiss a loss of the spool, or confirm a forward jump of the clock. Return false if there is none."""
    if loss == NAME:
        return worker.clock_watch.confirm()
    return await acknowledge_loss(worker.queue.spool, loss)


def _build_bodies(worker: Worker) -> Bodies:
    def zone(name: str) -> ZoneSettings | None:
        found = worker.scheduler.zone(name)
        return found.settings if found.is_served else None

    return Bodies(worker.store, worker.sending.renderer, zone=zone, read=worker.events.body_read)


def _build_explainer(worker: Worker, board: StatusBoard, orders: OrderAnswers) -> Explainer:
    sending, listeners = worker.sending, worker.listeners
    return Explainer(
        zones=worker.zones,
        router=sending.router,
        resolver=sending.resolver,
        hostname=worker.context.hostname,
        clock=worker.clock,
        selection=sending.sources,
        listeners=lambda: worker.settings.listener,
        rewriting=lambda: listeners.rewriting,
        srs=lambda: sending.srs,
        keys=lambda: sending.dkim_keys,
        rails=listeners.guard.rails_of,
        credential=sending.logins.explain,
        suspended=board.suspended,
        learned=sending.courier.learned,
        orders=orders.about,
    )
