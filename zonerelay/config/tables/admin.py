"""[admin]: HTTP for monitoring, and the control socket."""

# ruff: noqa: RUF009  (the makers return dataclasses.field(), which is what that rule asks for)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.options.endpoints import parse_listen
from zonerelay.config.options.options import (
    Form,
    optional_path,
    text,
    texts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSettings:
    """[admin]. `address` empty: no HTTP at all. `socket` empty: `control.sock` beside the spool."""

    address: str = text(
        "127.0.0.1:8025",
        "HTTP: /metrics, /healthz, /readyz. Empty: none at all.",
        form=Form.LISTEN,
        optional=True,
    )
    hosts: tuple[str, ...] = texts(
        (),
        'Names by which HTTP may be asked for besides localhost and addresses ("*.example.org": every name '
        "below it), so that no web page comes here under a name of its own. On another address than loopback "
        "/metrics, /healthz and /readyz answer to every name.",
        form=Form.DOMAINS,
    )
    token_file: Path | None = optional_path(
        "A file with the bearer token for writes over HTTP. There are none yet: nothing reads it."
    )
    socket: Path | None = optional_path(
        "The Unix socket that the command line talks to; its file rights decide who may. Empty: "
        "control.sock beside the spool."
    )


def admin_advice(admin: AdminSettings) -> list[str]:
    if not admin.address or parse_listen(admin.address).is_loopback:
        return []
    return [
        f"admin.address: metrics and health at {admin.address} can be read from other machines "
        "(nothing can be changed there)"
    ]
