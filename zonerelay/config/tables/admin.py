"""[log] and [admin]: the log on stderr, HTTP for monitoring, and the control socket."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.endpoints import parse_listen
from zonerelay.config.options import forms
from zonerelay.config.options.options import choice, optional_path, switch, text, texts


class LogFormat(enum.StrEnum):
    JSON = "json"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """[log]"""

    format: LogFormat = choice(LogFormat.JSON)
    """json: one object per line for collectors; text: key=value for people. On stderr."""
    redact: bool = switch(True)
    """Replace addresses in log text by stable pseudonyms (a keyed hash), so that logs hold no personal data
    and can still be searched.
    """
    redact_key_file: Path | None = optional_path()
    """The key of those pseudonyms. Empty: a key of its own, made beside the spool. Share one file between
    machines whose logs are to be joined.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSettings:
    """[admin]. `address` empty: no HTTP at all. `socket` empty: `control.sock` beside the spool."""

    address: str = text("127.0.0.1:8025", form=forms.listen, optional=True)
    """HTTP: /metrics, /healthz, /readyz. Empty: none at all."""
    hosts: tuple[str, ...] = texts((), form=forms.domain)
    """Names by which HTTP may be asked for besides localhost and addresses ("*.example.org": every name below
    it), so that no web page comes here under a name of its own. On another address than loopback /metrics,
    /healthz and /readyz answer to every name.
    """
    token_file: Path | None = optional_path()
    """A file with the bearer token for writes over HTTP. There are none yet: nothing reads it."""
    socket: Path | None = optional_path()
    """The Unix socket that the command line talks to; its file rights decide who may. Empty: control.sock
    beside the spool.
    """


def admin_advice(admin: AdminSettings) -> list[str]:
    if not admin.address or parse_listen(admin.address).is_loopback:
        return []
    return [
        f"admin.address: metrics and health at {admin.address} can be read from other machines "
        "(nothing can be changed there)"
    ]
