"""The control socket over any handler, as a relay serves it, and the workers that a supervisor asks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tests.support.event_log import EventLog
from zonerelay.admin.http import ControlSocket
from zonerelay.admin.operators import Operators
from zonerelay.config.settings import Settings, SpoolSettings
from zonerelay.control.client import LINES, written
from zonerelay.control.runner import Handler
from zonerelay.inbound.cleanup.submit import Submit
from zonerelay.model.clock import SystemClock
from zonerelay.model.envelope import MessageId
from zonerelay.operations.answers import RelayStatus
from zonerelay.operations.requests import Request
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.metrics import Metrics


class _Troubles(Events):
    """Passes errors on instead of logging them."""

    def __init__(self, trouble: Callable[[str, BaseException], None]) -> None:
        super().__init__(EventLog(), Metrics(), Redactor(b"", enabled=False), SystemClock())
        self._trouble = trouble

    def error(self, where: str, error: BaseException, *, message_id: MessageId | None = None) -> None:
        self._trouble(where, error)


def control_socket(
    path: Path, handler: Handler, trouble: Callable[[str, BaseException], None]
) -> ControlSocket:
    settings = Settings(spool=SpoolSettings(path=path.parent / "spool"))
    operators = Operators(
        handler, lambda: settings, events=_Troubles(trouble), clock=SystemClock(), submit=cast("Submit", None)
    )
    return ControlSocket(path, lambda: operators, on_error=trouble)


def sent(request: Request) -> bytes:
    """What the command line sends for a request."""
    method, target, body = written(request)
    fields = f"Host: localhost\r\nAccept: {LINES}\r\nContent-Type: application/json\r\n"
    body = body or b""
    head = f"{method} {target} HTTP/1.1\r\n{fields}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def raise_trouble(where: str, error: BaseException) -> None:
    raise AssertionError(where) from error


@dataclass
class Workers:
    """Satisfies `fan_out.Relay`: the sockets of workers that are all there."""

    paths: Mapping[int, Path]
    summed: RelayStatus | None = None
    shared = False

    def sockets(self) -> Mapping[int, Path]:
        return self.paths

    def unreachable(self) -> Mapping[int, str]:
        return {}

    def status(self) -> RelayStatus:
        assert self.summed is not None, "nobody asks"
        return self.summed
