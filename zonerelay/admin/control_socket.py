"""Serves HTTP `/v1/` on the control socket, a Unix socket next to the spool for the users of this machine.

It exists whether or not `[admin]` has an address. aiohttp is loaded at the first connection, in a thread. If
that fails, `on_error` is called with the error, and the socket refuses connections from then on. At the end,
the socket file is removed if it is still the relay's own.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay.control.runner import OnError
from zonerelay.control.socket import bind
from zonerelay.process.files import identity
from zonerelay.process.threads import STATUS

if TYPE_CHECKING:
    from zonerelay.admin.operators import Operators
    from zonerelay.admin.peers import PeerServer

_BACKLOG = 16


class ControlSocket:
    """Serves HTTP on the control socket. `operators` is called at the first connection."""

    def __init__(self, path: Path, operators: Callable[[], Operators], *, on_error: OnError) -> None:
        self._path = path
        self._operators = operators
        self._on_error = on_error
        self._listener: socket.socket | None = None
        self._identity: tuple[int, int] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None
        self._peers: PeerServer | None = None

    async def start(self) -> None:
        """Listen. Raise ControlError with the remedy if that is not possible."""
        listener = bind(self._path)
        self._identity = identity(self._path)
        listener.listen(_BACKLOG)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._first_connection, listener)

    async def close(self) -> None:
        """Stop listening, close the connections, and remove the socket file if it is still ours."""
        if self._listener is None:
            return
        if identity(self._path) == self._identity:
            self._path.unlink(missing_ok=True)
        if self._opening is not None:
            await self._opening
        else:
            asyncio.get_running_loop().remove_reader(self._listener)
        if self._server is not None:
            self._server.close()
        self._listener.close()
        self._listener = None
        if self._peers is not None:
            await self._peers.close()

    def _first_connection(self, listener: socket.socket) -> None:
        """Load the server. The kernel queues the connection until then."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        self._opening = loop.create_task(self._open(listener))

    async def _open(self, listener: socket.socket) -> None:
        try:
            server = await STATUS.run(_load)
            self._peers = server(self._operators())
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(
                self._peers.connection, sock=listener, backlog=_BACKLOG
            )
        except Exception as error:  # noqa: BLE001 - monitoring sees it, mail goes on
            self._on_error("control", error)
            listener.close()


def _load() -> type[PeerServer]:
    from zonerelay.admin.peers import PeerServer  # noqa: PLC0415 - aiohttp

    return PeerServer
