"""Where the control socket of a relay is."""

from __future__ import annotations

from pathlib import Path

from zonerelay.config.settings import Settings
from zonerelay.control.socket.errors import ControlError

MAX_SOCKET_PATH = 107
"""Linux unix(7): `sun_path` holds 108 octets, the last of which is a NUL."""

SOCKET_NAME = "control.sock"
LIMITS_NAME = "limits.sock"


def control_socket_path(settings: Settings, worker: int | None = None) -> Path:
    """`[admin] socket`, or `control.sock` beside the spool; that of one of several workers is
    `control-01.sock`. Raises ControlError when it is too long.
    """
    path = (settings.admin.socket or settings.spool.path.parent / SOCKET_NAME).absolute()
    if worker is not None:
        path = path.with_name(f"{path.stem}-{worker:02d}{path.suffix}")
    length = len(bytes(path))
    if length > MAX_SOCKET_PATH:
        raise ControlError(
            f"the control socket's path is {length} bytes long and the system takes {MAX_SOCKET_PATH}: "
            f"set [admin] socket to a shorter one than {path}"
        )
    return path


def limits_socket_path(settings: Settings) -> Path:
    """Where the workers of a relay keep the totals of their limits: beside the control socket."""
    return control_socket_path(settings, 0).with_name(LIMITS_NAME)
