"""The listening socket of a listener: opened, or handed over by the process that started this one.

`start` says in words why an address cannot be used; nothing listens then.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from zonerelay.config.endpoints import join_port, parse_listen
from zonerelay.inbound.listen.binding import BACKLOG, ListenError, bound, explained, refuse_live_socket
from zonerelay.inbound.listen.sibling_sockets import SiblingSockets
from zonerelay.process.sockets import Inherited

MakeProtocol = Callable[[], asyncio.Protocol]


class ListeningSocket:
    """`inherited` are the sockets that this process was handed; `protocol` makes that of a new connection."""

    def __init__(self, inherited: Inherited, protocol: MakeProtocol) -> None:
        self._inherited = inherited
        self._protocol = protocol
        self._server: asyncio.Server | None = None
        self._siblings: SiblingSockets | None = None
        self._path: Path | None = None

    @property
    def addresses(self) -> list[str]:
        """The addresses that the socket is bound to, as in the configuration; empty before `start`."""
        if self._server is None:
            return []
        names = [each.getsockname() for each in self._server.sockets]
        return [f"unix:{name}" if isinstance(name, str) else join_port(name[0], name[1]) for name in names]

    async def start(self, address: str) -> None:
        """Raises ListenError."""
        try:
            self._server = await self._listen(address)
        except ValueError as error:
            raise ListenError(f"cannot listen on {address}: {error}") from error
        except OSError as error:
            raise ListenError(f"cannot listen on {address}: {explained(error)}") from error

    async def start_at(self, bound_socket: socket.socket) -> None:
        """A Unix socket."""
        self._path = Path(bound_socket.getsockname())
        self._server = await _unix_server(self._protocol, bound_socket)

    async def _listen(self, text: str) -> asyncio.Server:
        loop, address = asyncio.get_running_loop(), parse_listen(text)
        handed = self._inherited.take(text)
        if handed is not None:
            others, spare = self._inherited.take_others(text), self._inherited.take_spare(text)
            self._siblings = SiblingSockets(others, self._protocol, spare=spare) if others or spare else None
            # It stays open elsewhere when this process closes it.
            if handed.family == socket.AF_UNIX:
                return await _unix_server(self._protocol, handed)
            return await loop.create_server(self._protocol, sock=handed, backlog=BACKLOG)
        if address.is_unix:
            path = Path(address.path)
            refuse_live_socket(path)
            server = await loop.create_unix_server(self._protocol, address.path, backlog=BACKLOG)
            self._path = path
            return server
        return await loop.create_server(self._protocol, sock=bound(address), backlog=BACKLOG)

    def close(self) -> None:
        """Connections stay."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        if self._siblings is not None:
            self._siblings.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


async def _unix_server(protocol: MakeProtocol, given: socket.socket) -> asyncio.Server:
    return await asyncio.get_running_loop().create_unix_server(protocol, sock=given, backlog=BACKLOG)
