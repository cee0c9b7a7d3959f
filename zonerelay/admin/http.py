"""Listens for HTTP requests on the admin address, and on the control socket for users of this machine.

The relay binds both when it starts. If the address is in use, mail is still processed, and the owner tries
again (`process/tasks`). aiohttp is loaded at the first connection, in a thread: with its certificate
authorities it takes a fifth of the memory of an idle relay and of its start time. If loading fails,
`on_error` is called with the error, and the socket refuses connections from then on.

The control socket exists whether or not `[admin]` has an address. At the end, its file is removed if it is
still the relay's own. `http_server` and `peers` have the servers.
"""

from __future__ import annotations

import abc
import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from zonerelay.config.endpoints import parse_listen
from zonerelay.config.settings import AdminSettings, ListenerSettings
from zonerelay.control.runner import OnError
from zonerelay.control.socket import bind
from zonerelay.inbound.listen.listening_socket import bound, explained
from zonerelay.model.clock import Clock
from zonerelay.process.files import identity
from zonerelay.process.sockets import NOTHING, InheritedSockets
from zonerelay.process.threads import STATUS
from zonerelay.routing.addresses import Networks
from zonerelay.telemetry.events.events import Events

if TYPE_CHECKING:
    import ssl

    from zonerelay.admin.http_server import Monitored
    from zonerelay.admin.operators import Operators
    from zonerelay.inbound.tls.certificates import Certificates

_BACKLOG = 64


class AdminError(Exception):
    """The HTTP server cannot be started on the `[admin]` address. The text explains what to do."""


class _Server(Protocol):
    """The interface of an HTTP server that accepts clients at a listening socket."""

    async def start(self, listener: socket.socket, backlog: int) -> None: ...
    async def close(self) -> None: ...


class _LazyServer(abc.ABC):
    """A listening socket whose HTTP server is imported only when the first client connects. `_load` runs in a
    thread, and returns the function that makes the server. `where` names the server in errors.
    """

    def __init__(self, where: str, on_error: OnError) -> None:
        self._where = where
        self._on_error = on_error
        self._listener: socket.socket | None = None
        self._opening: asyncio.Task[None] | None = None
        self._server: _Server | None = None

    @abc.abstractmethod
    def _load(self) -> Callable[[], _Server]: ...

    def _listen(self, listener: socket.socket) -> None:
        """Listen, and load the HTTP server when the first client connects. The kernel queues clients until
        the server is loaded.
        """
        listener.listen(_BACKLOG)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._first_connection, listener)

    def _first_connection(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        self._opening = loop.create_task(self._open(listener))

    async def _open(self, listener: socket.socket) -> None:
        try:
            make = await STATUS.run(self._load)
            self._server = make()
            await self._server.start(listener, _BACKLOG)
        except Exception as error:  # noqa: BLE001 - monitoring sees it, mail goes on
            self._on_error(self._where, error)
            listener.close()

    async def close(self) -> None:
        """Stop listening, and close the connections."""
        if self._opening is not None:
            await self._opening
        elif self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
        if self._server is not None:
            await self._server.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class AdminServer(_LazyServer):
    """The HTTP server of the `[admin]` address. `operators` is called at the first connection."""

    def __init__(
        self,
        settings: AdminSettings,
        monitored: Monitored,
        operators: Callable[[], Operators],
        *,
        events: Events,
        clock: Clock,
        inherited: InheritedSockets = NOTHING,
    ) -> None:
        super().__init__("admin-http", events.error)
        self._settings = settings
        self._monitored, self._operators = monitored, operators
        self._handed = inherited.take(settings.address)
        self._address = parse_listen(settings.address)
        self._events, self._clock = events, clock
        self._certificates: Certificates | None = None

    @property
    def port(self) -> int | None:
        """The port of the listening socket, also if port 0 is configured, or None if nothing listens."""
        if self._listener is None:
            return None
        name: tuple[str, int] = self._listener.getsockname()
        return name[1]

    async def start(self) -> None:
        """Bind the admin address and listen on it. Raise AdminError on failure; then it may be called
        again.
        """
        if self._certificates is None and self._settings.certificate is not None:
            self._certificates = self._read(self._settings.certificate)
        if self._handed is None and self._address.is_unix:
            raise AdminError(f"the HTTP server requires an address and a port, not {self._address}")
        try:
            self._listen(self._handed or bound(self._address))
        except OSError as error:
            raise AdminError(f"cannot listen on {self._address} for HTTP: {explained(error)}") from error

    def _load(self) -> Callable[[], _Server]:
        from zonerelay.admin.http_server import HttpServer  # noqa: PLC0415 - aiohttp

        return lambda: HttpServer(
            is_loopback=self._address.is_loopback,
            monitored=self._monitored,
            operators=self._operators(),
            hosts=self._settings.hosts,
            proxies=Networks(self._settings.proxy_networks),
            tls=None if self._certificates is None else _context(self._certificates),
        )

    def problems(self) -> tuple[str, ...]:
        return () if self._certificates is None else self._certificates.problems

    def _read(self, certificate: Path) -> Certificates:
        # OpenSSL
        from zonerelay.inbound.tls.certificate_files import CertificateError  # noqa: PLC0415
        from zonerelay.inbound.tls.certificates import Certificates  # noqa: PLC0415

        key = () if self._settings.key is None else (self._settings.key,)
        served = ListenerSettings(address=self._settings.address, certificate=(certificate,), key=key)
        try:
            return Certificates(served, clock=self._clock, events=self._events)
        except (CertificateError, OSError) as error:
            raise AdminError(f"admin HTTP: {error}") from error


def _context(certificates: Certificates) -> ssl.SSLContext:
    """Return a TLS context that presents the certificate that is current when a client connects."""

    def current() -> ssl.SSLContext:
        return cast("ssl.SSLContext", certificates.context())  # no certificate is requested from clients

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, of: ssl.SSLContext) -> None:
        connection.context = current()

    first = current()
    first.sni_callback = choose  # called whether or not the client names a server
    return first


class ControlSocket(_LazyServer):
    """Serves HTTP `/v1/` on the control socket, a Unix socket next to the spool. `operators` is called at the
    first connection.
    """

    def __init__(self, path: Path, operators: Callable[[], Operators], *, on_error: OnError) -> None:
        super().__init__("control", on_error)
        self._path = path
        self._operators = operators
        self._identity: tuple[int, int] | None = None

    async def start(self) -> None:
        """Listen. Raise ControlError with the remedy if that is not possible."""
        listener = bind(self._path)
        self._identity = identity(self._path)
        self._listen(listener)

    async def close(self) -> None:
        """Stop listening, close the connections, and remove the socket file unless it was replaced."""
        if self._listener is not None and identity(self._path) == self._identity:
            self._path.unlink(missing_ok=True)
        await super().close()

    def _load(self) -> Callable[[], _Server]:
        from zonerelay.admin.peers import PeerServer  # noqa: PLC0415 - aiohttp

        return lambda: PeerServer(self._operators())
