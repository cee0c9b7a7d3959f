"""The control socket's file: where it is, how it is made and when it may be removed.

Every refusal is a ControlError that says what to do.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay.operations.errors import AnotherRelayError, ControlError

if TYPE_CHECKING:
    from zonerelay.config.settings import Settings  # commands that ask a relay do without

SOCKET_MODE = 0o600
"""Only root and the relay's own user operate the queue."""

_ANSWER_TIMEOUT = 2.0


def bind(path: Path) -> socket.socket:
    """A bound socket that does not listen yet. Raises ControlError."""
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        # No client can connect before listen(), so there is no moment with a wider mode.
        path.chmod(SOCKET_MODE)
    except OSError as error:
        listener.close()
        raise ControlError(_explained(path, error)) from error
    return listener


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode, so that a relay removes its own socket file and not a successor's."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def refuse_live(path: Path) -> None:
    """Raises ControlError when a relay answers there."""
    if path.is_socket() and answers(path):
        raise AnotherRelayError(
            f"another relay answers at {path}: stop it, or give this one another [admin] socket"
        )


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # bind() says what is wrong, if anything is
    if not stat.S_ISSOCK(mode):
        raise ControlError(f"{path} is in the way of the control socket and is not a socket: move it")
    refuse_live(path)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ControlError(f"cannot remove the left-over {path}: {error.strerror}") from error


def answers(path: Path) -> bool:
    """Anything but a refusal counts as an answer: a busy relay's socket must not be taken away."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ANSWER_TIMEOUT)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
        return True


def _explained(path: Path, error: OSError) -> str:
    match error:
        case FileNotFoundError():
            return f"no directory {path.parent} for the control socket: create it, or set [admin] socket"
        case PermissionError():
            return (
                f"no permission to create the control socket {path} as user {os.getuid()}: "
                "give the relay's user its directory, or set [admin] socket"
            )
    return f"cannot create the control socket {path}: {error.strerror or error}"


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


def submission_socket_path(settings: Settings, worker: int) -> Path:
    """Returns the path of the socket on which a worker takes mail from the supervisor's HTTP server: beside
    its control socket. Raises ControlError.
    """
    return control_socket_path(settings, worker).with_name(f"http-{worker:02d}.sock")


def limits_socket_path(settings: Settings) -> Path:
    """Returns the path of the socket of the workers' common limits: beside the control socket."""
    return control_socket_path(settings, 0).with_name(LIMITS_NAME)
