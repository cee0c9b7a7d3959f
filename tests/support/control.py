"""The control socket over any handler, as a relay serves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from zonerelay.admin.control_socket import ControlSocket
from zonerelay.admin.operators import build_operators
from zonerelay.config.settings import Settings, SpoolSettings
from zonerelay.control.runner import Handler
from zonerelay.inbound.cleanup.submit import Submit
from zonerelay.model.clock import SystemClock


def control_socket(
    path: Path, handler: Handler, trouble: Callable[[str, BaseException], None]
) -> ControlSocket:
    settings = Settings(spool=SpoolSettings(path=path.parent / "spool"))
    operators = build_operators(
        handler,
        lambda: settings,
        on_error=trouble,
        audit=lambda fields: None,
        clock=SystemClock(),
        submit=cast("Submit", None),
    )
    return ControlSocket(path, lambda: operators, on_error=trouble)
