"""The listening sockets of the relay, held by the supervisor and inherited by every worker.

One socket for each address, which all workers accept from: a client is taken by whoever is idle, and one who
comes while a worker is replaced waits for nobody, since the others go on and the socket never closes. (With
SO_REUSEPORT each worker has a queue of its own: clients in the queue of a worker that hangs or is replaced
would wait for it, and are reset when its socket closes. docs/workers.md has the measurements.)
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from zonerelay.config.endpoints import join_port, parse_listen
from zonerelay.inbound.binding import BACKLOG, bound, bound_path, explained
from zonerelay.inherited import Inherited


class BindError(Exception):
    """The text is for the operator."""


class Sockets:
    """`handed` are those that systemd has opened."""

    def __init__(self, handed: Inherited) -> None:
        self._handed = handed
        self._open: dict[str, socket.socket] = {}
        self._paths: dict[str, Path] = {}

    def open(self, addresses: Iterable[str]) -> None:
        """Listen at these too. Raises BindError, with nothing changed."""
        made: dict[str, socket.socket] = {}
        try:
            for address in addresses:
                if address not in self._open:
                    made[address] = self._listen(address)
        except BindError:
            for each in made.values():
                each.close()
            raise
        self._open |= made

    def keep(self, addresses: Iterable[str]) -> None:
        """Close all others. Their workers have closed them before."""
        for address in self._open.keys() - set(addresses):
            self._open.pop(address).close()
            path = self._paths.pop(address, None)
            if path is not None:
                path.unlink(missing_ok=True)

    def addresses(self) -> list[str]:
        """Where clients can connect, as in the configuration; ports that were 0 are the real ones."""
        names = [each.getsockname() for each in self._open.values()]
        return [f"unix:{name}" if isinstance(name, str) else join_port(name[0], name[1]) for name in names]

    def descriptors(self) -> tuple[int, ...]:
        """For a new process to inherit."""
        return tuple(each.fileno() for each in self._open.values())

    def as_text(self) -> str:
        """For its environment (`place.SOCKETS`)."""
        return json.dumps({address: each.fileno() for address, each in self._open.items()})

    def _listen(self, text: str) -> socket.socket:
        handed = self._handed.take(text)
        if handed is not None:
            return handed
        address = parse_listen(text)
        try:
            made = bound_path(Path(address.path)) if address.is_unix else bound(address)
            made.listen(BACKLOG)
        except OSError as error:
            raise BindError(f"cannot listen on {text}: {explained(error)}") from error
        if address.is_unix:
            self._paths[text] = Path(address.path)
        os.set_blocking(made.fileno(), False)
        return made
