"""The endpoints of a worker for operators: its control socket, and HTTP if there is no supervisor to serve
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from zonerelay.admin.health import ReadinessCheck
from zonerelay.admin.http import AdminError, AdminServer, ControlSocket
from zonerelay.config.settings import ListenerSettings, Settings
from zonerelay.control.frames import RelayHandler
from zonerelay.control.runner import Handler, Runner
from zonerelay.control.socket import WorkerSocket, control_socket_path
from zonerelay.control.status import StatusBoard
from zonerelay.inbound.cleanup.submit import Submit
from zonerelay.inbound.listen.http_listener import HttpService
from zonerelay.operations.answers import RelayStatus
from zonerelay.operations.errors import AnotherRelayError, ControlError
from zonerelay.operations.requests import Status
from zonerelay.process.tasks import Component, RetriedComponents
from zonerelay.process.threads import FILES
from zonerelay.worker.context import WorkerContext

if TYPE_CHECKING:
    from zonerelay.admin.operators import Operators, Sandbox


@dataclass(eq=False, repr=False)
class Endpoints:
    """The sockets of a worker for operators. Call `open` once, and `close` even if `open` has failed.
    `settings` returns the active configuration. `submit` accepts mail that is submitted over HTTP.
    """

    context: InitVar[WorkerContext]
    handler: Handler
    _: KW_ONLY
    settings: Callable[[], Settings]
    board: StatusBoard
    readiness: ReadinessCheck
    submit: Submit
    sandbox: Sandbox | None

    def __post_init__(self, context: WorkerContext) -> None:
        self._identity, self._events, self._clock = context.identity, context.events, context.clock
        self._admin: AdminServer | None = None
        self.parts = RetriedComponents(
            context.events.error, lambda part: context.events.lifecycle("restored", part=part)
        )
        self._operators: list[Operators] = []

    @property
    def http_port(self) -> int | None:
        return None if self._admin is None else self._admin.port

    async def open(self) -> None:
        """Open the endpoints. An endpoint that cannot be opened is retried in the background while mail is
        processed. Raise ControlError if another relay answers, or if the supervisor could not reach this
        worker.
        """
        identity, settings = self._identity, self.settings()

        on_error = self._events.error
        final = ControlError if identity.supervised else AnotherRelayError
        control: Component
        if identity.supervised:
            path = control_socket_path(settings, identity.index)
            control = WorkerSocket(path, self.handler, on_error=on_error)
        else:
            control = ControlSocket(control_socket_path(settings), self._own_operators, on_error=on_error)
        what = "commands cannot be processed", "control-socket"
        await self.parts.open(*what, control, ControlError, final=(final,))
        if settings.admin.address and not identity.supervised:
            await self._serve_http(settings)

    async def _serve_http(self, settings: Settings) -> None:
        admin = self._admin = AdminServer(
            settings.admin,
            operators=self._own_operators,
            metrics=self._events.metrics.exposition,
            readiness=self.readiness,
            inherited=self._identity.inherited,
            on_error=self._events.error,
            before_metrics=self.board.refresh,
        )
        await self.parts.open("HTTP is not served", "admin-http", admin, AdminError)

    async def open_http(self, rules: Callable[[], ListenerSettings], submit: Submit) -> HttpService:
        """Return the HTTP server of a listener. It queries the supervisor, if there is one, about mail that
        another worker holds.
        """
        await FILES.run(import_module, "zonerelay.admin.submission.server")
        from zonerelay.admin.submission.server import SubmissionServer  # noqa: PLC0415 - with the first client

        operators = self._build_operators(self._relay(), submit, rules)
        return SubmissionServer(operators, rules)

    def _own_operators(self) -> Operators:
        return self._build_operators(self.handler, self.submit)

    def _relay(self) -> Handler:
        """Return the handler that answers for the whole relay."""
        if self._identity.supervised:
            return RelayHandler(control_socket_path(self.settings()))
        return self.handler

    async def relay_status(self) -> RelayStatus:
        """Return the status of the whole relay. Raise ControlError."""
        return await Runner(self._relay(), self._events.error).one(Status(), RelayStatus, "report")

    def _build_operators(
        self,
        handler: Handler,
        submit: Submit,
        rules: Callable[[], ListenerSettings] | None = None,
    ) -> Operators:
        from zonerelay.admin.operators import Operators  # noqa: PLC0415 - with the first connection

        built = Operators(
            handler,
            self.settings,
            on_error=self._events.error,
            audit=self._events.requested,
            clock=self._clock,
            submit=submit,
            listener=rules,
            sandbox=self.sandbox,
        )
        self._operators.append(built)
        return built

    async def close(self) -> None:
        """Close the endpoints. Call it before the store is closed."""
        await self.parts.close()
        for each in self._operators:
            await each.asking.close()
        await self.board.close()
        await self.readiness.close()
