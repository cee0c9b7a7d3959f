"""Finds the control socket of a running relay from the system's information about its process.

A configuration file that has changed since the start, or is no longer readable, may name a different socket
from the one on which the relay listens. Only root and the relay's own user can inspect the process, and they
are the users who may use the socket.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zonerelay.control.client import ControlClient
from zonerelay.operations.errors import ControlError
from zonerelay.operations.requests import Ping

TIMEOUT = 2.0
_LISTENS = "00010000"
"""The flag __SO_ACCEPTCON in /proc/net/unix."""


def control_socket_of(config: Path) -> Path | None:
    """Return the control socket of a process that was started with this configuration file."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if _serves_with(process, config):
                for path in _listening(process):
                    if _is_control(path):
                        return path
        except OSError:
            continue  # the process has ended, or belongs to another user
    return None


def _serves_with(process: Path, config: Path) -> bool:
    words = (process / "cmdline").read_bytes().decode("utf-8", "surrogateescape").split("\0")
    if "serve" not in words:
        return False
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--config":
            given = value if equals else words[at + 1]
            place = process / "cwd" / given
            if place.exists() and config.exists():
                return place.samefile(config)
            # the process or the file no longer exists
            return not place.exists() and place.resolve() == config.resolve()
    return False


def _listening(process: Path) -> Iterator[Path]:
    own = {str(each.readlink()) for each in (process / "fd").iterdir()}
    for line in (process / "net" / "unix").read_text(errors="surrogateescape").splitlines()[1:]:
        columns = line.split(maxsplit=7)
        if len(columns) == 8 and columns[3] == _LISTENS and f"socket:[{columns[6]}]" in own:
            yield Path(columns[7])


def _is_control(path: Path) -> bool:
    try:
        list(ControlClient(path, timeout=TIMEOUT).stream(Ping()))
    except ControlError:
        return False
    return True
