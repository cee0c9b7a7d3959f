"""Listens for HTTP requests of monitoring systems and operators. `http_server` has the rest.

The relay binds the address when it starts. If the address is in use, mail is still processed, and the owner
tries again (`process/tasks`). aiohttp is loaded at the first connection, in a thread: with its certificate
authorities it takes a fifth of the memory of an idle relay and of its start time. If loading fails,
`on_error` is called with the error, and the address refuses connections from then on.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import TYPE_CHECKING

from zonerelay.config.endpoints import ListenAddress, parse_listen
from zonerelay.config.settings import AdminSettings
from zonerelay.control.runner import OnError
from zonerelay.inbound.listen.listening_socket import bound, explained
from zonerelay.process.sockets import NOTHING, InheritedSockets
from zonerelay.process.threads import STATUS
from zonerelay.routing.addresses import Networks

if TYPE_CHECKING:
    import ssl

    from zonerelay.admin.http_server import HttpServer
    from zonerelay.admin.monitoring import Monitoring
    from zonerelay.admin.operators import Operators

_BACKLOG = 64


class AdminError(Exception):
    """The HTTP server of the admin address cannot be started. The text explains what to do."""


@dataclass(eq=False, repr=False)
class AdminServer:
    """The HTTP server of the `[admin]` address. `metrics` returns the exposition, and `before_metrics` is
    awaited before it to update slow gauges. `readiness` returns the reasons why the relay is not ready.
    `operators` is called at the first connection; without it, only monitoring is served.
    """

    settings: AdminSettings
    _: KW_ONLY
    metrics: Callable[[], bytes]
    readiness: Callable[[], Awaitable[tuple[str, ...]]]
    on_error: OnError
    operators: Callable[[], Operators] | None = None
    before_metrics: Callable[[], Awaitable[None]] | None = None
    inherited: InitVar[InheritedSockets] = NOTHING

    def __post_init__(self, inherited: InheritedSockets) -> None:
        self._handed = inherited.take(self.settings.address)
        self._address = parse_listen(self.settings.address)
        self._listener: socket.socket | None = None
        self._opening: asyncio.Task[None] | None = None
        self._server: HttpServer | None = None
        self._tls: ssl.SSLContext | None = None

    @property
    def port(self) -> int | None:
        """The port of the listening socket, even if the configured port is 0, or None if there is none."""
        if self._listener is None:
            return None
        name: tuple[str, int] = self._listener.getsockname()
        return name[1]

    async def start(self) -> None:
        """Bind the address. Raise AdminError on failure; then it may be called again."""
        if self.settings.certificate is not None:
            from zonerelay.admin.tls import TlsError, server_context  # noqa: PLC0415 - OpenSSL

            try:
                self._tls = server_context(self.settings.certificate, self.settings.key, self.on_error)
            except TlsError as error:
                raise AdminError(f"admin HTTP: {error}") from error
        self._listener = self._handed or _listen(self._address)
        asyncio.get_running_loop().add_reader(self._listener, self._first_connection, self._listener)

    async def close(self) -> None:
        if self._opening is not None:
            await self._opening
        elif self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
        if self._server is not None:
            await self._server.close()
        if self._listener is not None:
            self._listener.close()

    def _first_connection(self, listener: socket.socket) -> None:
        """Load the server. The kernel queues the connection until then."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        self._opening = loop.create_task(self._open(listener))

    async def _open(self, listener: socket.socket) -> None:
        try:
            server, monitoring = await STATUS.run(_load)
            self._server = server(
                is_loopback=self._address.is_loopback,
                monitoring=monitoring(self.metrics, self.readiness, self.before_metrics),
                operators=None if self.operators is None else self.operators(),
                on_error=self.on_error,
                hosts=self.settings.hosts,
                proxies=Networks(self.settings.proxy_networks),
                tls=self._tls,
            )
            await self._server.start(listener, _BACKLOG)
        except Exception as error:  # noqa: BLE001 - monitoring sees it, mail goes on
            self.on_error("admin-http", error)
            listener.close()


def _load() -> tuple[type[HttpServer], type[Monitoring]]:
    # aiohttp: see the module's header
    from zonerelay.admin.http_server import HttpServer  # noqa: PLC0415
    from zonerelay.admin.monitoring import Monitoring  # noqa: PLC0415

    return HttpServer, Monitoring


def _listen(address: ListenAddress) -> socket.socket:
    if address.is_unix:
        raise AdminError(f"the HTTP server requires an address and a port, not {address}")
    try:
        made = bound(address)
        made.listen(_BACKLOG)
    except OSError as error:
        raise AdminError(f"cannot listen on {address} for HTTP: {explained(error)}") from error
    return made
